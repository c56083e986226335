"""Scores of a reward model and losses of DPO on CUDA: equal bytes in any batch, and equal weights when repeated."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu.gpu_checks import Compared, Record
from torch import Tensor

from rlkernel import ops
from rlkernel.models import Decoder, PackedBatch, ScalarModel, preset
from rlkernel.training.batch import Trajectory
from rlkernel.training.config import DPOSettings, OptimizerSettings, RewardModelSettings
from rlkernel.training.dpo import DPO, pair_logps
from rlkernel.training.optimizer import Optimizer
from rlkernel.training.pairs import Pair
from rlkernel.training.reward_model import PairwiseReward
from rlkernel.training.supervised import evaluate, update

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def decoder() -> Decoder:
    config = replace(preset("qwen3-0.6b", num_layers=2), vocab_size=4096, eos_token_id=(2,), bos_token_id=None)
    return Decoder.from_config(config, seed=0).to(device="cuda", dtype=torch.bfloat16)


def sequences(count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(4096) for _ in range(rng.randint(2, 300))] for _ in range(count)]


def pairs(count: int) -> list[Pair]:
    ids = iter(sequences(3 * count))
    return [Pair(Trajectory(prompt := next(ids), next(ids)), Trajectory(prompt, next(ids))) for _ in range(count)]


@torch.no_grad()
def test_values_in_any_batch(record: Record) -> None:
    model, rows, seen = ScalarModel.from_decoder(decoder()), sequences(48), Compared()
    value = lambda part: model.values(PackedBatch.from_sequences(part, "cuda"))
    together = value(rows)
    seen.rows(together, torch.cat([value([row]) for row in rows]), "alone")
    seen.rows(together, torch.cat([value(rows[:17]), value(rows[17:])]), "in two parts")
    with ops.stock():  # the control; its values are rounded to bf16, so only the hidden states can differ
        hidden = model(PackedBatch.from_sequences(rows, "cuda"))
        alone = torch.cat([model(PackedBatch.from_sequences([row], "cuda")) for row in rows])
        assert not torch.equal(hidden, alone)
    record(**vars(seen))


def objective(kind: str) -> tuple[Any, list[Pair]]:
    found = pairs(24)
    if kind == "reward":
        return PairwiseReward(ScalarModel.from_decoder(decoder()), RewardModelSettings(), "cuda"), found
    model = decoder()
    with torch.no_grad():
        logps = pair_logps(model, found, "cuda").tolist()
    found = [replace(pair, reference=(c, r)) for pair, (c, r) in zip(found, logps, strict=True)]
    return DPO(model, DPOSettings(), "cuda"), found


@pytest.mark.parametrize("kind", ("dpo", "reward"))
def test_losses_of_micro_batches_and_weights_of_repeated_updates(kind: str, record: Record) -> None:
    def run() -> tuple[list[dict[str, float]], list[Tensor]]:
        made, found = objective(kind)
        optimizer = Optimizer(made.model, OptimizerSettings(lr=1e-4), 3)
        losses = [update(made, optimizer, found, 2000)[0] for _ in range(3)]
        return [*losses, evaluate(made, found, 700), evaluate(made, found, 100_000)], list(made.model.parameters())

    (metrics, weights), (others, other_weights) = run(), run()
    assert metrics == others and metrics[-1] == metrics[-2]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    seen = Compared()
    for mine, theirs in zip(weights, other_weights, strict=True):
        seen.whole(mine.detach(), theirs.detach(), "weights")
    record(**vars(seen))
