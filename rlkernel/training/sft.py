"""Supervised training on completions, packed, through the same forward and log-probability as GRPO.

`train_sft` is the whole algorithm; `warm_up` runs the same update before the first rollout of a GRPO run.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rlkernel.models import Decoder
from rlkernel.training.batch import Sample, micro_batches, pack_samples, score, score_all
from rlkernel.training.config import OptimizerSettings
from rlkernel.training.display import Display, count
from rlkernel.training.optimizer import Optimizer, Update
from rlkernel.training.parts import Parts
from rlkernel.training.run import Run, peak_memory_mib


def sft_update(
    model: Decoder, optimizer: Optimizer, samples: Sequence[Sample], *, budget: int, device: str
) -> tuple[float, Update]:
    """One update towards the completions; returns the mean loss per completion token (nats) and the update."""
    total = sum(len(sample.completion) for sample in samples)
    values: list[float] = []
    for chosen in micro_batches(samples, budget):
        packed = pack_samples([samples[i] for i in chosen], device)
        logp = score(model, packed).logp
        (-logp / total).sum().backward()
        optimizer.gather()
        values += logp.tolist()
    return -math.fsum(values) / total, optimizer.step()


def mean_loss(model: Decoder, samples: Sequence[Sample], *, budget: int, device: str) -> float:
    """Mean loss per completion token, in nats, without a gradient."""
    logp = score_all(model, samples, temperature=1.0, budget=budget, device=device)
    return -math.fsum(logp.tolist()) / logp.numel()


def batches(samples: Sequence[Sample], size: int, seed: int) -> Iterator[list[Sample]]:
    """Endless batches in a fresh order each pass; a batch never spans two passes unless the data is smaller."""
    generator = random.Random(seed)
    order: list[int] = []
    while True:
        if len(order) < min(size, len(samples)):
            order = list(range(len(samples)))
            generator.shuffle(order)
        yield [samples[i] for i in order[:size]]
        order = order[size:]


def warm_up(parts: Parts, display: Display) -> list[float]:
    """The supervised steps before a GRPO run's first rollout; returns the loss of each."""
    settings = parts.settings
    warmup, budget = settings.warmup, settings.train.micro_batch_tokens
    schedule = OptimizerSettings(lr=warmup.lr, schedule="cosine", warmup_steps=min(10, warmup.steps // 10))
    optimizer = Optimizer(parts.model, schedule, warmup.steps)
    stream = batches(parts.examples, warmup.batch_size, settings.run.seed)
    losses: list[float] = []
    display.start("warm-up", warmup.steps)
    for step in range(1, warmup.steps + 1):
        loss, _ = sft_update(parts.model, optimizer, next(stream), budget=budget, device=parts.device)
        losses.append(loss)
        display.step(step, {"loss": f"{loss:.3f}"})
    display.stop()
    return losses


def train_sft(parts: Parts, run: Run, display: Display) -> dict[str, Any]:
    """Trains on `parts.examples`; returns the figures of `summary.json`."""
    settings = parts.settings
    budget = settings.train.micro_batch_tokens
    optimizer = Optimizer(parts.model, settings.optimizer, settings.train.steps)
    stream = batches(parts.examples, settings.train.batch_size, settings.run.seed)

    def evaluate(step: int) -> float | None:
        if not parts.heldout_examples:
            return None
        loss = mean_loss(parts.model, parts.heldout_examples, budget=budget, device=parts.device)
        run.append("eval", {"step": step, "contract": run.contract, "loss": loss, "rows": len(parts.heldout_examples)})
        display.say(f"held-out loss after step {step}: {loss:.4f} ({len(parts.heldout_examples)} rows)")
        return loss

    before = after = evaluate(0)
    tokens = 0
    display.start("sft", settings.train.steps)
    for step in range(1, settings.train.steps + 1):
        started = time.perf_counter()
        samples = next(stream)
        loss, update = sft_update(parts.model, optimizer, samples, budget=budget, device=parts.device)
        seconds = time.perf_counter() - started
        learnt = sum(len(sample.completion) for sample in samples)
        tokens += learnt
        memory = peak_memory_mib(parts.device)
        run.log(
            step,
            {
                "loss": loss,
                "grad_norm": update.grad_norm,
                "lr": update.lr,
                "tokens": learnt,
                "tokens_per_s": learnt / seconds,
                "seconds": seconds,
                "memory_mib": memory,
            },
        )
        display.step(
            step,
            {
                "loss": f"{loss:.4f}",
                "norm": f"{update.grad_norm:.3g}",
                "tok/s": count(learnt / seconds),
                "mem": f"{memory:.0f} MiB",
            },
        )
        due = settings.eval.every and step % settings.eval.every == 0
        if due or step == settings.train.steps:
            after = evaluate(step)
    display.stop()
    return {"steps": settings.train.steps, "tokens": tokens, "heldout_before": before, "heldout_after": after}
