"""A run that was interrupted and resumed equals one that was not: weights, metrics, samples, evaluations.

Able to fail: a checkpoint with one moment changed gives other weights.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from training.tiny import digits, settings_of

from rlkernel.cli.main import main
from rlkernel.contract import assert_bitwise
from rlkernel.data.errors import InputError
from rlkernel.signals import Interrupted
from rlkernel.training import checkpoint
from rlkernel.training.config import Settings
from rlkernel.training.run_folder import _locked, read_jsonl
from rlkernel.training.runs import read_run
from rlkernel.training.session import StoppedError, run_training
from rlkernel.training.supervised import update

STEPS = 4
GRPO = ("loss.kl_coef=0.1", "train.minibatches=2", "eval.every=2", "run.probe_rollouts=1", "warmup.steps=2",
        "warmup.examples=32", "warmup.batch_size=8")  # fmt: skip
SFT = ("train.batch_size=4", "optimizer.schedule=cosine")
REWARD = (*SFT, "warmup.examples=32", "eval.every=2", "optimizer.lr=0.001")
DPO = (*REWARD, "warmup.steps=2", "warmup.batch_size=8")
KINDS = {"grpo": GRPO, "sft": SFT, "dpo": DPO, "reward": REWARD}


def settings(folder: Path, kind: str, *more: str) -> Settings:
    folder.mkdir(exist_ok=True)
    return settings_of(folder, f"train.steps={STEPS}", "train.save_every=1", *KINDS[kind], *more, algorithm=kind)


def outcome(run: Path) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Tensor]]:
    """(logs without times and memory, weights) of a finished run."""
    timed = ("seconds", "tokens_per_s", "memory_mib")
    logs = {
        name: [{k: v for k, v in row.items() if not k.startswith(timed)} for row in read_jsonl(run / f"{name}.jsonl")]
        for name in ("metrics", "samples", "eval")
    }
    return logs, load_file(run / "model" / "model.safetensors")


def assert_same(run: Path, expected: Path) -> None:
    (logs, weights), (other_logs, other_weights) = outcome(run), outcome(expected)
    assert logs == other_logs
    for name, weight in other_weights.items():
        assert_bitwise(weights[name], weight, name)


@pytest.fixture(scope="module", params=("grpo", "sft"))
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(algorithm, folder) of an uninterrupted run without checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    made = settings(folder, request.param, "train.save_every=0")
    return request.param, run_training(made)


class Killed(BaseException):
    """Leaves the disk as SIGKILL does: no handler of the trainer catches it."""


@pytest.mark.parametrize("call, number", [("fsync", 0), ("fsync", 3), ("replace", 0), ("replace", 1), ("fsync", 6)])
def test_killed_while_saving(
    whole: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    kind, expected = whole
    real, save, calls = getattr(os, call), checkpoint.save, [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == number + 1:
            raise Killed
        return real(*args, **kwargs)

    def third(run: Path, made: checkpoint.Checkpoint, keep_last: int) -> Path:
        if made.step < 3:
            return save(run, made, keep_last)
        with monkeypatch.context() as patched:
            patched.setattr(os, call, counted)
            return save(run, made, keep_last)

    monkeypatch.setattr(checkpoint, "save", third)
    made = settings(tmp_path, kind)
    with pytest.raises(Killed):
        run_training(made)
    monkeypatch.setattr(checkpoint, "save", save)
    found = checkpoint.load(checkpoint.find(tmp_path / "run"))
    assert found.step in (2, 3)
    assert_same(run_training(made, resume=tmp_path / "run"), expected)
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 2, "keep_last"


@pytest.mark.parametrize("kind", ("dpo", "reward"))
def test_a_killed_run_on_preferences(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, killed before it saves its third step. DPO continues with the reference of its first step."""
    expected = run_training(settings(tmp_path / "whole", kind, "train.save_every=0"))
    save = checkpoint.save

    def third(run: Path, made: checkpoint.Checkpoint, keep_last: int) -> Path:
        if made.step == 3:
            raise Killed
        return save(run, made, keep_last)

    monkeypatch.setattr(checkpoint, "save", third)
    made = settings(tmp_path / "killed", kind)
    with pytest.raises(Killed):
        run_training(made)
    monkeypatch.setattr(checkpoint, "save", save)
    second = tmp_path / "killed" / "run" / "checkpoints" / "step-00000002"
    shutil.copytree(second, tmp_path / "second")
    assert_same(run_training(made, resume=second), expected)
    if kind == "dpo":  # the control
        rewrite(second, tmp_path / "second", "reference", "train", 1.0)
        changed = outcome(run_training(made, resume=second))[1]
        assert any(not torch.equal(changed[name], weight) for name, weight in outcome(expected)[1].items())


