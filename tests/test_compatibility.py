"""The compatibility tables contain what the tests found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compatibility import PROPERTY, Compat, merged, stale

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks")]

import tables  # noqa: E402

ROW = {"stack": "vLLM", "feature": "decode", "verdict": "exact", "differing": 0, "numbers": 5, "test": "test_a"}


def test_verdicts_follow_from_numbers() -> None:
    item: Any = SimpleNamespace(name="test_x[case]", user_properties=[])
    compat = Compat(item)
    compat.compared("vLLM", "decode", 0, 5)
    compat.compared("vLLM", "control", 2, 5)
    compat.refused("vLLM", "quantization", ValueError("quantization: 'fp8'"))
    found = [(row["verdict"], row["test"]) for name, row in item.user_properties if name == PROPERTY]
    assert found == [("exact", "test_x"), ("differs", "test_x"), ("refused", "test_x")]
    with pytest.raises(AssertionError, match="nothing was compared"):
        compat.compared("vLLM", "decode", 0, 0)
    with pytest.raises(AssertionError, match="another setting"):
        compat.refused("vLLM", "quantization", ValueError("another setting"))
    with pytest.raises(AssertionError):
        compat.bitwise("vLLM", "decode", torch.zeros(2), torch.ones(2))
    assert len(item.user_properties) == 3


def test_a_run_with_different_findings_is_noticed() -> None:
    recorded = merged([ROW, {**ROW, "test": "test_b", "numbers": 7}])
    assert recorded[0]["numbers"] == 12 and recorded[0]["tests"] == ["test_a", "test_b"]
    assert stale([ROW], recorded, whole=False) == []
    assert stale([ROW], recorded, whole=True) == ["no longer found: vLLM, decode, exact, test_b"]
    for change in ({"verdict": "differs"}, {"feature": "prompt"}, {"test": "test_c"}):
        assert len(stale([{**ROW, **change}], recorded, whole=False)) == 1
    with pytest.raises(ValueError, match=r"exact in .*'test_a'.*, differs in test_c"):
        merged([ROW, {**ROW, "verdict": "differs", "test": "test_c"}])


def test_one_column_per_run_and_not_tested_for_missing_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    common = {"contract": "c", "kernel_sha": "s", "date": "2026-01-01", "command": "x", "versions": {"vllm": "0.31.0"}}
    paths = []
    for name, driver, rows in (
        ("cpu", None, [ROW, {**ROW, "feature": "quantization", "verdict": "refused"}, {**ROW, "stack": "TRL"}]),
        ("gpu", "1", [{**ROW, "numbers": 1234}]),
    ):
        paths.append(tmp_path / f"{name}.json")
        data = {**common, "hardware": "Some GPU", "driver": driver, "rows": merged(rows)}
        paths[-1].write_text(json.dumps(data))
    text = tables.compatibility(paths, "vLLM")
    assert text.startswith("| vLLM | vLLM 0.31.0, CPU | vLLM 0.31.0, Some GPU |\n")
    assert "| decode | exact, 0 of 5 | exact, 0 of 1,234 |\n" in text
    assert "| quantization | refused, 0 of 5 | not tested |\n" in text
    assert "No result" in tables.compatibility(paths, "transformers")
