"""TensorBoard, wandb and trackio: what arrives in them, under which names, after a resume, without their libraries."""

from __future__ import annotations

import json
import re
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlkernel.data.errors import InputError
from rlkernel.training.config import Settings, resolve
from rlkernel.training.loggers import MODULES, TensorBoard, sinks_of
from rlkernel.training.metric_names import TRL, VERL, VERL_SFT, renamed
from rlkernel.training.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
METRICS = {"reward": 0.5, "lr": 1e-3, "reward_format": 1.0, "text": "x", "flag": True}
SAMPLE = {"prompt": [{"role": "user", "content": "2+2="}], "completion": "4", "reward": 1.0}


def settings_of(folder: Path, *words: str) -> Settings:
    return resolve("grpo", options={"run.output": str(folder / "r")}, overrides=words)


def write(run: RunFolder, steps: range, value: float = 0.5) -> None:
    with run:
        for step in steps:
            run.append("samples", {"step": step, "advantage": -1.0, **SAMPLE})
            run.log(step, {**METRICS, "reward": value})
            run.append("eval", {"step": step, "reward": 1.0, "rows": 4, "samples": [SAMPLE]})


def test_tensorboard_gets_the_numbers_and_forgets_abandoned_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = settings_of(tmp_path, "run.tensorboard=true")
    write(RunFolder(settings, "rlk-2"), range(4))
    write(RunFolder(settings, "rlk-2", (tmp_path / "r", 1)), range(2, 3), value=0.75)
    events = EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"reward", "lr", "reward_format", "eval/reward"}
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(0, 0.5), (1, 0.5), (2, 0.75)]


def written_by_its_process(file: Path) -> bytes:
    """Contents of a wandb file; its own process writes the last part shortly after the run is finished."""
    end = time.monotonic() + 20
    while b"eval/reward" not in file.read_bytes() and time.monotonic() < end:
        time.sleep(0.02)
    return file.read_bytes()


def test_wandb_writes_offline_and_resumes_with_the_same_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    settings = settings_of(tmp_path, "run.log_to=[wandb]", "run.metric_names=trl")
    write(RunFolder(settings, "rlk-2"), range(1, 2))
    time.sleep(1.0)  # wandb names a run's folder by the second
    write(RunFolder(settings, "rlk-2", (tmp_path / "r", 1)), range(2, 3))
    run_id = (tmp_path / "r" / "log_id").read_text()
    files = sorted((tmp_path / "r" / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(files) == 2
    for file in files:
        history = written_by_its_process(file)
        for name in ("train/reward", "train/learning_rate", "train/rewards/format/mean", "eval/reward"):
            assert name.encode() in history, name
        assert b"reward_format" not in history
    tables = [json.loads(path.read_text()) for path in (tmp_path / "r" / "wandb").rglob("*.table.json")]
    assert {tuple(table["columns"]) for table in tables} == {
        ("prompt", "completion", "reward"),
        ("step", "prompt", "completion", "reward", "advantage"),
    }
    assert all("user: 2+2=" in table["data"][0] for table in tables)


def test_trackio_writes_locally_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trackio.sqlite_storage
    import trackio.utils

    for module in (trackio.utils, trackio.sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr(trackio.utils, "MEDIA_DIR", tmp_path / "trackio" / "media")
    settings = settings_of(tmp_path, "run.log_to=[trackio]", "run.metric_names=verl")
    write(RunFolder(settings, "rlk-2"), range(1, 2))
    write(RunFolder(settings, "rlk-2", (tmp_path / "r", 1)), range(2, 3))
    with sqlite3.connect(tmp_path / "trackio" / "rlkernel.db") as base:
        rows = base.execute("select run_name, step, metrics from metrics order by step, id").fetchall()
    assert {name for name, *_ in rows} == {f"r-{(tmp_path / 'r' / 'log_id').read_text()}"}
    numbers = [(step, json.loads(text)) for _, step, text in rows]
    assert [(step, row["critic/score/mean"]) for step, row in numbers if "critic/score/mean" in row] == [
        (1, 0.5),
        (2, 0.5),
    ]
    assert any(row.get("val-core/heldout/reward/mean@1") == 1.0 for _, row in numbers)
    assert any("heldout_samples" in row for _, row in numbers)


def test_tables_have_both_sides_of_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[tuple[Any, ...]] = []
    monkeypatch.setattr(TensorBoard, "table", lambda self, *arguments: tables.append(arguments))
    with RunFolder(settings_of(tmp_path, "run.log_to=[tensorboard]"), "rlk-2") as run:
        run.append("samples", {"step": 0, "prompt": "2+2=", "chosen": "4", "rejected": "5"})
        run.append("eval", {"step": 0, "accuracy": 1.0, "rows": 4})
    assert tables == [(0, "samples", ["step", "prompt", "chosen", "rejected"], [[0, "2+2=", "4", "5"]])]


@pytest.mark.parametrize("sink", MODULES)
def test_a_missing_library_is_an_error_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: str
) -> None:
    monkeypatch.setitem(sys.modules, MODULES[sink], None)
    with pytest.raises(InputError, match=rf"run\.log_to={sink} needs .*: pip install 'rlkernel\[{sink}\]'"):
        RunFolder(settings_of(tmp_path, f"run.log_to=[{sink}]"), "rlk-2")
    assert not (tmp_path / "r").exists()


def test_a_sink_that_cannot_be_opened_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def refuse(**_: object) -> None:
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login`.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(InputError, match=r"wandb cannot be opened \(No API key configured. Use `wandb login"):
        write(RunFolder(settings_of(tmp_path, "run.log_to=[wandb]"), "rlk-2"), range(1, 2))


def test_a_run_without_sinks_imports_none(tmp_path: Path) -> None:
    assert sinks_of(settings_of(tmp_path)) == []
    assert sinks_of(settings_of(tmp_path, "run.tensorboard=true", "run.log_to=[tensorboard, wandb]")) == [
        "tensorboard",
        "wandb",
    ]
    write(RunFolder(settings_of(tmp_path), "rlk-2"), range(1, 2))
    assert not (tmp_path / "r" / "log_id").exists()


def test_names_of_the_frameworks() -> None:
    values = {
        "reward": 0.5,
        "clip_fraction_low": 0.25,
        "clip_fraction_high": 0.5,
        "logged/words": 3.0,
        "eval/reward": 1.0,
    }
    assert renamed(values, "rlkernel", "grpo", 1) == values
    assert renamed(values, "trl", "grpo", 1) == {
        "train/reward": 0.5,
        "train/clip_ratio/low_mean": 0.25,
        "train/clip_ratio/high_mean": 0.5,
        "train/clip_ratio/region_mean": 0.75,
        "train/words": 3.0,
        "eval/reward": 1.0,
    }
    found = renamed(values, "verl", "grpo", 8)
    assert found["critic/score/mean"] == 0.5 and found["actor/pg_clipfrac"] == 0.75
    assert found["val-core/heldout/reward/mean@8"] == 1.0 and found["logged/words"] == 3.0
    assert renamed({"loss": 2.0, "eval/loss": 1.0}, "verl", "sft", 1) == {"train/loss": 2.0, "val/loss": 1.0}


def test_the_page_lists_the_names() -> None:
    page = (ROOT / "docs" / "guides" / "logging.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([^`]+)` (\|.*\|)$", page, re.M))
    for ours in TRL.keys() | VERL.keys() | VERL_SFT.keys():
        for table in (TRL, VERL):
            if ours in table:
                assert f"`{table[ours].format(samples='N')}`" in rows[ours], ours