def rewrite(folder: Path, source: Path, file: str, tensor: str, by: float) -> None:
    """Restores a checkpoint from its copy, adds `by` to the first column of a tensor and corrects the manifest."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    path = folder / f"{file}.safetensors"
    tensors = load_file(path)
    tensors[tensor][..., 0] += by
    path.unlink()  # the reference is a hard link
    save_file(tensors, path)
    manifest = checkpoint._read_manifest(folder)
    manifest[path.name] = checkpoint._entry(path)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_changed_moment_changes_the_weights(whole: tuple[str, Path], tmp_path: Path) -> None:
    kind, expected = whole
    made = settings(tmp_path, kind)
    folder = run_training(made) / "checkpoints" / "step-00000003"
    shutil.copytree(folder, tmp_path / "third")
    name = next(n for n in load_file(folder / "optimizer.safetensors") if n.endswith("exp_avg"))
    rewrite(folder, tmp_path / "third", "optimizer", name, 1.0)
    resumed = run_training(made, resume=folder)
    assert any(not torch.equal(a, b) for a, b in zip(outcome(resumed)[1].values(), outcome(expected)[1].values(),
                                                     strict=True))  # fmt: skip


def stop_in_the_second_step(completions: list[str], trainer_state: Any = None, **_: Any) -> list[float]:
    """The reward of `training.tiny`, which sends SIGTERM to its process in the second step of a first attempt."""
    marker = Path(os.environ["STOP_ONCE"])
    if trainer_state.global_step == int(os.environ.get("STOP_AT", "1")) and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGTERM)
    return digits(completions)


def test_sigterm_stops_after_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOP_ONCE", str(tmp_path / "stopped"))
    reward = ("rewards=[training.test_checkpoint_of_runs:stop_in_the_second_step]", "train.save_every=0")
    (tmp_path / "stopped").touch()
    expected = run_training(settings(tmp_path / "a", "grpo", *reward))
    (tmp_path / "stopped").unlink()
    made = settings(tmp_path / "b", "grpo", *reward)
    with pytest.raises(
        StoppedError, match="stopped after step 2; continue with: rlkernel train grpo --resume "
    ) as stop:
        run_training(made)
    assert stop.value.signal == signal.SIGTERM
    assert (tmp_path / "b" / "run" / "report.html").exists() and not (tmp_path / "b" / "run" / "model").exists()
    assert_same(run_training(made, resume=tmp_path / "b" / "run"), expected)


def test_a_signal_in_the_last_step_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOP_ONCE", str(tmp_path / "stopped"))
    monkeypatch.setenv("STOP_AT", str(STEPS - 1))
    reward = ("rewards=[training.test_checkpoint_of_runs:stop_in_the_second_step]", "train.save_every=0")
    run = run_training(settings(tmp_path, "grpo", *reward))
    assert (tmp_path / "stopped").exists() and (run / "model" / "model.safetensors").exists()


def test_a_signal_in_the_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be saved yet: the run ends with a report, as failed, and `--resume auto` starts it again."""

    def stopped(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return update(*args)

    monkeypatch.setattr("rlkernel.training.sft.update", stopped)
    with pytest.raises(Interrupted, match="no checkpoint yet; start it again") as stop:
        run_training(settings(tmp_path, "grpo"))
    assert stop.value.signal == signal.SIGTERM
    assert (tmp_path / "run" / "report.html").exists() and read_run(tmp_path / "run").status == "failed"


def test_sigkill_at_any_moment(whole: tuple[str, Path], tmp_path: Path) -> None:
    kind, expected = whole
    made = settings(tmp_path, kind)
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from pathlib import Path
from training.test_checkpoint_of_runs import settings
from rlkernel.training.session import run_training
print("ready", flush=True)
run_training(settings(Path({str(tmp_path)!r}), {kind!r}))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stdout.readline() == b"ready\n"
        pointer = tmp_path / "run" / "checkpoints" / "latest"
        while not pointer.exists() and running.poll() is None:
            pass
        try:
            running.wait(random.random())
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGKILL)
    assert main(["report", str(tmp_path / "run")]) == 0
    told = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    if not (tmp_path / "run" / "summary.json").exists():
        assert "its process was killed after step" in told and f"--resume {tmp_path / 'run'}" in told
    if not (tmp_path / "run" / "model").exists():  # also killed after the last checkpoint
        run_training(made, resume=tmp_path / "run")
    assert_same(tmp_path / "run", expected)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_training(settings(tmp_path_factory.mktemp("finished"), "grpo"))


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[:-1],
    "flipped at the start": lambda content: flipped(content, 0),
    "flipped in the middle": lambda content: flipped(content, len(content) // 2),
    "empty": lambda content: b"",
}


