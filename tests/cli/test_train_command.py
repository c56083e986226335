"""`rlkernel train`: options, dry run; a user's mistake prints one line and exits with status 2 before any work."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from rlkernel.cli.main import main

FILES = ["--model", "m", "--data", "d.jsonl", "--reward", "r.py:f"]


def test_a_dry_run_prints_the_resolved_settings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("train: {steps: 9}\n")
    words = ["--config", str(file), *FILES, "--seed", "4", "optimizer.lr=1e-3", "--backend", "torch", "--dry-run"]
    assert main(["train", "grpo", *words, "--reward", "s.py:g", "train.epochs=2"]) == 0
    settings = yaml.safe_load(capsys.readouterr().out)
    assert settings["train"]["steps"] == 9 and settings["train"]["epochs"] == 2
    assert settings["run"]["seed"] == 4 and settings["run"]["backend"] == "torch"
    assert settings["optimizer"]["lr"] == 1e-3
    assert [reward["function"] for reward in settings["rewards"]] == ["r.py:f", "s.py:g"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["grpo", *FILES, "optimizer.lrr=1"], "unknown setting 'optimizer.lrr'; did you mean optimizer.lr?"),
        (["grpo", *FILES, "oops"], "override 'oops': expected key=value"),
        (["grpo", "--model", "m"], "no data: set data.train (--data FILE) or data.task"),
        (["grpo", "--model", "m", "--data", "d.jsonl"], "no reward: use --reward FILE.py:function"),
        (["grpo", *FILES], "reward: file r.py does not exist"),
        (["grpo", "--config", "absent.yaml"], "config: cannot read absent.yaml"),
        (["grpo", "--device", "cuda"], "torch sees no CUDA GPU"),
        (["grpo", "--output", "/proc/run"], "run folder /proc/run is not writable"),
        (["sft", "--model", "m", "--data", "d.jsonl"], "data: cannot read d.jsonl"),
        (["dpo", "--model", "m", "--data", "d.jsonl"], "data: cannot read d.jsonl"),
        (["reward", "--model", "m"], "no data: set data.train (--data FILE) or data.task"),
        (["grpo", "--reward-model", "absent", "data.task=arithmetic"], "reward model: absent does not exist"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rlkernel: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
def test_a_signal_before_training_ends_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    monkeypatch.chdir(tmp_path)
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr("rlkernel.training.session.assemble", lambda *args: os.kill(os.getpid(), number))
    assert main(["train", "grpo"]) == 128 + number
    assert capsys.readouterr().err == "rlkernel: interrupted\n"
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/c/k.so"),
            "/c/k.so: No space left on device; free some space",
        ),
        (MemoryError(), "out of memory (MemoryError); lower engine.max_num_seqs"),
        (RuntimeError("CUDA out of memory.\nTried"), "out of memory (CUDA out of memory. Tried); lower"),
        (RuntimeError("[x] DefaultCPUAllocator: can't allocate memory"), "can't allocate memory); lower"),
        (RuntimeError("a bug"), None),
        (OSError(errno.EIO, "a bug"), None),
    ],
)
def test_a_machine_that_is_too_small_is_one_line_and_a_bug_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception, message: str | None
) -> None:
    def launch(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("rlkernel.training.session.run_training", launch)
    if message is None:
        with pytest.raises(type(error), match="a bug"):
            main(["train", "grpo"])
        return
    assert main(["train", "grpo"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("rlkernel: ") and message in printed and printed.count("\n") == 1


def test_unknown_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "grpo", "--learning-rate", "3"])
    assert "unrecognized arguments: --learning-rate" in capsys.readouterr().err


def test_help_loads_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys\nfrom rlkernel.cli.main import main\n"
        "try:\n    main(['train', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'pydantic', 'rich', 'yaml'} & set(sys.modules), 'heavy import'"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--dry-run" in done.stdout and time.perf_counter() - started < 10
