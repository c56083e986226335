"""The page lists the code's metrics, settings and losses."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from test_trl_trainers import LOSSES

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "integrations" / "trl.md").read_text()


def test_settings_and_metrics_are_on_the_page() -> None:
    from rlkernel_trl.config import RLKernelArguments

    for field in dataclasses.fields(RLKernelArguments):
        assert f"`{field.name}" in PAGE or f" {field.name}" in PAGE or f"{field.name}=" in PAGE, field.name
    source = "".join(p.read_text() for p in (ROOT / "integrations" / "rlkernel_trl").glob("*.py"))
    metrics = set(re.findall(r'metrics\["(rlkernel/\w+)"\]', source))
    assert len(metrics) == 5
    for name in metrics:
        assert f"`{name}`" in PAGE


def test_every_loss_of_trl_is_tested_and_listed() -> None:
    from trl import GRPOConfig as StockConfig

    known = next(f for f in dataclasses.fields(StockConfig) if f.name == "loss_type")
    listed = re.search(r"Supported values are (.*?)\. ", known.metadata["help"])
    assert listed is not None and set(re.findall(r"'(\w+)'", listed[1])) == set(LOSSES)
    for loss in LOSSES:
        assert loss in PAGE
