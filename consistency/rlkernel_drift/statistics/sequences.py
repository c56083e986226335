"""Per sequence: the sum of the differences (the log of its ratio), its mean, and how unequal the weights become."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from rlkernel_drift.statistics.tokens import BANDS, Comparable, Floats, effective_sample_size

_FEW = 8  # tokens: a standard error of fewer says little
_ERRORS = 3.0


class SequenceStatistics(BaseModel):
    """Statistics over sequences.

    Attributes:
        sequences: with at least one compared token.
        sum_mean, sum_max: of |sum of d|; sum_bias: mean of the sum.
        ess: effective sample size of the sequence ratios, as a share of the sequences.
        retention: share of sequences whose geometric mean ratio lies in a band.
        mean_of_means: mean over sequences of their mean |d|; differs from the mean over tokens where lengths do.
        worst_mean: the largest mean |d| of a sequence, less three of its standard errors; sequences of a few tokens
            count in no other sum.
        bias: |mean of d| over all tokens less three standard errors, 0 where chance explains it.
    """

    sequences: int = 0
    sum_mean: float = 0.0
    sum_max: float = 0.0
    sum_bias: float = 0.0
    ess: float = 1.0
    retention: dict[str, float] = {}
    mean_of_means: float = 0.0
    worst_mean: float = 0.0
    bias: float = 0.0


class SequenceSums:
    """Sums of each sequence.

    Attributes:
        sequence: [B'] numbers of the sequences that have compared tokens.
        count: [B'] compared tokens.
        total: [B'] sum of d; size: [B'] sum of |d|; square: [B'] sum of d^2.
    """

    def __init__(self, pair: Comparable, cu_seqlens: NDArray[np.int64]) -> None:
        owner = np.searchsorted(cu_seqlens, pair.index, side="right") - 1
        number = len(cu_seqlens) - 1
        count = np.bincount(owner, minlength=number)
        self.sequence = np.flatnonzero(count)
        self.count: Floats = count[self.sequence].astype(np.float64)
        self.total: Floats = np.bincount(owner, pair.d, number).astype(np.float64)[self.sequence]
        self.size: Floats = np.bincount(owner, np.abs(pair.d), number).astype(np.float64)[self.sequence]
        self.square: Floats = np.bincount(owner, pair.d * pair.d, number).astype(np.float64)[self.sequence]


def sequence_statistics(sums: SequenceSums) -> SequenceStatistics:
    """All sequence statistics."""
    if not len(sums.sequence):
        return SequenceStatistics()
    geometric = np.exp(np.clip(sums.total / sums.count, -80, 80))
    return SequenceStatistics(
        sequences=len(sums.sequence),
        sum_mean=float(np.abs(sums.total).mean()),
        sum_max=float(np.abs(sums.total).max()),
        sum_bias=float(sums.total.mean()),
        ess=effective_sample_size(sums.total),
        retention={
            name: float(((geometric >= low) & (geometric <= high)).mean()) for name, (low, high) in BANDS.items()
        },
        mean_of_means=float((sums.size / sums.count).mean()),
        worst_mean=_worst_mean(sums),
        bias=_bias(sums),
    )


def _worst_mean(sums: SequenceSums) -> float:
    long = sums.count >= _FEW
    count, mean = sums.count[long], sums.size[long] / sums.count[long]
    error = np.sqrt(np.maximum(sums.square[long] / count - mean * mean, 0) / count)
    return float(np.maximum(mean - _ERRORS * error, 0).max(initial=0.0))


def _bias(sums: SequenceSums) -> float:
    tokens = sums.count.sum()
    mean = sums.total.sum() / tokens
    # Tokens of one sequence may err together: the larger of the two errors, by tokens and by whole sequences.
    by_token = max(float(sums.square.sum() / tokens - mean * mean), 0.0) / tokens
    by_sequence = float(((sums.total - sums.count * mean) ** 2).sum()) / tokens**2
    return float(max(abs(mean) - _ERRORS * np.sqrt(max(by_token, by_sequence)), 0.0))
