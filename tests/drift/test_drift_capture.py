"""Capture, floor and diagnose through the command line, on tiny model directories: transformers and rlkernel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rlkernel_drift.capsule import read_capsule
from rlkernel_drift.capture.request import Request
from rlkernel_drift.capture.vllm_engine import capture_vllm, root_cause, teed_output
from rlkernel_drift.cli.main import main
from rlkernel_drift.errors import DriftError
from rlkernel_drift.faults.world import tiny_model, updated
from rlkernel_drift.verdict import Verdict


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    model = tiny_model("qwen3", 5)
    model.save_pretrained(root / "new")
    updated(model, 1, 0.05).save_pretrained(root / "old")
    prompts = [{"prompt": np.random.default_rng(i).integers(2, 250, 8 + i).tolist()} for i in range(5)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    return root


def capture(models: Path, out: Path, *options: str, engine: str = "hf", model: str = "new") -> Path:
    source = [] if "--tokens" in options else ["--prompts", str(models / "prompts.jsonl"), "--max-tokens", "12"]
    where = ["--model", str(models / model), "--out", str(out)]
    assert main(["capture", "--engine", engine, *where, *source, *options]) == 0
    return out


def verdict(path: Path) -> Verdict:
    return Verdict.model_validate_json(path.read_text())


def test_capture_and_compare_transformers(models: Path, tmp_path: Path) -> None:
    rollout = capture(models, tmp_path / "r", "--operators", "full", "--top-p", "0.9", "--logits-rows", "6")
    side = read_capsule(rollout)
    assert {"recorded.raw", "recorded.processed", "prefill.raw", "prefill.processed"} == set(side.logprobs)
    assert side.kept is not None and side.distribution is not None and len(side.distribution.rows) == 6
    assert side.manifest.weights is not None and "model.norm.weight" in side.manifest.weights.tensors
    assert side.manifest.config["dtype"] == "float32" and side.manifest.command[0] == "rlkernel-drift"
    assert side.manifest.config["rope_theta"] == 10000  # from config.json, not from fp32 frequencies
    for k in range(4):
        assert f"layers.{k}.attention" in side.operators.values
    train = capture(models, tmp_path / "t", "--tokens", str(rollout), "--operators", "full")
    assert main(["compare", str(rollout), str(train)]) == 0
    assert main(["compare", str(rollout), f"hf:{models / 'new'}"]) == 0
    assert main(["compare", str(rollout), f"hf:{models / 'old'}"]) == 4
    assert main(["inspect", str(rollout)]) == 0


def test_row_samples_and_fingerprints_locate(models: Path, tmp_path: Path) -> None:
    for kind in ("rows", "fingerprint"):
        a = capture(models, tmp_path / f"{kind}-a", "--operators", kind)
        b = capture(models, tmp_path / f"{kind}-b", "--operators", kind, "--tokens", str(a), "--side", "rollout")
        c = capture(models, tmp_path / f"{kind}-c", "--operators", kind, "--tokens", str(a), model="old")
        out = tmp_path / f"{kind}.json"
        assert main(["compare", str(a), str(b), "--profile", "bitwise", "--json", str(out), "--keep-going"]) in (0, 1)
        assert verdict(out).layers.first is None  # type: ignore[union-attr]
        main(["compare", str(a), str(c), "--profile", "bitwise", "--json", str(out), "--keep-going"])
        first = verdict(out).layers.first  # type: ignore[union-attr]
        assert first is not None and first.operator == "embedding"
        assert (first.element is None) == (kind == "fingerprint")


def test_diagnose_names_stale_weights(models: Path, tmp_path: Path) -> None:
    rollout = capture(models, tmp_path / "r", "--no-weights", model="old")
    train = capture(models, tmp_path / "t", "--no-weights", "--tokens", str(rollout))
    out = tmp_path / "v.json"
    where = ["--model", str(models / "new"), "--previous", str(models / "old")]
    assert main(["diagnose", str(rollout), str(train), *where, "--json", str(out)]) == 1
    found = verdict(out).diagnosis
    assert found is not None and found.cause == "stale-weights" and found.side == "rollout"
    assert found.finding is not None and found.finding.fix and found.finding.threads
    assert found.residual is not None and found.floor is not None and found.residual <= 2 * found.floor
    # without the older weights no change explains the difference
    short = ["--model", str(models / "new"), "--seconds", "1", "--json", str(out)]
    assert main(["diagnose", str(rollout), str(train), *short]) == 1
    found = verdict(out).diagnosis
    assert found is not None and found.cause == "unexplained" and "temperature" in found.excluded


def test_floor(models: Path, tmp_path: Path) -> None:
    out = tmp_path / "floor.json"
    source = ["--prompts", str(models / "prompts.jsonl"), "--max-tokens", "8"]
    where = ["--model", str(models / "new"), "--dtype", "bfloat16", "--out", str(out)]
    assert main(["floor", "--engine", "hf", *source, *where]) == 0
    floor = json.loads(out.read_text())
    assert 0 < floor["mean"] < 0.2 and floor["tokens"] == 40
    rollout = capture(models, tmp_path / "r", "--dtype", "bfloat16")
    assert main(["compare", str(rollout), f"hf:{models / 'new'}", "--floor", str(out)]) == 0


def test_rlkernel_is_bitwise(models: Path, tmp_path: Path) -> None:
    rollout = capture(models, tmp_path / "r", "--top-p", "0.9", engine="rlkernel")
    train = capture(models, tmp_path / "t", "--tokens", str(rollout), "--operators", "full", engine="rlkernel")
    out = tmp_path / "v.json"
    assert main(["compare", str(rollout), str(train), "--json", str(out)]) == 0
    assert verdict(out).profile == "bitwise" and verdict(out).statistics.equal == 1.0  # type: ignore[union-attr]
    side = read_capsule(train)
    assert side.manifest.contract is not None and side.manifest.contract.startswith("rlk-")
    # The same operators, under the same names, as transformers has them.
    other = capture(models, tmp_path / "h", "--tokens", str(rollout), "--operators", "full")
    names = set(read_capsule(other).operators.values)
    assert set(side.operators.values) <= names and len(side.operators.values) > 40
    assert main(["compare", str(rollout), str(other), "--profile", "prime-rl"]) == 0
    assert main(["floor", "--engine", "rlkernel", "--model", str(models / "new"), "--tokens", str(rollout)]) == 0


def test_hidden_states_locate(models: Path, tmp_path: Path) -> None:
    """A folder as vLLM writes it: one file per request, [tokens, layers, width], against transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models / "new")
    (tmp_path / "states").mkdir()
    for number, ids in (("10-b", [7, 8, 9]), ("9-a", [3, 4, 5, 6])):
        with torch.no_grad():
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        shown = torch.stack([state[0] for state in states[:3]], 1)
        if number == "10-b":
            shown[2, 2, 5] = torch.nextafter(shown[2, 2, 5], torch.tensor(9.0))
        save_file({"token_ids": torch.tensor(ids), "hidden_states": shown}, tmp_path / f"states/{number}.safetensors")
    out = tmp_path / "v.json"
    sides = [f"{tmp_path / 'states'}@0,1,2", f"hf:{models / 'new'}"]
    assert main(["compare", *sides, "--profile", "bitwise", "--json", str(out)]) == 1
    first = verdict(out).layers.first  # type: ignore[union-attr]
    assert first is not None and first.operator == "layers.1.output"
    assert (first.sequence, first.index, first.ulps) == (1, 2, 1)
    # One unit in the last place on equal inputs is rounding, not a wrong operator; nothing was judged.
    assert "kernels" in [f.cause for f in verdict(out).findings]
    assert main(["compare", sides[0], sides[1]]) == 3


