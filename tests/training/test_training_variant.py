"""A run in attention variant fa3 from its settings: both sides follow, and every record carries the id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ops.fake_fa3 import install
from training.tiny import settings_of, trainer_of

from rlkernel.cli.main import main
from rlkernel.contract import CONTRACT_ID
from rlkernel.data.errors import InputError
from rlkernel.training.config import resolve
from rlkernel.training.session import run_training

FA3 = f"{CONTRACT_ID}+fa3"


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path)
    folder = run_training(settings_of(tmp_path, "run.attention=fa3", "model.dtype=bfloat16", "eval.rows=2"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(row["contract"] == FA3 and row["exact_frac"] == 1 for row in rows)
    assert all(row["mismatch_tokens"] == 0 and row["tokens"] > 0 for row in rows)
    assert json.loads((folder / "summary.json").read_text())["contract"] == FA3
    assert json.loads((folder / "model" / "config.json").read_text())["rlkernel_contract"] == FA3
    assert FA3 in (folder / "report.html").read_text()


def test_the_trainer_and_its_sampler_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path)
    trainer, _ = trainer_of(settings_of(tmp_path, "run.attention=fa3", "model.dtype=bfloat16"), tmp_path)
    assert trainer.sampler.llm.attention == trainer.model.attention_variant == "fa3"


def test_errors_come_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path)
    with pytest.raises(InputError, match=r"run\.attention=fa3: attention variant 'fa3' takes bfloat16 and float16"):
        run_training(settings_of(tmp_path, "run.attention=fa3"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match="stock torch has no attention variants"):
        resolve("grpo", options={"run.attention": "fa3", "run.backend": "torch"})
    install(monkeypatch, tmp_path, "vllm: no module vllm")
    with pytest.raises(InputError, match="not importable"):
        run_training(settings_of(tmp_path, "run.attention=fa3", "model.dtype=bfloat16"))


def test_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "grpo", "--attention", "fa3", "--dry-run"]) == 0
    assert "attention: fa3" in capsys.readouterr().out
    words = ["generate", "--model", str(tmp_path), "--prompt", "x", "--attention", "fa3", "--backend", "torch"]
    assert main(words) == 2
    assert "--attention fa3 needs backend rlkernel" in capsys.readouterr().err
