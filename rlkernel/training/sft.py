"""Supervised training on completions, packed, through the same forward and log-probability as GRPO.

`train_sft` is a run; `warm_up` makes the same updates before the first rollout of a GRPO run, or the first step of DPO.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rlkernel.models import Decoder
from rlkernel.training.batch import TokenBudget, Trajectory, pack_trajectories, score
from rlkernel.training.checkpoint import Saver
from rlkernel.training.config import OptimizerSettings
from rlkernel.training.display import Display
from rlkernel.training.parts import Parts
from rlkernel.training.run_folder import RunFolder
from rlkernel.training.sharded_optimizer import make_optimizer
from rlkernel.training.supervised import batches, train, update


class SFT:
    """The objective of supervised training: the mean over completion tokens of -log p, in nats."""

    headline, shown = "loss", {"loss": "loss"}

    def __init__(self, model: Decoder, device: str):
        self.model, self.device = model, device

    def terms(self, items: Sequence[Trajectory]) -> tuple[Tensor, list[float]]:
        logp = score(self.model, pack_trajectories(items, self.device)).logp
        return -logp, logp.tolist()

    def record(self, data: float) -> float:
        return data

    def metrics(self, records: list[float]) -> dict[str, float]:
        return {"loss": -math.fsum(records) / len(records)}

    def count(self, items: Sequence[Trajectory]) -> int:
        return sum(self.completion_tokens(item) for item in items)

    def packed(self, item: Trajectory) -> int:
        return len(item) - 1

    def completion_tokens(self, item: Trajectory) -> int:
        return len(item.completion)


def warm_up(parts: Parts, display: Display, saver: Saver) -> list[float]:
    """Supervised updates before the first step of a run; returns the loss of each.

    Raises:
        Interrupted: a signal asked the run to stop.
    """
    settings = parts.settings
    if settings.model.path:
        display.say(
            f"note: warmup.steps={settings.warmup.steps} trains {settings.model.path} on completions first; "
            "warmup.steps=0 starts from it as it is"
        )
    warmup, budget = settings.warmup, TokenBudget(settings.train.micro_batch_tokens)
    schedule = OptimizerSettings(
        lr=warmup.lr,
        schedule="cosine",
        warmup_steps=min(10, warmup.steps // 10),
        states=settings.optimizer.states,
        offload=settings.optimizer.offload,
    )
    optimizer = make_optimizer(parts.model, schedule, warmup.steps, parts.ranks, settings.train.shard)
    stream = batches(parts.examples, warmup.batch_size, settings.run.seed)
    objective = SFT(parts.model, parts.device)
    losses: list[float] = []
    display.start("warm-up", warmup.steps)
    for step in range(1, warmup.steps + 1):
        found, _ = update(objective, optimizer, next(stream), budget, parts.ranks)
        losses.append(found["loss"])
        saver.share_signal()
        saver.require_running()
        display.step(step, {"loss": f"{found['loss']:.3f}"})
    display.stop()
    optimizer.close()
    return losses


def train_sft(parts: Parts, run: RunFolder, display: Display, saver: Saver) -> dict[str, Any]:
    """Trains on `parts.examples`; returns its part of `summary.json`."""
    objective = SFT(parts.model, parts.device)
    items, heldout = parts.examples, parts.heldout_examples
    return train(objective, items, heldout, parts.settings, parts.device, run, display, saver, parts.ranks)
