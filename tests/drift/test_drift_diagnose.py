"""What a diagnosis may not do: contradict its verdict, die of a floor, judge by another model, overlook NaN."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rlkernel_drift.capsule import Floor, Operators, Sampling, Tensor
from rlkernel_drift.cli.main import main
from rlkernel_drift.compare import Options, compare_capsules
from rlkernel_drift.diagnose.verdict import diagnose_verdict
from rlkernel_drift.errors import DriftError
from rlkernel_drift.faults.tiny import tiny_model
from rlkernel_drift.faults.world import Recorded, healthy_world, record_world, with_distribution
from rlkernel_drift.profiles import GENERAL
from rlkernel_drift.scoring.sequences import sequences_of
from rlkernel_drift.verdict import Status, Verdict


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def recorded(seed: int = 4, temperature: float = 1.0, operators: bool = False) -> Recorded:
    world = healthy_world("llama", seed, "float32")
    world.operators = operators
    return record_world(world, lambda w: setattr(w.rollout, "sampling", Sampling(temperature=temperature)))


def diagnosed(pair: Recorded, floor: Floor | None = None, **options: object) -> Verdict:
    verdict = compare_capsules(pair.rollout, pair.train, Options(profile=GENERAL))
    references = None if options.get("files") else lambda: pair.world.references
    return diagnose_verdict(verdict, pair.rollout, pair.train, references, floor)


def with_logits(pair: Recorded) -> Recorded:
    sequences = sequences_of(pair.train)
    logits = pair.world.trainer.model.logits(sequences).numpy()
    keep = np.arange(0, sequences.counted, 3)
    return dataclasses.replace(pair, train=with_distribution(pair.train, sequences.token.numpy()[keep], logits[keep]))


@pytest.mark.parametrize("files", [True, False])
def test_a_named_cause_is_never_aligned(files: bool) -> None:
    pair = with_logits(recorded(temperature=0.985))
    assert compare_capsules(pair.rollout, pair.train, Options(profile=GENERAL)).status == Status.ALIGNED
    verdict = diagnosed(pair, files=files)
    assert verdict.diagnosis is not None and verdict.diagnosis.cause == "temperature"
    assert verdict.exit_code == 1 and "temperature" in verdict.headline


def test_unexplained_beside_a_guessed_floor_is_inconclusive() -> None:
    pair = with_logits(recorded())
    noise = np.random.default_rng(0).normal(0, 1e-3, pair.rollout.tokens).astype(np.float32)
    (name,) = pair.rollout.logprobs
    noisy = dataclasses.replace(pair.rollout, logprobs={name: np.minimum(pair.rollout.logprobs[name] + noise, 0)})
    verdict = diagnosed(dataclasses.replace(pair, rollout=noisy), files=True)
    assert verdict.diagnosis is not None and verdict.diagnosis.cause == "unexplained"
    assert verdict.exit_code == 3 and "the floor is a guess" in verdict.headline


@pytest.mark.parametrize("files", [True, False])
def test_the_floor_of_an_exact_engine_serves(files: bool) -> None:
    zero = Floor(mean=0.0, p99=0.0, maximum=0.0, tokens=100, permutations=["batch"])
    assert diagnosed(with_logits(recorded()), zero, files=files).exit_code == 0
    verdict = diagnosed(with_logits(recorded(temperature=0.8)), zero, files=files)
    assert verdict.exit_code == 1 and verdict.diagnosis is not None and verdict.diagnosis.cause == "temperature"
    assert verdict.diagnosis.hypotheses[0].over_floor < 10


def test_operators_that_are_not_finite_are_named() -> None:
    pair = recorded(operators=True)
    values = dict(pair.rollout.operators.values)
    array = values["layers.2.down_proj"].values.copy()
    array[:5] = np.nan
    values["layers.2.down_proj"] = Tensor.of(array)
    broken = dataclasses.replace(pair.rollout, operators=Operators(pair.rollout.operators.rows, values))
    verdict = diagnosed(dataclasses.replace(pair, rollout=broken))
    assert verdict.exit_code == 1 and verdict.diagnosis is not None
    assert verdict.diagnosis.parameters["operator"] == "layers.2.down_proj"
    assert "NaN or infinite" in verdict.headline
    assert diagnosed(pair).exit_code == 0


def captured(folder: Path, model: str, *weights: str) -> tuple[str, str]:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": list(range(5, 15 + i))}) + "\n" for i in range(4)))
    rollout, train = str(folder / f"r-{model}{len(weights)}"), str(folder / f"t-{model}{len(weights)}")
    common = ["capture", "--engine", "hf", "--model", str(folder / model), *weights]
    assert main([*common, "--prompts", str(prompts), "--max-tokens", "12", "--out", rollout]) == 0
    assert main([*common, "--tokens", rollout, "--out", train]) == 0
    return rollout, train


def test_another_model_is_refused_and_makes_no_drift(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("qwen3", 5).save_pretrained(tmp_path / "base")
    tiny_model("qwen3", 6).save_pretrained(tmp_path / "other")
    tiny_model("qwen3", 5).save_pretrained(tmp_path / "rope")
    config = json.loads((tmp_path / "rope/config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 3210.0}
    (tmp_path / "rope/config.json").write_text(json.dumps(config))
    for name, words in (("rope", "rope_theta 10000.0 where the capsule has 3210.0"), ("other", "tensors are others")):
        sides = captured(tmp_path, name)
        capsys.readouterr()
        assert main(["diagnose", *sides, "--model", str(tmp_path / "base")]) == 2
        assert words in " ".join(capsys.readouterr().err.split())
        assert main(["diagnose", *sides, "--model", str(tmp_path / name)]) == 0
    # Without fingerprints the model cannot be told apart, but two sides of equal bits do not drift.
    sides = captured(tmp_path, "other", "--no-weights")
    capsys.readouterr()
    assert main(["diagnose", *sides, "--model", str(tmp_path / "base")]) == 0
    assert "differ from the model alike" in " ".join(capsys.readouterr().out.split())


def test_a_model_of_another_shape_is_refused() -> None:
    pair = recorded()
    shaped = pair.train.manifest.model.model_copy(update={"layers": 77})
    train = dataclasses.replace(pair.train, manifest=pair.train.manifest.model_copy(update={"model": shaped}))
    with pytest.raises(DriftError, match="num_hidden_layers"):
        diagnosed(dataclasses.replace(pair, train=train))
