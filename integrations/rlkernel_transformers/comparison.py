"""Compares a rollout's log-probabilities with the training forward's, bit for bit.

Counts stay on the device and are read once, before the optimizer's step, so that a trainer can stop the update.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


class ExactnessLostError(ValueError):
    """A setting under which rollout and training log-probabilities cannot be equal; the message says why."""


def _bits(x: Tensor) -> Tensor:
    return x.detach().float().contiguous().view(torch.int32)


@dataclass(frozen=True)
class Verdict:
    """Outcome of the comparisons of one update.

    Attributes:
        tokens: number of tokens compared.
        mismatch_tokens: number of tokens whose bits differ.
        drift_max, mean: largest and mean difference in nats.
        first: description of the first mismatch.
    """

    tokens: int
    mismatch_tokens: int
    drift_max: float
    mean: float
    first: str = ""

    @property
    def exact_frac(self) -> float:
        """Share of compared tokens with equal bits; 0 where none was compared."""
        return 1.0 - self.mismatch_tokens / self.tokens if self.tokens else 0.0


class Comparison:
    """Differences between rollout and training log-probabilities, accumulated over micro-batches."""

    def __init__(self) -> None:
        self._counts: list[Tensor] = []  # fp64 [tokens, mismatches, largest, sum]
        self._batches: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def add(self, rollout: Tensor, trained: Tensor, mask: Tensor, ids: Tensor) -> None:
        """Compares log-probabilities [B, C] where the mask is set, without waiting for the device."""
        mask = mask.bool()
        differs = (_bits(rollout) != _bits(trained)) & mask
        difference = (rollout.double() - trained.detach().double()).abs()
        difference = torch.where(differs, difference.nan_to_num(nan=torch.inf), 0.0)
        counts = (mask.sum().double(), differs.sum().double(), difference.max(), difference.sum())
        self._counts.append(torch.stack(counts))
        self._batches.append((rollout, trained.detach(), differs, ids))

    @property
    def empty(self) -> bool:
        """Whether nothing was added since the last `close`."""
        return not self._counts

    def close(self, gather: Callable[[Tensor], Tensor] | None = None) -> Verdict:
        """The verdict on everything added since the last call.

        Args:
            gather: concatenates the rows of all processes; None: one process.
        """
        counts, batches, self._counts, self._batches = self._counts, self._batches, [], []
        if not counts:
            return Verdict(0, 0, 0.0, 0.0)
        rows = torch.stack(counts) if gather is None else gather(torch.stack(counts))
        tokens, mismatches, largest, total = (rows[:, i] for i in range(4))
        figures = torch.stack([tokens.sum(), mismatches.sum(), largest.max(), total.sum()]).tolist()
        first = _first(batches) if figures[1] else ""
        return Verdict(int(figures[0]), int(figures[1]), figures[2], figures[3] / max(1.0, figures[0]), first)


def _first(batches: list[tuple[Tensor, Tensor, Tensor, Tensor]]) -> str:
    for number, (rollout, trained, differs, ids) in enumerate(batches):
        indices = differs.nonzero()
        if indices.shape[0]:
            row, column = indices[0].tolist()
            a, b = float(rollout[row, column]), float(trained[row, column])
            return (
                f"micro-batch {number}, completion {row}, token {column} (id {int(ids[row, column])}): rollout {a!r} "
                f"({_hex(a)}), training {b!r} ({_hex(b)})"
            )
    return "on another process"


def _hex(value: float) -> str:
    return struct.pack(">f", value).hex()
