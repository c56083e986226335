"""Per sequence: the sum of the differences (the log of its ratio), its mean, and how unequal the weights become."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from rlkernel_drift.statistics.tokens import BANDS, Comparable, Floats, effective_sample_size


class SequenceStatistics(BaseModel):
    """Statistics over sequences.

    Attributes:
        sequences: with at least one compared token.
        sum_mean, sum_max: of |sum of d|; sum_bias: mean of the sum.
        ess: effective sample size of the sequence ratios, as a share of the sequences.
        retention: share of sequences whose geometric mean ratio lies in a band.
        mean_of_means: mean over sequences of their mean |d|; differs from the mean over tokens where lengths do.
    """

    sequences: int = 0
    sum_mean: float = 0.0
    sum_max: float = 0.0
    sum_bias: float = 0.0
    ess: float = 1.0
    retention: dict[str, float] = {}
    mean_of_means: float = 0.0


class SequenceSums:
    """Sums of each sequence.

    Attributes:
        sequence: [B'] numbers of the sequences that have compared tokens.
        count: [B'] compared tokens.
        total: [B'] sum of d; size: [B'] sum of |d|.
    """

    def __init__(self, pair: Comparable, cu_seqlens: NDArray[np.int64]) -> None:
        owner = np.searchsorted(cu_seqlens, pair.index, side="right") - 1
        number = len(cu_seqlens) - 1
        count = np.bincount(owner, minlength=number)
        self.sequence = np.flatnonzero(count)
        self.count: Floats = count[self.sequence].astype(np.float64)
        self.total: Floats = np.bincount(owner, pair.d, number).astype(np.float64)[self.sequence]
        self.size: Floats = np.bincount(owner, np.abs(pair.d), number).astype(np.float64)[self.sequence]


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
    )
