"""The run folder: made new, never reused, writable or an error, strict JSON in it."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlkernel.data.errors import InputError
from rlkernel.training.config import located, resolve
from rlkernel.training.memory import peak_memory_mib
from rlkernel.training.run_folder import RunFolder, default_output, new_folder, read_jsonl, write_text


def test_a_taken_folder_is_never_reused(tmp_path: Path) -> None:
    wanted = tmp_path / "runs" / "a"
    wanted.mkdir(parents=True)
    assert new_folder(wanted)[0] == wanted, "an empty folder may be used"
    assert new_folder(wanted)[0] == tmp_path / "runs" / "a-2", "the previous run has claimed it"
    (tmp_path / "runs" / "a-3").mkdir()
    (tmp_path / "runs" / "a-3" / "x").write_text("")
    assert new_folder(wanted)[0] == tmp_path / "runs" / "a-4"
    (tmp_path / "runs" / "b").write_text("a file")
    assert new_folder(tmp_path / "runs" / "b")[0] == tmp_path / "runs" / "b-2"


def test_of_two_runs_that_start_together_one_gets_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = tmp_path / "run"
    touch = Path.touch

    def rival(path: Path, **options: bool) -> None:  # another run claims the folder after it was seen to be empty
        monkeypatch.setattr(Path, "touch", touch)
        assert new_folder(wanted)[0] == wanted
        touch(path, **options)

    monkeypatch.setattr(Path, "touch", rival)
    assert new_folder(wanted)[0] == tmp_path / "run-2"


def test_a_read_only_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(InputError, match=r"is not writable \(Read-only file system\); choose another with --output"):
        new_folder(tmp_path / "runs" / "run")
    assert not any(tmp_path.iterdir())


@pytest.fixture
def full_disk() -> Iterator[Callable[[int], None]]:
    """Limits the size of every file to some bytes, which ends a write in the middle as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_line_and_leaves_whole_lines(tmp_path: Path, full_disk: Callable[[int], None]) -> None:
    run = RunFolder(resolve("grpo", options={"run.output": str(tmp_path / "r")}), "rlk-2")
    full_disk(1000)
    with pytest.raises(
        InputError, match=r"cannot write .*metrics\.jsonl \(File too large\); free some space or choose"
    ):
        for step in range(100):
            run.log(step, {"reward": 0.5})
    kept = [row["step"] for row in read_jsonl(run.folder / "metrics.jsonl")]
    assert len(kept) > 5 and kept == list(range(len(kept)))
    (run.folder / "report.html").write_text("old")
    with pytest.raises(InputError, match=r"cannot write .*report\.html"):
        write_text(run.folder / "report.html", "x" * 2000)
    assert (run.folder / "report.html").read_text() == "old"
    with pytest.raises(InputError, match=r"cannot write .*config\.yaml"):
        RunFolder(resolve("grpo", options={"run.output": str(tmp_path / "s")}), "rlk-2")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.yaml", "metrics.jsonl", "r", "report.html"]


def test_rows_with_invalid_unicode_or_deep_nesting_are_written(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(700):
        deep = [deep]
    with RunFolder(resolve("grpo", options={"run.output": str(tmp_path / "r")}), "rlk-2") as run:
        run.append("samples", {"extra": "\ud800é", "deep": deep})
    assert read_jsonl(run.folder / "samples.jsonl") == [{"extra": "\ud800é", "deep": deep}]


def test_the_saved_settings_mean_the_same_files_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "d.jsonl"):
        (tmp_path / name).mkdir()
    options = {"model.path": "model", "data.train": "d.jsonl", "rewards": ["r.py:f", "module:g"], "run.output": "out"}
    with RunFolder(resolve("grpo", options=options), "rlk-2") as run:
        monkeypatch.chdir(run.folder)
    found = resolve("grpo", file="config.yaml")
    assert (found.model.path, found.data.train) == (str(tmp_path / "model"), str(tmp_path / "d.jsonl"))
    assert [reward.function for reward in found.rewards] == [f"{tmp_path / 'r.py'}:f", "module:g"]
    assert found.run.output == str(tmp_path / "out")
    elsewhere = located(resolve("grpo", options={**options, "model.path": "hub/name", "data.train": "d-*.parquet"}))
    assert elsewhere.model.path == "hub/name" and elsewhere.data.train == str(tmp_path / "out" / "d-*.parquet")


def test_a_place_that_cannot_hold_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is not writable"):
        new_folder(tmp_path / "file" / "run")
    with pytest.raises(InputError, match="is not writable"):
        new_folder("/proc/run")


