"""Supervised training: it learns, its gradient is cross-entropy's, and micro-batches change no bit."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path

import pytest
import torch
from training.tiny import settings_of

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.models import Decoder, ModelConfig
from rlkernel.training.batch import TokenBudget, Trajectory, pack_trajectories
from rlkernel.training.config import OptimizerSettings, resolve
from rlkernel.training.display import Display
from rlkernel.training.optimizer import Optimizer
from rlkernel.training.parts import read_inputs
from rlkernel.training.run_folder import read_jsonl
from rlkernel.training.session import run_training
from rlkernel.training.sft import SFT
from rlkernel.training.supervised import batches, evaluate, update

TRAJECTORIES = [Trajectory([1, 2], [3, 4, 1]), Trajectory([2], [5]), Trajectory([3, 3, 3], [6, 1])]
CONFIG = ModelConfig("qwen2", 12, 16, 24, 1, 2, 1, 8, max_position_embeddings=16)


def test_the_loss_and_its_gradient_are_cross_entropys(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = Decoder.from_config(CONFIG, seed=2), Decoder.from_config(CONFIG, seed=2)
    total = torch.zeros((), dtype=torch.float64)
    with ops.stock():
        for sample in TRAJECTORIES:
            logits = plain.logits(plain(pack_trajectories([sample], "cpu").batch)).double()[len(sample.prompt) - 1 :]
            total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(sample.completion), reduction="sum")
        expected = total / sum(len(sample.completion) for sample in TRAJECTORIES)
        expected.backward()
    optimizer = Optimizer(model, OptimizerSettings(), 1)
    monkeypatch.setattr(optimizer, "step", lambda: None)
    found, _ = update(SFT(model, "cpu"), optimizer, TRAJECTORIES, TokenBudget(100))
    assert math.isclose(found["loss"], float(expected.detach()), rel_tol=1e-6)
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        grad = theirs.grad
        assert grad is not None
        assert torch.allclose(mine.main_grad, grad, rtol=1e-4, atol=1e-6), name  # type: ignore[attr-defined]


def test_it_learns_and_micro_batches_change_no_bit() -> None:
    found = []
    for budget in (TokenBudget(1000), TokenBudget(3)):
        model = Decoder.from_config(CONFIG, seed=2)
        optimizer = Optimizer(model, OptimizerSettings(lr=0.02), 30)
        objective = SFT(model, "cpu")
        losses = [update(objective, optimizer, TRAJECTORIES, budget)[0]["loss"] for _ in range(30)]
        assert losses[-1] < 0.2 * losses[0]
        assert math.isclose(evaluate(objective, TRAJECTORIES, budget)["loss"], losses[-1], rel_tol=0.5)
        found.append((losses, {name: p.detach() for name, p in model.named_parameters()}))
    assert found[0][0] == found[1][0]
    for name in found[0][1]:
        assert_bitwise(found[0][1][name], found[1][1][name], name)


def test_batches_cover_the_data_and_follow_the_seed() -> None:
    samples = [Trajectory([i], [i]) for i in range(7)]
    first = list(islice(batches(samples, 3, 1), 4))
    assert first == list(islice(batches(samples, 3, 1), 4)) and first != list(islice(batches(samples, 3, 2), 4))
    assert len({s.prompt[0] for batch in first[:2] for s in batch}) == 6
    assert all(len(batch) == 3 for batch in first)
    assert [len(batch) for batch in islice(batches(samples, 20, 1), 2)] == [7, 7]


def test_a_whole_supervised_run(tmp_path: Path) -> None:
    words = ["train.steps=12", "train.batch_size=16", "eval.every=6", "warmup.examples=64"]
    settings = settings_of(tmp_path, *words, algorithm="sft")
    folder = run_training(settings, Display())
    evals, metrics = read_jsonl(folder / "eval.jsonl"), read_jsonl(folder / "metrics.jsonl")
    assert [row["step"] for row in evals] == [0, 6, 12] and len(metrics) == 12
    assert evals[-1]["loss"] < evals[0]["loss"]
    assert "Supervised training finished." in (folder / "report.html").read_text(encoding="utf-8")
    assert (folder / "model" / "model.safetensors").exists()


def test_held_out_rows_of_a_task_are_not_trained_on() -> None:
    inputs = read_inputs(resolve(algorithm="sft", overrides=["data.task=arithmetic", "warmup.examples=20000"]))
    assert inputs.heldout
    assert not {row["prompt"] for row in inputs.heldout} & {row["prompt"] for row in inputs.train}