def test_two_engines_are_compared(models: Path, tmp_path: Path) -> None:
    """Two model directories with an engine each: the first samples, the second scores."""
    out, model = tmp_path / "v.json", models / "new"
    asked = ["--max-tokens", "6", "--json", str(out)]
    assert main(["compare", f"rlkernel:{model}", f"hf+rlkernel:{model}", *asked]) == 0
    found = verdict(out)
    assert found.profile == "bitwise" and found.statistics is not None and found.statistics.tokens == 48
    layers = next(gate for gate in found.gates if gate.name == "layers")
    assert layers.status == "passed" and "operators" in layers.summary
    assert main(["compare", f"rlkernel:{model}", f"hf:{model}", "--profile", "bitwise", *asked]) == 1
    found = verdict(out)
    assert found.layers is not None and found.layers.first is not None and "it begins at layers." in found.headline
    assert [f.cause for f in found.findings if f.severity == "error"] == ["drift", "kernels"]
    # The same rows, hashed on one side: the first difference has a name, and no size.
    hashed = ["--operators", "fingerprint", "--profile", "bitwise", *asked]
    assert main(["compare", f"hf:{model}", f"hf:{models / 'old'}", "--keep-going", *hashed]) == 4
    assert verdict(out).layers.first.element is None  # type: ignore[union-attr]


