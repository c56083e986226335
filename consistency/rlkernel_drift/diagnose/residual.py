"""How well a prediction explains a side's log-probabilities: mean, tail and per sequence, of |prediction - target|."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlkernel_drift.scoring.semantics import IMPOSSIBLE


@dataclass(frozen=True)
class Residual:
    """What a prediction leaves unexplained.

    Attributes:
        mean, p99: of |prediction - target| over the tokens that are predicted.
        sequences: [B] mean of each sequence, NaN where nothing is predicted.
        share: predicted tokens, of all.
        tokens: [N] each token's, NaN where nothing is predicted.
        bias: mean of target - prediction.
    """

    mean: float
    p99: float
    sequences: Tensor
    share: float
    tokens: Tensor
    bias: float

    @property
    def usable(self) -> bool:
        """Whether enough tokens are predicted to judge."""
        return self.share >= 0.5


def residual(prediction: Tensor, target: Tensor, owner: Tensor, count: int) -> Residual:
    """Residual of a prediction; tokens that are NaN on a side are left out."""
    size = (prediction - target).abs().clamp(max=-IMPOSSIBLE)
    there = torch.isfinite(size)
    if not bool(there.any()):
        return Residual(float("inf"), float("inf"), torch.full((count,), torch.nan), 0.0, size, 0.0)
    known, mine = size[there].double(), owner[there]
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, mine, known)
    number = torch.zeros(count, dtype=torch.float64).index_add_(0, mine, torch.ones_like(known))
    return Residual(
        float(known.mean()),
        float(known.quantile(0.99)) if len(known) < 1 << 23 else float(known.max()),
        sums / number,
        float(there.float().mean()),
        size,
        float((target - prediction)[there].double().mean()),
    )


def together(a: Tensor, b: Tensor) -> float:
    """Correlation of two differences, token by token; 0 where nothing can be said."""
    pair = torch.stack([a, b]).double()
    pair = pair[:, pair.isfinite().all(0)]
    found = float(torch.corrcoef(pair)[0, 1]) if pair.shape[1] > 2 else 0.0
    return found if found == found else 0.0


def best_of(a: Tensor, b: Tensor, target: Tensor, owner: Tensor, count: int) -> tuple[Tensor, list[int]]:
    """For each sequence the closer of two predictions: the prediction, and the sequences that took the second."""
    first, second = (residual(p, target, owner, count).sequences for p in (a, b))
    takes = (second < first) | (torch.isnan(first) & ~torch.isnan(second))
    return torch.where(takes[owner], b, a), [int(i) for i in takes.nonzero()[:, 0]]
