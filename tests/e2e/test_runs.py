"""The commands as a user runs them: a transformers directory, a hand-written JSONL, a reward file; the demo."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.conftest import ROOT
from e2e.tiny_model import make_model

from rlkernel.cli.main import main
from rlkernel.training.run_folder import read_jsonl

Cli = Callable[..., subprocess.CompletedProcess[str]]

PROMPTS = """\
{"prompt": "name a colour", "letter": "r"}
{"prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is your name"}], "letter": "n"}
{"prompt": "red green", "letter": "b"}

{"prompt": [{"role": "user", "content": "blue\\n"}], "letter": "e"}
"""
REWARD = '''\
"""Rewards a letter, and shortness."""


def letter(prompts, completions, completion_ids, letter, **columns):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    assert all(isinstance(p, str) == isinstance(c, str) for p, c in zip(prompts, completions))
    return [text.count(want) / (1 + len(text)) for text, want in zip(texts, letter)]


def short(completion_ids):
    return [-len(ids) / 100 for ids in completion_ids]
'''
QUICK = ["train.steps=3", "rollout.prompts=4", "rollout.group_size=4", "rollout.max_tokens=24", "optimizer.lr=1e-3"]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "prompts.jsonl").write_text(PROMPTS, encoding="utf-8")
    (tmp_path / "reward.py").write_text(REWARD, encoding="utf-8")
    return ["--data", "prompts.jsonl", "--reward", "reward.py:letter", "--reward", "reward:short"]


def check_exact(folder: Path) -> list[dict[str, Any]]:
    metrics = read_jsonl(folder / "metrics.jsonl")
    assert metrics and all(row["exact_frac"] == 1.0 and row["mismatch_tokens"] == 0 for row in metrics)
    assert all(row["contract"] == "rlk-2" for row in metrics)
    return metrics


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_transformers_directory_is_trained(
    tmp_path: Path, model_dir: Path, files: list[str], rlkernel: Cli, dtype: str
) -> None:
    import transformers

    words = [*QUICK, "data.heldout=prompts.jsonl", f"model.dtype={dtype}", "run.probe_rollouts=1"]
    (tmp_path / "model").symlink_to(model_dir)  # in the run folder, `model` is the trained one
    out = rlkernel(
        "train", "grpo", "--model", "model", *files, "--output", "out", "--seed", 7, "--device", "cpu", *words
    )
    folder = tmp_path / "out"
    metrics = check_exact(folder)
    assert len(metrics) == 3 and sum(row["tokens"] for row in metrics) > 100
    assert {"reward_letter", "reward_short"} <= set(metrics[0])
    assert [row["step"] for row in read_jsonl(folder / "eval.jsonl")] == [0, 3]
    for text in (
        "note: 2 of 4 prompts are chats; rewards get",
        "exact fraction",
        "mismatching tokens",
        "held-out reward after",
        "report: out/report.html",
    ):
        assert text in out.stdout
    assert "agree to the last bit" in (folder / "report.html").read_text(encoding="utf-8")

    trained = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    start = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=trained.dtype)
    assert str(trained.dtype) == f"torch.{dtype}"
    moved = [not torch.equal(a, b) for a, b in zip(trained.parameters(), start.parameters(), strict=True)]
    assert all(moved), "every parameter was trained"
    text = "name a colour"
    loaded = transformers.AutoTokenizer.from_pretrained(folder / "model")
    assert loaded(text).input_ids == transformers.AutoTokenizer.from_pretrained(model_dir)(text).input_ids

    # The report's command, run from elsewhere, with relative paths in the first run's settings and a module as reward.
    command = re.search(r"Command: <code>(.*?)</code>", (folder / "report.html").read_text(encoding="utf-8"))
    assert command is not None
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    again = subprocess.run(
        ["sh", "-c", html.unescape(command[1])], cwd="/", env=environment, capture_output=True, text=True, timeout=600
    )
    assert again.returncode == 0 and f"run folder {folder}-2 ({folder} is taken)" in again.stdout, again.stderr
    second = check_exact(tmp_path / "out-2")
    assert [row["reward"] for row in second] == [row["reward"] for row in metrics], "a run can be repeated"


def test_a_transformers_directory_generates(
    tmp_path: Path, model_dir: Path, rlkernel: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "--model", str(model_dir), "--max-tokens", "8", "--seed", "3"]
    plain = rlkernel(*words, "--prompt", "red", "--prompt", "name a colour", "-n", 2).stdout
    assert plain.startswith("> red\n") and "\n> name a colour\n" in plain
    monkeypatch.chdir(tmp_path)

    def here(*more: str, status: int = 0) -> str:
        assert main([*words, *more]) == status
        captured = capsys.readouterr()
        return captured.err if status else captured.out

    here("--prompt", "red", "--prompt", "blue", "--output", "two.jsonl")
    here("--prompt", "red", "--output", "one.jsonl", "--top-k", "320")
    two, one = read_jsonl(tmp_path / "two.jsonl"), read_jsonl(tmp_path / "one.jsonl")
    assert (two[0].pop("sampling")["top_k"], one[0].pop("sampling")["top_k"]) == (0, 320)
    assert two[0] == one[0] and len(one[0]["logprobs"]) == len(one[0]["token_ids"])
    (tmp_path / "p.jsonl").write_text('{"prompt": [{"role": "user", "content": "hi"}]}\n')
    assert "> hi\n" in here("--prompts", "p.jsonl", "--backend", "torch")
    assert "> hi\n" in here("--prompt", "hi", "--chat")
    for bad, message in (
        ([], "no prompt"),
        (["--prompt", "x", "--temperature", "-1"], "temperature"),
        (["--prompts", "absent.jsonl"], "cannot read absent.jsonl"),
        (["--prompt", "x", "--output", "/proc/x/y"], "cannot write"),
        (["--prompt", "red", "--prompt", "red " * 200], "--prompt 2: prompt has"),
        (["--prompts", "p.jsonl", "--max-tokens", "4", "--prompt", ""], "--prompt 1: prompt is empty"),
        (["--prompt", "x", "--model", "absent"], "absent"),
    ):
        error = here(*bad, status=2)
        assert error.startswith("rlkernel: generate: ") and message in error and error.count("\n") == 1


def test_supervised_training_of_a_transformers_directory(tmp_path: Path, model_dir: Path, rlkernel: Cli) -> None:
    rows = [
        {"prompt": "name a colour", "completion": "red"},
        {"messages": [{"role": "user", "content": "what is your name"}, {"role": "assistant", "content": "blue"}]},
    ]
    (tmp_path / "e.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["data.heldout=e.jsonl", "train.steps=15", "train.batch_size=2", "optimizer.lr=3e-3"]
    out = rlkernel("train", "sft", "--model", model_dir, "--data", "e.jsonl", "--output", "out", *words).stdout
    assert "held-out loss after" in out
    evals = read_jsonl(tmp_path / "out" / "eval.jsonl")
    assert evals[-1]["loss"] < 0.3 * evals[0]["loss"]
    answer = rlkernel("generate", "--model", "out/model", "--prompt", "name a colour", "--temperature", 0).stdout
    assert answer == "> name a colour\nred\n"


def test_the_demo_and_its_control_arm(tmp_path: Path, rlkernel: Cli) -> None:
    words = ["warmup.steps=8", "warmup.batch_size=32", "train.steps=3", "rollout.prompts=16", "eval.rows=32"]
    out = rlkernel("train", "grpo", *words).stdout
    folder = tmp_path / "runs" / "grpo-arithmetic"
    check_exact(folder)
    assert "report: runs/grpo-arithmetic/report.html" in out and "the same on stock torch" in out
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["exact_frac"] == 1.0 and sum(row["mismatch_tokens"] for row in summary["probe"]) > 0
    assert (folder / "model" / "tokenizer.json").exists()
    assert "rlkernel:" not in rlkernel("generate", "--model", folder / "model", "--prompt", "12+34=").stderr

    out = rlkernel("train", "grpo", "--backend", "torch", *words).stdout
    control = json.loads((tmp_path / "runs" / "grpo-arithmetic-torch" / "summary.json").read_text())
    assert control["mismatch_tokens"] > 0 and 0 < control["max_abs_diff"] < 1e-2 and control["exact_frac"] < 1
    assert "drift apart" in (tmp_path / "runs" / "grpo-arithmetic-torch" / "report.html").read_text()

    listed = rlkernel("runs").stdout.splitlines()
    assert len(listed) == 3 and "finished" in listed[1] and "tokens differ" in listed[2]
    assert rlkernel("compare", folder, f"{folder}-torch").stdout == "compare.html\n"
    assert "Held-out reward" in (tmp_path / "compare.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ("grpo", "ppo"))
def test_the_embedded_default_learns_and_stays_exact(tmp_path: Path, rlkernel: Cli, algorithm: str) -> None:
    rlkernel("train", algorithm)
    folder = tmp_path / "runs" / f"{algorithm}-arithmetic"
    check_exact(folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["heldout_before"] < 0.35 and summary["heldout_after"] > 0.85


@pytest.mark.slow
def test_the_embedded_reward_model_learns(tmp_path: Path, rlkernel: Cli) -> None:
    rlkernel("train", "reward", "train.steps=120", "warmup.examples=10000")
    first, *_, last = read_jsonl(tmp_path / "runs" / "reward-arithmetic" / "eval.jsonl")
    assert first["accuracy"] < 0.65 and last["accuracy"] > 0.75


def reward_file(body: str) -> str:
    return f"def f(completions, **_):\n    {body}\n"


@pytest.mark.parametrize(
    ("files", "words", "message"),
    [
        ({"p.jsonl": '{"prompt": "red"}\n{"prompt" "x"}\n'}, [], "p.jsonl:2: not JSON"),
        ({"p.jsonl": '{"prompt": "red"}\n{"text": "x"}\n'}, [], "p.jsonl:2: column 'prompt' is missing"),
        ({"p.jsonl": '{"prompt": ""}\n'}, [], "p.jsonl:1: column 'prompt' is empty"),
        ({"p.jsonl": json.dumps({"prompt": "x" * 500}) + "\n"}, [], "p.jsonl:1: the prompt has 500 tokens"),
        ({"p.jsonl": '{"prompt": [{"role": "x", "content": "y"}]}\n'}, [], "p.jsonl:1: column 'prompt', message 0"),
        ({"r.py": "def f(completions, answer, **_):\n    return [0.0]\n"}, [], "reward f: it takes 'answer', which"),
        ({"r.py": reward_file("return [float('nan')] * len(completions)")}, [], "reward f: value 0 is nan"),
        ({"r.py": reward_file("return None")}, [], "reward f: returned None"),
        ({"r.py": reward_file("return [None] * len(completions)")}, [], "completion 0 was judged by none of f"),
        ({"r.py": reward_file("return [1.0, 2.0]")}, [], "reward f: returned 2 values for 1"),
        ({"r.py": "import absent_module\n"}, [], "importing r.py failed: ModuleNotFoundError"),
        ({}, ["rollout.group_size=1"], "every advantage zero"),
        ({}, ["--output", "/proc/x"], "is not writable"),
        ({}, ["engine.num_pages=1"], "engine.num_pages is too small"),
        ({}, ["data.heldout_rows=9"], "leaves no training row"),
    ],
    ids=lambda value: None if isinstance(value, (dict, list)) else str(value)[:40],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    files: dict[str, str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    written = {
        "p.jsonl": '{"prompt": "red"}\n{"prompt": "blue"}\n',
        "r.py": reward_file("return [1.0] * len(completions)"),
    }
    for name, text in {**written, **files}.items():
        (tmp_path / name).write_text(text)
    options = ["--model", str(model_dir), "--data", "p.jsonl", "--reward", "r.py:f", "--output", "out"]
    assert main(["train", "grpo", *options, *QUICK, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rlkernel: ") and message in error and error.count("\n") == 1
    started = (tmp_path / "out" / "metrics.jsonl").exists()
    assert not started


@pytest.mark.parametrize("place", ["worker", "in_process"])
def test_a_reward_that_always_raises_stops_the_run_with_its_traceback(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "red"}\n{"prompt": "blue"}\n')
    (tmp_path / "r.py").write_text(reward_file("raise SystemExit(0) if len(completions[0]) % 2 else ValueError('no')"))
    options = ["--model", str(model_dir), "--data", "p.jsonl", "--reward", "r.py:f", "--output", "out"]
    assert main(["train", "grpo", *options, *QUICK, f"reward_pool.in_process={place == 'in_process'}"]) == 2
    error = capsys.readouterr().err
    assert re.match(
        r"rlkernel: reward f: raised (ValueError: no|SystemExit: 0) \(.*r\.py:2\); (all 16 comp|its first 16)", error
    ), error
    assert "\nTraceback (most recent call last):\n" in error and "len(completions[0]) % 2" in error
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", "does not exist"),
        ("family", "model_type 'bert' is not supported"),
        ("shard", "model.safetensors"),
        ("absent shard", "safetensors"),
        ("vocabulary", "token id"),
        ("tokenizer", "tokenizer.json does not exist"),
    ],
)
def test_a_bad_model_directory_is_one_line_and_leaves_no_run_folder(
    tmp_path: Path,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damage: str,
    message: str,
) -> None:
    model = tmp_path / "model"
    if damage == "vocabulary":
        make_model(model, vocab_size=100)
    elif damage != "missing":
        shutil.copytree(model_dir, model)
    if damage == "family":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    if damage == "shard":
        weights = (model / "model.safetensors").read_bytes()
        (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    if damage == "absent shard":
        (model / "model.safetensors").unlink()
    if damage == "tokenizer":
        (model / "tokenizer.json").unlink()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "name a colour"}\n')
    (tmp_path / "r.py").write_text(reward_file("return [1.0] * len(completions)"))
    options = ["--model", "model", "--data", "p.jsonl", "--reward", "r.py:f", "--output", "out"]
    assert main(["train", "grpo", *options, *QUICK]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rlkernel: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