def test_random_prompts_fit_the_smaller_context(models: Path, tmp_path: Path, capsys: Any) -> None:
    out, small = tmp_path / "v.json", tmp_path / "small"
    shutil.copytree(models / "new", small)
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 24}))
    for sides in ([f"rlkernel:{small}", f"hf:{small}"], [f"rlkernel:{models / 'new'}", f"rlkernel:{small}"]):
        assert main(["compare", *sides, "--max-tokens", "8", "--operators", "none", "--json", str(out)]) == 0
        side = verdict(out).rollout
        assert side is not None and side.tokens == 8 * (15 + 8)  # and one for an engine that scores it as a prompt
    capsys.readouterr()
    assert main(["compare", f"rlkernel:{small}", f"hf:{small}"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "small is 24 tokens, and --max-tokens 64 leaves no token for a prompt" in error


@pytest.mark.parametrize(
    "options, words",
    [
        (["--prompts", "nowhere.txt"], "holds no prompts"),
        ([], "needs --prompts"),
    ],
)
def test_mistakes_end_in_one_line(models: Path, tmp_path: Path, capsys: Any, options: list[str], words: str) -> None:
    where = ["--model", str(models / "new"), "--out", str(tmp_path / "x")]
    assert main(["capture", "--engine", "hf", *where, *options]) == 2
    assert words in capsys.readouterr().err


def test_an_unknown_model_type(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-thing"}')
    (tmp_path / "p.jsonl").write_text('{"prompt": [1, 2]}\n')
    for engine in ("hf", "rlkernel"):
        where = ["--model", str(tmp_path), "--out", str(tmp_path / "x"), "--prompts", str(tmp_path / "p.jsonl")]
        assert main(["capture", "--engine", engine, *where]) == 2
    assert torch.is_grad_enabled()


def test_bad_requests_are_refused(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new, prompts = str(models / "new"), str(models / "prompts.jsonl")
    command = ["capture", "--engine", "hf", "--prompts", prompts, "--out", str(tmp_path / "c")]
    for option in (["--temperature", "-1"], ["--top-p", "2"]):
        assert main([*command, "--model", new, *option]) == 2
        assert capsys.readouterr().err.startswith(f"rlkernel-drift: {option[0]} is ")
    # a mistyped name is not looked up on the network
    assert main([*command, "--model", "nosuch"]) == 2 and "no config.json" in capsys.readouterr().err
    assert main(["floor", "--model", "nosuch", "--prompts", prompts]) == 2 and "config.json" in capsys.readouterr().err


def test_mistakes_are_found_before_anything_is_sampled(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlkernel_drift.capture.run_engine", lambda *_: pytest.fail("it was sampled"))
    command = ["capture", "--engine", "hf", "--model", str(models / "new"), "--prompts", str(models / "prompts.jsonl")]
    taken = tmp_path / "taken"
    taken.write_text("mine")
    for out, options, words in (
        (taken, [], "exists and is not a capsule"),
        (taken / "c", [], "is not a writable folder"),
        (tmp_path / "c", ["--device", "cuda:99"], "CUDA devices"),
        (tmp_path / "c", ["--device", "gpu"], "is not a device"),
    ):
        assert main([*command, "--out", str(out), *options]) == 2 and words in capsys.readouterr().err
    assert main(["diagnose", "a", "b", "--model", str(models / "new"), "--device", "cuda:99"]) == 2
    assert "CUDA devices" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("engine", ["hf", "rlkernel"])
def test_tokens_outside_the_vocabulary(models: Path, tmp_path: Path, engine: str, capsys: Any) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": [5, 99999]}\n')
    command = ["capture", "--engine", engine, "--model", str(models / "new"), "--out", str(tmp_path / "c")]
    assert main([*command, "--prompts", str(tmp_path / "p.jsonl"), "--max-tokens", "2"]) == 2
    assert "token id 99999 of a prompt is outside the model's vocabulary of 256" in capsys.readouterr().err


def test_diagnose_takes_settings_and_refuses_another_model(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout = capture(models, tmp_path / "r", "--no-weights", model="old")
    train = capture(models, tmp_path / "t", "--tokens", str(rollout), "--no-weights")
    assert read_capsule(rollout).manifest.config["rope_theta"] == 10000.0
    out = tmp_path / "v.json"
    command = ["diagnose", str(rollout), str(train), "--profile", "bitwise", "--json", str(out)]
    assert main([*command, "--model", str(models / "new"), "--previous", str(models / "old"), "--tis-cap", "7"]) == 1
    found = verdict(out)
    assert found.consequences[0].setting == "cap 7" and found.diagnosis is not None
    assert "rlkernel-drift diagnose" not in out.read_text().split('"command"')[0]
    assert main([*command, "--model", "nosuch"]) == 2
    small = tiny_model("qwen3", 5)
    small.resize_token_embeddings(64)
    small.save_pretrained(tmp_path / "small")
    capsys.readouterr()
    assert main([*command, "--model", str(tmp_path / "small")]) == 2
    assert "outside the vocabulary of 64" in " ".join(capsys.readouterr().err.split())


LOG = """\
(Worker pid=2) ERROR 11-22 00:24:56 [multiproc_executor.py:948]     raise ValueError(
(Worker pid=2) ERROR 11-22 00:24:56 [multiproc_executor.py:948] ValueError: too little memory: decrease it
(EngineCore pid=1) ERROR 11-22 00:25:01 [core.py:1433] EngineCore failed to start.
(EngineCore pid=1) ERROR 11-22 00:25:01 [core.py:1433] Exception: WorkerProc initialization failed. See stack trace.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"""


def test_why_an_engine_does_not_start(capfd: pytest.CaptureFixture[str]) -> None:
    with teed_output() as log:
        os.write(1, b"mine\n")  # pytest's sys.stdout does not go there
        subprocess.run([sys.executable, "-c", f"import sys; print({LOG!r}, file=sys.stderr)"], check=True)
    assert root_cause(log) == "ValueError: too little memory: decrease it" and "mine" in log
    assert root_cause(["all is well", LOG.splitlines()[-1]]) is None
    os.write(1, b"after\n")
    out, err = capfd.readouterr()
    assert out.split() == ["mine", "after"] and err.strip() == LOG


def test_a_started_process_can_print_after_the_block(capfd: pytest.CaptureFixture[str]) -> None:
    with teed_output():
        child = subprocess.Popen([sys.executable, "-c", "input(); print('late')"], stdin=subprocess.PIPE)
    child.communicate(b"\n")
    out = ""
    for _ in range(50):
        out += capfd.readouterr().out  # may read a part of the line
        if out.endswith("\n"):
            break
        time.sleep(0.1)
    assert out == "late\n" and child.returncode == 0


def test_vllm_that_dies_later_names_the_cause(models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Dead(Exception):
        pass

    def start(**_: Any) -> Any:
        def generate(*_: Any, **__: Any) -> Any:
            raise Dead("EngineCore encountered an issue. See stack trace (above) for the root cause.")

        os.write(2, LOG.encode() + b"\n")  # as a process started by vLLM would later
        return SimpleNamespace(generate=generate, llm_engine=SimpleNamespace(engine_core=None))

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=start, SamplingParams=lambda **_: None))
    monkeypatch.setattr("rlkernel_drift.capture.vllm_engine._died", lambda: (Dead,))
    with pytest.raises(DriftError, match="stopped while it computed: ValueError: too little memory"):
        capture_vllm(Request(models / "new", models / "prompts.jsonl"))


def test_vllm_that_does_not_start_names_the_cause(
    models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(**_: Any) -> None:
        os.write(2, LOG.encode() + b"\n")
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=start))
    command = ["capture", "--engine", "vllm", "--model", str(models / "new"), "--out", str(tmp_path / "c")]
    assert main([*command, "--prompts", str(models / "prompts.jsonl")]) == 2
    error = capsys.readouterr().err
    assert "does not start: ValueError: too little memory: decrease it" in error and "--engine-args" in error
