"""Preference pairs: two completions of one prompt, the first of which was preferred."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlkernel.training.batch import Trajectory


@dataclass(frozen=True)
class Pair:
    """One preference.

    Attributes:
        chosen, rejected: the two completions with their prompt.
        margin: by how much the chosen one is better; only the reward model reads it.
        reference: log-probabilities of the two completions under the reference model; only DPO reads them.
    """

    chosen: Trajectory
    rejected: Trajectory
    margin: float = 0.0
    reference: tuple[float, float] = (math.nan, math.nan)

    @property
    def completion_tokens(self) -> int:
        """Completion tokens of both."""
        return len(self.chosen.completion) + len(self.rejected.completion)


def sides(pairs: Sequence[Pair]) -> list[Trajectory]:
    """The trajectories of pairs: chosen, rejected, chosen, ..."""
    return [one for pair in pairs for one in (pair.chosen, pair.rejected)]


class _SumOf(torch.autograd.Function):
    """`sums_of` and its gradient, which is one number for all values of a part."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, lengths: list[int]) -> Tensor:
        ctx.like, ctx.lengths = values, lengths
        sums = [math.fsum(part.tolist()) for part in values.detach().cpu().split(lengths)]
        return torch.tensor(sums, dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream.repeat_interleave(torch.tensor(ctx.lengths)).to(ctx.like), None


def sums_of(values: Tensor, lengths: list[int]) -> Tensor:  # [L] fp32 -> [B] fp64, on the CPU
    """Sums of consecutive parts of `values`, such as the log-probabilities of completions.

    Each is the exact sum of its fp32 numbers, rounded once to fp64 (Python's `math.fsum`), and so depends on no order,
    no batch, no thread and no device.
    """
    sums: Tensor = _SumOf.apply(values, lengths)
    return sums
