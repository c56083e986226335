"""Log-probabilities under temperature, top-k, top-p and min-p, and fits of these settings to a target.

The order of logits does not depend on the temperature, so a fit sorts once and works on cumulative sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlkernel_drift.capsule import Sampling

IMPOSSIBLE = -20.0
"""Stands for minus infinity, where a side gives its own sampled token probability zero."""


class SortedLogits:
    """Rows of logits in descending order, at a temperature.

    Args:
        logits: [N, V]; targets: [N] sampled tokens.
    """

    def __init__(self, logits: Tensor, targets: Tensor) -> None:
        self.sorted, order = logits.sort(dim=-1, descending=True, stable=True)
        self.rank = (order == targets[:, None]).to(torch.uint8).argmax(-1)
        self.own = logits.gather(1, targets[:, None])[:, 0]

    def at(self, temperature: float) -> Scaled:
        """Cumulative probabilities at a temperature."""
        z = self.sorted / temperature
        lse = z.logsumexp(-1)
        probabilities = (z - lse[:, None]).exp()
        return Scaled(self.own / temperature - lse, probabilities, probabilities.cumsum(-1), self.rank)


@dataclass(frozen=True)
class Scaled:
    """Rows at one temperature.

    Attributes:
        logp: [N] of the sampled token, over the whole vocabulary.
        probabilities, cumulative: [N, V] in descending order.
        rank: [N] of the sampled token.
    """

    logp: Tensor
    probabilities: Tensor
    cumulative: Tensor
    rank: Tensor

    def kept(self, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:  # [N]
        """Number of kept tokens: top-k first, top-p over what it left, then min-p."""
        size = self.cumulative.shape[1]
        count = torch.full_like(self.rank, min(top_k, size) if top_k else size)
        if top_p < 1:
            mass = self.cumulative.gather(1, count[:, None] - 1)
            # The fewest tokens whose probabilities sum to at least top_p.
            nucleus = torch.searchsorted(self.cumulative, (top_p * mass).contiguous())[:, 0] + 1
            count = torch.minimum(count, nucleus)
        if min_p > 0:
            low = (min_p * self.probabilities[:, :1]).contiguous()
            above = torch.searchsorted(-self.probabilities, -low, right=True)[:, 0]
            count = torch.minimum(count, above)
        return count.clamp(min=1)

    def processed(self, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:  # [N]
        """Log-probabilities renormalised over the kept tokens, which always include the sampled one."""
        if not top_k and top_p >= 1 and not min_p:
            return self.logp
        count = torch.maximum(self.kept(top_k, top_p, min_p), self.rank + 1)
        mass = self.cumulative.gather(1, count[:, None] - 1)[:, 0]
        return self.logp - mass.log()


def processed(logits: Tensor, targets: Tensor, sampling: Sampling) -> Tensor:  # [N, V], [N] -> [N]
    """Log-probabilities of the sampled tokens under sampling settings; temperature 0 is treated as 1."""
    temperature = sampling.temperature or 1.0
    if not sampling.filters:
        z = logits / temperature
        return z.gather(1, targets[:, None])[:, 0] - z.logsumexp(-1)
    rows = SortedLogits(logits, targets).at(temperature)
    return rows.processed(sampling.top_k, sampling.top_p, sampling.min_p)


# ---- fits ----------------------------------------------------------------------------------------------------------


def golden(error: Callable[[float], float], low: float, high: float, steps: int) -> tuple[float, float]:
    """Golden-section search for the minimum within a bracket: (place, value)."""
    ratio = (5**0.5 - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    fa, fb = error(a), error(b)
    for _ in range(steps):
        if fa <= fb:
            high, b, fb = b, a, fa
            a = high - ratio * (high - low)
            fa = error(a)
        else:
            low, a, fa = a, b, fb
            b = low + ratio * (high - low)
            fb = error(b)
    return (a, fa) if fa <= fb else (b, fb)


def around(grid: Sequence[float], i: int) -> tuple[float, float]:
    """The neighbours of a point of a grid, which bracket a minimum there."""
    return grid[max(0, i - 1)], grid[min(len(grid) - 1, i + 1)]


def distance(prediction: Tensor, target: Tensor) -> float:
    """Mean |difference|, each token clamped to 20 nats."""
    return float((prediction - target).abs().clamp(max=-IMPOSSIBLE).mean())


TEMPERATURES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 5.0]
_RANKS = 4096
"""Largest kept set that is fitted; a larger one counts as the whole vocabulary."""


def fit_temperature(rows: SortedLogits, target: Tensor) -> float:
    """The temperature that leaves the smallest distance, without filters."""
    error = lambda t: distance(rows.own / t - (rows.sorted / t).logsumexp(-1), target)
    values = [error(t) for t in TEMPERATURES]
    best = min(range(len(values)), key=values.__getitem__)
    place, value = golden(error, *around(TEMPERATURES, best), 40)
    return place if value < values[best] else TEMPERATURES[best]


def fit_top_p(rows: Scaled, target: Tensor) -> tuple[dict[str, float], float]:
    """The top-p of the smallest distance, exactly, and that distance."""
    size = min(rows.cumulative.shape[1], _RANKS)
    edge, error = _edge(rows, target, rows.cumulative[:, : size - 1])
    return {"top_p": min(max(edge, 0.0), 1.0)}, error


def fit_min_p(rows: Scaled, target: Tensor) -> tuple[dict[str, float], float]:
    """The min-p of the smallest distance, exactly, and that distance."""
    size = min(rows.cumulative.shape[1], _RANKS)
    edge, error = _edge(rows, target, -rows.probabilities[:, 1:size] / rows.probabilities[:, :1])
    return {"min_p": min(max(-edge, 0.0), 1.0)}, error


def fit_top_k(rows: Scaled, target: Tensor) -> tuple[dict[str, float], float]:
    """The top-k of the smallest distance, exactly, and that distance."""
    error = _errors(rows, target).double().mean(0)
    best = int(error.argmin())
    return {"top_k": best + 1}, float(error[best])


def _errors(rows: Scaled, target: Tensor) -> Tensor:  # [N, K]
    """|difference| of each row for kept sets of 1, 2, ... tokens, each extended to the sampled token."""
    limit = min(rows.cumulative.shape[1], _RANKS)
    last = torch.arange(limit, device=rows.rank.device)[None, :]
    mass = rows.cumulative.gather(1, torch.maximum(last, rows.rank[:, None]))
    return (rows.logp[:, None] - mass.log() - target[:, None]).abs().clamp(max=-IMPOSSIBLE)


def _edge(rows: Scaled, target: Tensor, keys: Tensor) -> tuple[float, float]:
    """The edge of the smallest distance, between two neighbouring keys, and that distance.

    The error changes only where the edge passes a key, so that all its values are cumulative sums over sorted keys.

    Args:
        keys: [N, K - 1] ascending; a row's set grows from k to k + 1 tokens where the edge passes its key k - 1.
    """
    errors = _errors(rows, target)
    order = keys.flatten().argsort()
    passed = keys.flatten()[order]
    start = errors[:, 0].double().sum()
    changes = errors.diff(dim=1).flatten()[order].double().cumsum(0)
    sums = torch.cat([start[None], start + changes])
    # No edge lies between equal keys.
    sums[1:-1][passed[1:] == passed[:-1]] = torch.inf
    best = int(sums.argmin())
    low, high = passed[max(0, best - 1)], passed[min(best, len(passed) - 1)]
    if best == 0:
        low = low * 2 if float(low) < 0 else low / 2
    if best == len(passed):
        high = torch.full_like(high, 1.0 if float(high) > 0 else 0.0)
    return float((low.double() + high.double()) / 2), float(sums[best]) / len(target)
