"""Run folders in every state: what `rlkernel runs`, `report` and `compare` say about them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from training.run_folders import COMPARED, SUMMARY, Page, append, folder_with
from training.tiny import digits, settings_of

from rlkernel.cli.main import main
from rlkernel.training.pages.report import write_report
from rlkernel.training.run_folder import _locked, read_jsonl
from rlkernel.training.runs import find_runs, read_run
from rlkernel.training.session import run_training


def words_of(page: Path) -> str:
    return " ".join(" ".join(Page(page.read_text(encoding="utf-8")).words).split())


def test_the_state_of_a_run(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "a")
    facts = {key: value for key, value in SUMMARY.items() if key not in COMPARED}
    assert read_run(folder).status == "finished"
    (folder / "run.json").write_text(json.dumps(facts))
    held = _locked(folder)
    assert read_run(folder).status == "finished", "the process that has written the summary still holds the folder"
    resumed = {**facts, "started": "2026-01-02T00:00:00+00:00"}
    (folder / "run.json").write_text(json.dumps(resumed))
    assert read_run(folder).status == "running", "the summary is that of the run before it was resumed"
    os.close(held)
    assert read_run(folder).status == "killed"
    (folder / "run.json").write_text(json.dumps({**resumed, "error": "InputError: disk <full>"}))
    assert read_run(folder).status == "failed"
    assert "The run failed after step 2 of 2: InputError: disk <full>" in words_of(write_report(folder))
    assert read_run(folder_with(tmp_path / "b", "train.steps=9")).status == "stopped"
    assert "stopped by a signal after step 2 of 9" in words_of(write_report(tmp_path / "b"))


def test_a_killed_run_has_a_page(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "run", "train.steps=9")
    (folder / "summary.json").unlink()
    for name, part in (("metrics", b'{"step": 3, "rew'), ("samples", '{"step": 3, "prompt": "é'.encode()[:-1])):
        with open(folder / f"{name}.jsonl", "ab") as log:
            log.write(part)
    assert main(["report", str(folder)]) == 0
    words = words_of(folder / "report.html")
    assert "its process was killed after step 2 of 9" in words and "no checkpoint to continue from" in words
    assert "All 30 tokens sampled in 2 steps" in words and "rose from 0.25 to 0.875 in 2 s" in words
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "latest").write_text("step-2")
    (folder / "checkpoints" / "step-2").mkdir()
    state = {"progress": {"probe": SUMMARY["probe"]}}
    (folder / "checkpoints" / "step-2" / "state.json").write_text(json.dumps(state))
    words = words_of(write_report(folder))
    assert f"rlkernel train grpo --resume {folder}" in words and "stock torch, control rollouts" in words
    for name in ("metrics", "eval", "samples"):  # killed while the model was loaded
        (folder / f"{name}.jsonl").unlink()
    assert "killed after step 0 of 9" in words_of(write_report(folder))


def test_the_list_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder_with(tmp_path / "b")
    (tmp_path / "sub").mkdir()
    folder_with(tmp_path / "sub" / "a", started="2025-01-01T00:00:00+00:00", mismatch_tokens=3, backend="torch")
    folder_with(tmp_path / "sub" / "c", "model.path=models/Tiny", "data.train=x", started="2027", algorithm="sft")
    (tmp_path / "sub" / "config.yaml").write_text("not: a run")
    assert [run.name for run in find_runs(tmp_path)[0]] == ["a", "b", "c"] and len(find_runs(tmp_path / "b")[0]) == 1
    assert main(["runs", str(tmp_path)]) == 0
    lines = [re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    scratch, reward = "from scratch (arithmetic)", "reward 0.25 → 0.875"
    assert lines == [
        ["run", "algorithm", "model", "steps", "status", "held out, before and after", "exact", "started"],
        ["sub/a", "grpo (torch)", scratch, "2/2", "finished", reward, "no: 3 tokens differ", "2025-01-01 00:00"],
        ["b", "grpo", scratch, "2/2", "finished", reward, "yes", "2026-01-01 00:00"],
        ["sub/c", "sft", "Tiny", "2/2", "finished", "loss 0.25 → 0.875", "–", "2027"],
    ]
    assert main(["runs", str(tmp_path / "absent")]) == 2 and main(["report", str(tmp_path / "sub")]) == 2
    error = capsys.readouterr().err
    assert "absent is not a folder" in error and "sub is not a run folder: it has no config.yaml" in error


def test_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first = folder_with(tmp_path / "a")
    second = folder_with(tmp_path / "b", "optimizer.lr=0.5", mismatch_tokens=7)
    append(second / "eval.jsonl", {"step": 3, "reward": 0.9, "pass@2": 0.5})
    monkeypatch.chdir(tmp_path)
    assert main(["compare", str(first), str(second)]) == 0
    page = Page((tmp_path / "compare.html").read_text(encoding="utf-8"))
    assert not {"script", "img", "link"} & set(page.tags)
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    words = " ".join(page.words)
    for part in ("Comparison of 2 runs", "Settings that differ optimizer.lr 0.5", "Held-out reward", "Held-out pass@2",
                 "Completion length", "mismatching tokens 0 7"):  # fmt: skip
        assert part.replace(" ", "") in words.replace("setting a b", "").replace(" ", "").replace("0.0004", ""), part
    assert words.count("Held-out reward") == 2, "heading and text alternative of one chart for both runs"
    assert main(["compare", str(first)]) == 2 and "name 2 to 8 run folders" in capsys.readouterr().err


def fails_in_the_second_step(completions: list[str], trainer_state: Any = None, **_: Any) -> list[float]:
    if trainer_state.global_step == 1:
        raise ValueError("no <more> rewards")
    return digits(completions)


def test_a_run_that_fails_has_a_page(tmp_path: Path) -> None:
    reward = "rewards=[training.test_run_states:fails_in_the_second_step]"
    with pytest.raises(ValueError, match="no <more> rewards"):
        run_training(settings_of(tmp_path, reward, "train.steps=3", "eval.every=0"))
    folder = tmp_path / "run"
    words = words_of(folder / "report.html")
    assert "The run failed after step 1 of 3: InputError: reward fails_in_the_second_step: raised ValueError" in words
    assert read_run(folder).status == "failed" and len(read_jsonl(folder / "metrics.jsonl")) == 1


def test_an_evaluation_estimates_pass_at_k(tmp_path: Path) -> None:
    words = ("eval.samples=4", "eval.temperature=1.0", "eval.pass_at=[1,4]", "eval.solved_at=0.3", "run.save=false")
    folder = run_training(settings_of(tmp_path, *words, "run.probe_rollouts=0"))
    evals = read_jsonl(folder / "eval.jsonl")
    assert [row["step"] for row in evals] == [0, 2] and all(row["rows"] == 4 for row in evals)
    assert all(len(row["samples"]) == 4 for row in evals)
    assert all(row["pass@1"] <= row["pass@4"] for row in evals) and 0 < evals[0]["pass@4"] <= 1
    tokens = read_jsonl(folder / "samples.jsonl")[0]
    text = "".join(token["text"] for token in tokens["tokens"])
    assert re.sub("<.*?>", "", text) == tokens["completion"]
    assert "pass@4 after" in (folder / "report.html").read_text(encoding="utf-8")
