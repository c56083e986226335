"""The loop of every trainer on fixed data: SFT, DPO and the reward model are `Objective`s of it.

An update sums the gradients of micro-batches of whole items, such as the two completions of a preference. An item's
loss depends on no other item, so on a CPU the borders of micro-batches change no bit of a gradient (`TokenBudget`).
With several leaves, item j of a batch belongs to leaf j mod `train.leaves`, and ranks compute their own leaves.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rlkernel.models.decoder import Backbone
from rlkernel.parallel.ranks import Ranks
from rlkernel.training.batch import TokenBudget
from rlkernel.training.checkpoint import FROZEN, Checkpoint, Saver, load_tensors
from rlkernel.training.config import Settings
from rlkernel.training.display import Display, count
from rlkernel.training.memory import peak_memory_mib
from rlkernel.training.optimizer import Optimizer, Update
from rlkernel.training.run_folder import RunFolder
from rlkernel.training.sharded_optimizer import make_optimizer

T = TypeVar("T")
Item = TypeVar("Item", contravariant=True)


class Objective(Protocol[Item]):
    """What a run on fixed data minimises: the mean of a loss over the terms of a batch, such as its tokens or pairs.

    Attributes:
        headline: the metric that `summary.json` reports before and after training.
        shown: short names of the metrics that are printed.
    """

    headline: str
    shown: dict[str, str]

    @property
    def model(self) -> Backbone:
        """The model that is trained."""

    def terms(self, items: Sequence[Item]) -> tuple[Tensor, list[Any]]:
        """([N] loss of each term with its graph, N records from which `metrics` are made) of one forward."""

    def record(self, data: Any) -> Any:
        """A record from the JSON data that another rank has sent."""

    def metrics(self, records: list[Any]) -> dict[str, float]:
        """Means over the records of a batch; `loss` among them."""

    def count(self, items: Sequence[Item]) -> int:
        """Number of terms."""

    def packed(self, item: Item) -> int:
        """Number of tokens of an item in the forward."""

    def completion_tokens(self, item: Item) -> int:
        """Number of completion tokens."""


def update(
    objective: Objective[T], optimizer: Optimizer, batch: Sequence[T], budget: TokenBudget, ranks: Ranks = Ranks()
) -> tuple[dict[str, float], Update]:
    """One update; returns the metrics of the batch before it.

    Args:
        budget: tokens per forward, at most; a longer item gets its own forward.
        ranks: those of the optimizer.
    """
    total = objective.count(batch)

    def of_leaf(items: Sequence[T]) -> list[Any]:
        def work(ranges: list[range]) -> list[Any]:
            records = []
            for span in ranges:
                terms, found = objective.terms(items[span.start : span.stop])
                (terms / total).sum().backward()
                optimizer.gather()
                records += found
            return records

        records: list[Any] = []
        if items:
            sizes = [objective.packed(item) for item in items]
            records = budget.run(sizes, work, optimizer.discard_leaf, whole=optimizer.one_backward)
        optimizer.end_leaf()
        return records

    records = _records(objective, ranks, batch, of_leaf)
    return objective.metrics(records), optimizer.step()


@torch.no_grad()
def evaluate(
    objective: Objective[T], items: Sequence[T], budget: TokenBudget, ranks: Ranks = Ranks()
) -> dict[str, float]:
    """The metrics of all items, without gradients."""

    def of_leaf(items: Sequence[T]) -> list[Any]:
        def work(ranges: list[range]) -> list[Any]:
            return [record for span in ranges for record in objective.terms(items[span.start : span.stop])[1]]

        return budget.run([objective.packed(item) for item in items], work) if items else []

    return objective.metrics(_records(objective, ranks, items, of_leaf))


def _records(
    objective: Objective[T], ranks: Ranks, items: Sequence[T], of_leaf: Callable[[Sequence[T]], list[Any]]
) -> list[Any]:
    """The records of all items on every rank, leaf by leaf."""
    leaves = ranks.over_leaves(ranks.deal(items), of_leaf)
    return [objective.record(data) for leaf in leaves for data in leaf]


def batches(items: Sequence[T], size: int, seed: int) -> Iterator[list[T]]:
    """Endless batches of `size`, or of all items if there are fewer, each pass in a new random order.

    A batch holds items of one pass; those left over at its end are dropped.
    """
    generator = random.Random(seed)
    order: list[int] = []
    while True:
        if len(order) < min(size, len(items)):
            order = list(range(len(items)))
            generator.shuffle(order)
        yield [items[i] for i in order[:size]]
        order = order[size:]


def train(
    objective: Objective[T],
    items: Sequence[T],
    heldout: Sequence[T],
    settings: Settings,
    device: str,
    run: RunFolder,
    display: Display,
    saver: Saver,
    ranks: Ranks,
    frozen: dict[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Trains on the items; returns its part of `summary.json`.

    Args:
        frozen: tensors by name that every checkpoint holds and that never change.
    """
    budget = TokenBudget(settings.train.micro_batch_tokens)
    optimizer = make_optimizer(objective.model, settings.optimizer, settings.train.steps, ranks, settings.train.shard)
    stream = batches(items, settings.train.batch_size, settings.run.seed)

    def evaluated(step: int) -> float | None:
        if not heldout:
            return None
        with optimizer.whole_weights():
            found = evaluate(objective, heldout, budget, ranks)
        run.append("eval", {"step": step, "contract": run.contract, **found, "rows": len(heldout)})
        names, values = ", ".join(objective.shown.values()), ", ".join(f"{found[name]:.4f}" for name in objective.shown)
        display.say(f"held-out {names} after step {step}: {values} ({len(heldout)} rows)")
        return found[objective.headline]

    def checkpoint() -> Checkpoint:
        moments, numbers = optimizer.state()
        state = {"progress": {"before": before, "after": after, "tokens": total}, "optimizer": numbers}
        tensors = {"model": optimizer.model_tensors(), "optimizer": moments}
        return Checkpoint(step, state, tensors if frozen is None else {**tensors, FROZEN: frozen})

    step, resumed = 0, saver.resumed
    if resumed is None:
        before = after = evaluated(0)
        total = 0
        if settings.train.save_every:
            saver.save(checkpoint)
    else:
        load_tensors(objective.model, resumed.tensors["model"])
        optimizer.restore(resumed.tensors["optimizer"], resumed.state["optimizer"])
        resumed.tensors.clear()  # they map the checkpoint's files, which would keep a removed checkpoint on the disk
        step = resumed.step
        before, after, total = (resumed.state["progress"][name] for name in ("before", "after", "tokens"))
        for _ in range(resumed.step):
            next(stream)
    display.start(settings.algorithm, settings.train.steps)
    first = step + 1
    for step in range(first, settings.train.steps + 1):
        started = time.perf_counter()
        batch = next(stream)
        found, updated = update(objective, optimizer, batch, budget, ranks)
        seconds = time.perf_counter() - started
        tokens = sum(objective.completion_tokens(item) for item in batch)
        total += tokens
        metrics = {
            **found,
            "grad_norm": updated.grad_norm,
            "lr": updated.lr,
            "tokens": tokens,
            "tokens_per_s": tokens / seconds,
            "seconds": seconds,
            "memory_mib": peak_memory_mib(device),
        }
        run.log(step, metrics)
        display.step(step, _line(objective, metrics))
        due = settings.eval.every and step % settings.eval.every == 0
        if due or step == settings.train.steps:
            after = evaluated(step)
        if saver.stops_after(step, checkpoint):
            break
    display.stop()
    optimizer.close()
    return {"steps": step, "tokens": total, "heldout_before": before, "heldout_after": after}


def _line(objective: Objective[T], metrics: dict[str, float]) -> dict[str, str]:
    """The figures of a step that are printed."""
    return {
        **{short: f"{metrics[name]:.4f}" for name, short in objective.shown.items()},
        "norm": f"{metrics['grad_norm']:.3g}",
        "tok/s": count(metrics["tokens_per_s"]),
        "mem": f"{metrics['memory_mib']:.0f} MiB",
    }
