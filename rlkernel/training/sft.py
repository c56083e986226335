"""Supervised training on completions, packed, through the same forward and log-probability as GRPO.

`train_sft` is a run; `warm_up` makes the same updates before the first rollout of a GRPO run.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rlkernel.models import Decoder
from rlkernel.training.batch import Trajectory, micro_batches, pack_trajectories, score, score_all
from rlkernel.training.checkpoint import Checkpoint, Saver, load_tensors, tensors_of
from rlkernel.training.config import OptimizerSettings
from rlkernel.training.display import Display, count
from rlkernel.training.optimizer import Optimizer, Update
from rlkernel.training.parts import Parts
from rlkernel.training.run_folder import RunFolder, peak_memory_mib


def sft_update(
    model: Decoder, optimizer: Optimizer, examples: Sequence[Trajectory], *, budget: int, device: str
) -> tuple[float, Update]:
    """One update on the completions; returns the mean loss per completion token (nats) and the update."""
    total = sum(len(example.completion) for example in examples)
    values: list[float] = []
    for span in micro_batches(examples, budget):
        logp = score(model, pack_trajectories(examples[span.start : span.stop], device)).logp
        (-logp / total).sum().backward()
        optimizer.gather()
        values += logp.tolist()
    return -math.fsum(values) / total, optimizer.step()


def mean_loss(model: Decoder, examples: Sequence[Trajectory], *, budget: int, device: str) -> float:
    """Mean loss per completion token, in nats, without gradients."""
    logp = score_all(model, examples, temperature=1.0, budget=budget, device=device)
    return -math.fsum(logp.tolist()) / logp.numel()


def batches(examples: Sequence[Trajectory], size: int, seed: int) -> Iterator[list[Trajectory]]:
    """Endless batches of `size`, or of all examples if there are fewer, each pass in a new random order.

    A batch holds examples of one pass; those left over at its end are dropped.
    """
    generator = random.Random(seed)
    order: list[int] = []
    while True:
        if len(order) < min(size, len(examples)):
            order = list(range(len(examples)))
            generator.shuffle(order)
        yield [examples[i] for i in order[:size]]
        order = order[size:]


def warm_up(parts: Parts, display: Display, saver: Saver) -> list[float]:
    """Supervised updates before a GRPO run's first rollout; returns the loss of each.

    Raises:
        KeyboardInterrupt: a signal asked the run to stop, which has no checkpoint yet.
    """
    settings = parts.settings
    warmup, budget = settings.warmup, settings.train.micro_batch_tokens
    schedule = OptimizerSettings(
        lr=warmup.lr, schedule="cosine", warmup_steps=min(10, warmup.steps // 10), states=settings.optimizer.states
    )
    optimizer = Optimizer(parts.model, schedule, warmup.steps)
    stream = batches(parts.examples, warmup.batch_size, settings.run.seed)
    losses: list[float] = []
    display.start("warm-up", warmup.steps)
    for step in range(1, warmup.steps + 1):
        loss, _ = sft_update(parts.model, optimizer, next(stream), budget=budget, device=parts.device)
        losses.append(loss)
        if saver.signal:
            raise KeyboardInterrupt("the run had no checkpoint yet; start it again")
        display.step(step, {"loss": f"{loss:.3f}"})
    display.stop()
    return losses


def train_sft(parts: Parts, run: RunFolder, display: Display, saver: Saver) -> dict[str, Any]:
    """Trains on `parts.examples`; returns its part of `summary.json`."""
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

    def checkpoint() -> Checkpoint:
        moments, numbers = optimizer.state()
        state = {"progress": {"before": before, "after": after, "tokens": total}, "optimizer": numbers}
        return Checkpoint(step, state, {"model": tensors_of(parts.model), "optimizer": moments})

    step, resumed = 0, saver.resumed
    if resumed is None:
        before = after = evaluate(0)
        total = 0
        if settings.train.save_every:
            saver.save(checkpoint)
    else:
        load_tensors(parts.model, resumed.tensors["model"])
        optimizer.restore(resumed.tensors["optimizer"], resumed.state["optimizer"])
        step = resumed.step
        before, after, total = (resumed.state["progress"][name] for name in ("before", "after", "tokens"))
        for _ in range(resumed.step):
            next(stream)
    display.start("sft", settings.train.steps)
    first = step + 1
    for step in range(first, settings.train.steps + 1):
        started = time.perf_counter()
        examples = next(stream)
        loss, update = sft_update(parts.model, optimizer, examples, budget=budget, device=parts.device)
        seconds = time.perf_counter() - started
        tokens = sum(len(example.completion) for example in examples)
        total += tokens
        metrics = {
            "loss": loss,
            "grad_norm": update.grad_norm,
            "lr": update.lr,
            "tokens": tokens,
            "tokens_per_s": tokens / seconds,
            "seconds": seconds,
            "memory_mib": peak_memory_mib(parts.device),
        }
        run.log(step, metrics)
        line = {
            "loss": f"{loss:.4f}",
            "norm": f"{update.grad_norm:.3g}",
            "tok/s": count(tokens / seconds),
            "mem": f"{metrics['memory_mib']:.0f} MiB",
        }
        display.step(step, line)
        due = settings.eval.every and step % settings.eval.every == 0
        if due or step == settings.train.steps:
            after = evaluate(step)
        if saver.stops_after(step, checkpoint):
            break
    display.stop()
    return {"steps": step, "tokens": total, "heldout_before": before, "heldout_after": after}