def test_metrics_are_strict_json_with_the_contract(tmp_path: Path) -> None:
    settings = resolve("grpo", options={"run.output": str(tmp_path / "r")})
    with RunFolder(settings, "rlk-2") as run:
        run.log(1, {"reward": 0.5, "bad": float("nan"), "nested": {"x": [float("inf")]}})
    text = (run.folder / "metrics.jsonl").read_text()
    assert json.loads(text) == {"step": 1, "contract": "rlk-2", "reward": 0.5, "bad": None, "nested": {"x": [None]}}
    assert read_jsonl(run.folder / "metrics.jsonl") == [json.loads(text)]
    assert read_jsonl(run.folder / "absent.jsonl") == []
    assert (run.folder / "config.yaml").exists()


def test_a_run_that_never_began_leaves_nothing(tmp_path: Path) -> None:
    run = RunFolder(resolve("grpo", options={"run.output": str(tmp_path / "r")}), "rlk-2")
    run.abandon()
    assert not (tmp_path / "r").exists()


def test_a_run_that_never_began_removes_folders_made_for_it(tmp_path: Path) -> None:
    settings = resolve("grpo", options={"run.output": str(tmp_path / "runs" / "of today" / "r")})
    RunFolder(settings, "rlk-2").abandon()
    assert tmp_path.exists() and not any(tmp_path.iterdir())
    first, second = RunFolder(settings, "rlk-2"), RunFolder(settings, "rlk-2")
    first.abandon()
    assert second.folder.name == "r-2" and second.folder.exists()
    second.abandon()
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "of today"], "they existed before the second run"


def test_an_abandoned_run_keeps_a_users_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    begin = lambda output: RunFolder(resolve("grpo", options={"run.output": output}), "rlk-2")
    begin(".").abandon()
    begin("a/../b/r").abandon()
    assert (tmp_path / "mine").is_dir() and not any(tmp_path.glob("mine/*"))
    run = begin("r")
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "kept").touch()
    monkeypatch.chdir(tmp_path)  # where the same relative path names another folder
    run.abandon()
    assert not (tmp_path / "mine" / "r").exists() and (tmp_path / "r" / "kept").exists()
    for taken in (".", ".."):
        monkeypatch.chdir(tmp_path / "r")
        with pytest.raises(InputError, match="is not empty"):
            new_folder(taken)
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    with pytest.raises(InputError, match="is not writable"):
        new_folder(tmp_path / "nowhere" / "r")


def test_names_of_runs() -> None:
    assert default_output(resolve("grpo")) == "runs/grpo-arithmetic"
    assert default_output(resolve("grpo", options={"run.backend": "torch"})) == "runs/grpo-arithmetic-torch"
    files = {"model.path": "models/Tiny-1B/", "data.train": "d.jsonl"}
    assert default_output(resolve("sft", options=files)) == "runs/sft-Tiny-1B"
    assert peak_memory_mib("cpu") > 1


def test_the_report_is_refreshed_after_the_first_step_and_then_once_per_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, written = 1000.0, []
    monkeypatch.setattr("rlkernel.training.run_folder.time.monotonic", lambda: now)
    with RunFolder(resolve("grpo", options={"run.output": str(tmp_path / "r")}), "rlk-2") as run:
        run.refresh = lambda: written.append(len(read_jsonl(run.folder / "metrics.jsonl")))
        for step, seconds in ((1, 0), (2, 30), (3, 29), (4, 2), (5, 30)):
            now += seconds
            run.log(step, {"reward": 0.5})
    assert written == [1, 4], "each time with the step that was just logged"


def test_an_incomplete_last_line_is_ignored_and_rows_keep_unusual_line_breaks(tmp_path: Path) -> None:
    settings = resolve("grpo", options={"run.output": str(tmp_path / "r")})
    rows = [{"step": step, "completion": "a\u2028b\x85c"} for step in (1, 2)]
    with RunFolder(settings, "rlk-2") as run:
        for row in rows:
            run.append("samples", row)
    file = tmp_path / "r" / "samples.jsonl"
    with open(file, "ab") as log:
        log.write(b'{"step": 3, "comp')
    assert read_jsonl(file) == rows and read_jsonl(file, last_bytes=60) == rows[1:]
    with RunFolder(settings, "rlk-2", (tmp_path / "r", 1)) as run:
        assert read_jsonl(file) == rows, "a run that does not start keeps its logs"
        run.rewind(1)
        assert read_jsonl(file) == rows[:1] and file.read_bytes().endswith(b"\n")