@pytest.mark.parametrize("file", ("model.safetensors", "optimizer.safetensors", "reference.safetensors", "state.json",
                                  "manifest.json"))  # fmt: skip
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_named(finished: Path, tmp_path: Path, file: str, damage: Callable[[bytes], bytes]) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    path = run / "checkpoints" / "step-00000004"
    content = (path / file).read_bytes()
    (path / file).unlink()  # the reference is a hard link
    (path / file).write_bytes(damage(content))
    with pytest.raises(InputError, match=r"step-00000004: .* is missing, truncated or changed .* --resume .*00000003"):
        checkpoint.load(checkpoint.find(run))
    assert checkpoint.load(run / "checkpoints" / "step-00000003").step == 3


def test_a_full_disk_keeps_older_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = checkpoint.save

    def second(run: Path, made: checkpoint.Checkpoint, keep_last: int) -> Path:
        if made.step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return save(run, made, keep_last)

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(checkpoint, "save", second)
    try:
        with pytest.raises(
            InputError, match=r"cannot write checkpoint .*; free some space and continue from .* --resume"
        ):
            run_training(settings(tmp_path, "sft"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpoint.load(checkpoint.find(tmp_path / "run")).step == 1
    assert not list((tmp_path / "run" / "checkpoints").glob(".step*"))


def test_what_cannot_be_resumed_is_refused(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    third = run / "checkpoints" / "step-00000003"
    same = lambda *more: settings(tmp_path, "grpo", f"run.output={run}", *more)
    with pytest.raises(InputError, match=r"optimizer\.lr was 0\.01, now 0\.02; resume with the settings of the run"):
        run_training(same("optimizer.lr=0.02"), resume=third)
    with pytest.raises(InputError, match="no checkpoint there"):
        run_training(same(), resume=tmp_path)
    held = _locked(run)
    try:
        with pytest.raises(InputError, match="is in use by another process"):
            run_training(same(), resume=third)
    finally:
        os.close(held)
    assert read_jsonl(run / "metrics.jsonl") == read_jsonl(finished / "metrics.jsonl"), "nothing was touched"
    with pytest.raises(InputError, match=r"train\.steps can change only in a run with optimizer\.schedule=constant"):
        checkpoint.check_settings(*linear_run(tmp_path / "linear"), "rlk-2")
    (run / "checkpoints" / "latest").write_text("step-99")
    with pytest.raises(InputError, match=r"latest names 'step-99', which does not exist; .*: step-00000003, step-0"):
        run_training(same(), resume=run)
    free = ("train.micro_batch_tokens=40", "engine.max_num_seqs=3", "train.keep_last=1")
    run_training(same(*free), resume=third)
    weights, expected = outcome(run)[1], outcome(finished)[1]
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def linear_run(folder: Path) -> tuple[checkpoint.Checkpoint, Settings]:
    """A checkpoint of a run with a linear schedule, and its settings with another number of steps."""
    made = settings(folder, "sft", "optimizer.schedule=linear")
    run_training(made)
    made.train.steps = 9
    return checkpoint.load(checkpoint.find(folder / "run")), made


def test_an_older_checkpoint_replaces_later_ones(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    made = settings(tmp_path, "grpo", f"run.output={run}", "train.keep_last=5")
    run_training(made, resume=run / "checkpoints" / "step-00000003")
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert read_jsonl(run / "samples.jsonl") == read_jsonl(finished / "samples.jsonl")
    shutil.rmtree(run / "model")
    (run / ".model.of_a_killed_process").mkdir()
    run_training(made, resume=run)  # finished: only what is missing is written
    assert not list(run.glob(".model.*"))
    weights, expected = outcome(run)[1], outcome(finished)[1]
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_changed_data_are_refused(tmp_path: Path) -> None:
    data = tmp_path / "p.jsonl"
    data.write_text("".join(f'{{"prompt": "{i}+1=", "completion": "{i + 1}"}}\n' for i in range(20)))
    made = settings(tmp_path, "grpo", f"warmup.data={data}")
    found = {"settings": checkpoint.located(made).model_dump(mode="json"), "contract": "rlk-2"}
    saved = checkpoint.Checkpoint(2, {**found, "data": checkpoint._data(made)}, {})
    checkpoint.check_settings(saved, made, "rlk-2")
    data.write_text(data.read_text()[:-20])
    with pytest.raises(InputError, match=r"what warmup\.data names has changed since"):
        checkpoint.check_settings(saved, made, "rlk-2")


def test_a_changed_reward_is_named(tmp_path: Path) -> None:
    reward = tmp_path / "judge.py"
    reward.write_text("def judge(completions, **_):\n    return [0.0 for _ in completions]\n")
    made = settings(tmp_path, "grpo")
    made.rewards[0].function = f"{reward}:judge"
    saved = checkpoint.Checkpoint(2, {"rewards": checkpoint._rewards(made)}, {})
    assert checkpoint.changed_rewards(saved, made) == []
    reward.write_text(reward.read_text().replace("0.0", "1.0"))
    assert checkpoint.changed_rewards(saved, made) == [str(reward)]


def test_auto_starts_again_in_the_folder_of_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    made = settings(tmp_path, "sft", "train.save_every=2")
    whole = run_training(made)
    for name in ("summary.json", "model", "checkpoints"):  # as after SIGKILL before the first checkpoint
        path = whole / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert run_training(made, auto=True) == whole
    assert [row["step"] for row in read_jsonl(whole / "metrics.jsonl")] == [1, 2, 3, 4]
    assert run_training(made, auto=True) == whole, "a finished run is no error"


def test_the_command_resumes(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    assert main(["train", "grpo", "--resume", str(run), "train.steps=5"]) == 0
    assert "continues after step 4 of 5" in capsys.readouterr().out
    assert main(["train", "grpo", "--config", str(run / "config.yaml"), "--resume", "auto", "train.steps=6",
                 f"run.output={run}"]) == 0  # fmt: skip
    assert "continues after step 5 of 6" in capsys.readouterr().out
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert main(["train", "grpo", "--resume", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: it does not exist" in capsys.readouterr().err
    assert main(["train", "grpo", "--resume", str(tmp_path)]) == 2
    assert "no checkpoint there" in capsys.readouterr().err
    metrics = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(metrics[:2] + metrics[4:]))
    assert main(["train", "grpo", "--resume", str(run), "train.steps=7"]) == 0
    assert "metrics.jsonl lacks 2 of the 6 steps" in capsys.readouterr().out
    before = (run / "metrics.jsonl").read_text()
    assert main(["compare", str(run), str(run), "--output", str(run / "metrics.jsonl")]) == 2
    assert "does not end in .html" in capsys.readouterr().err and (run / "metrics.jsonl").read_text() == before
    (run / "metrics.jsonl").write_text("".join(["garbage\n", *metrics]))
    for command in (["runs", str(tmp_path)], ["train", "grpo", "--resume", str(run), "train.steps=8"]):
        main(command)
        assert "metrics.jsonl: line 1 is damaged" in capsys.readouterr().err


FAILING = """
import pathlib
def judge(completions, trainer_state=None, **_):
    if pathlib.Path({flag!r}).exists() and trainer_state.global_step >= {step}:
        raise ConnectionError("the judge is down")
    return [len(set(text)) / 10 for text in completions]
"""


@pytest.mark.parametrize("step", (2, STEPS))
def test_a_run_whose_reward_fails_keeps_its_finished_steps(step: int, tmp_path: Path) -> None:
    """In the rollout of step 3, and in the evaluation after the last step."""
    flag, made = tmp_path / "down", settings(tmp_path, "grpo", "train.save_every=0")
    (tmp_path / "judge.py").write_text(FAILING.format(flag=str(flag), step=step))
    made.rewards[0].function = f"{tmp_path / 'judge.py'}:judge"
    expected = run_training(made.model_copy(deep=True, update={"run": made.run.model_copy(
        update={"output": str(tmp_path / "whole")})}))  # fmt: skip
    flag.touch()
    with pytest.raises(InputError, match="the judge is down"):
        run_training(made)
    flag.unlink()
    assert checkpoint.find(tmp_path / "run").name == checkpoint.name_of(step)
    assert_same(run_training(made, resume=tmp_path / "run"), expected)


def test_auto_refuses_a_folder_that_is_no_run(tmp_path: Path) -> None:
    made = settings(tmp_path, "sft")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.txt").touch()
    with pytest.raises(InputError, match="is not a run folder and not empty"):
        run_training(made, auto=True)


def test_every_file_of_a_pattern_is_compared_on_resume(tmp_path: Path) -> None:
    for i in range(2):
        (tmp_path / f"d-{i}.jsonl").write_text('{"prompt": "1", "completion": "2"}\n')
    made = settings_of(tmp_path, "warmup.steps=1", f"warmup.data={tmp_path}/d-*.jsonl")
    kept = checkpoint._data(made)
    assert checkpoint._data(made) == kept
    (tmp_path / "d-1.jsonl").write_text('{"prompt": "1", "completion": "3"}\n')
    assert checkpoint._data(made).keys() == kept.keys() and checkpoint._data(made) != kept
