"""From logits to log-probabilities: temperature, top-k, top-p, min-p, and fits of these settings to a target.

Sorting does not depend on the temperature, so a fit sorts once and works on cumulative sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlkernel_drift.capsule import Sampling

IMPOSSIBLE = -20.0
"""Stands for minus infinity: a side that calls its own token impossible."""


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
        """Log-probabilities renormalised over the kept tokens.

        The sampled token was kept: where rounding puts it beyond the edge, the set is taken to reach it.
        """
        if not top_k and top_p >= 1 and not min_p:
            return self.logp
        count = torch.maximum(self.kept(top_k, top_p, min_p), self.rank + 1)
        mass = self.cumulative.gather(1, count[:, None] - 1)[:, 0]
        return self.logp - mass.log()


def processed(logits: Tensor, targets: Tensor, sampling: Sampling) -> Tensor:  # [N, V], [N] -> [N]
    """Log-probabilities of the sampled tokens under sampling settings; temperature 0 counts as 1."""
    temperature = sampling.temperature or 1.0
    if not sampling.filters:
        z = logits / temperature
        return z.gather(1, targets[:, None])[:, 0] - z.logsumexp(-1)
    rows = SortedLogits(logits, targets).at(temperature)
    return rows.processed(sampling.top_k, sampling.top_p, sampling.min_p)


# ---- fits ----------------------------------------------------------------------------------------------------------


def golden(error: Callable[[float], float], low: float, high: float, steps: int = 40) -> tuple[float, float]:
    """Minimum of a function of one variable within a bracket, by golden sections: (place, value)."""
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


def scan(error: Callable[[float], float], grid: list[float], steps: int = 40) -> tuple[float, float]:
    """Best of a grid, refined between its neighbours."""
    values = [error(x) for x in grid]
    best = min(range(len(grid)), key=values.__getitem__)
    low, high = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
    place, value = golden(error, low, high, steps)
    return (place, value) if value < values[best] else (grid[best], values[best])


def distance(prediction: Tensor, target: Tensor) -> float:
    """Mean |difference|, at most 20 nats a token."""
    return float((prediction - target).abs().clamp(max=-IMPOSSIBLE).mean())


TEMPERATURES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 5.0]
NUCLEI = [0.02, *(i / 20 for i in range(1, 20)), 0.975, 0.99, 0.995, 0.999, 0.9999]
MINIMA = [1e-4, 1e-3, 3e-3, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8]


def fit_temperature(rows: SortedLogits, target: Tensor) -> tuple[dict[str, float], Tensor]:
    """The temperature that comes closest, without filters."""
    lse = lambda t: (rows.sorted / t).logsumexp(-1)
    error = lambda t: distance(rows.own / t - lse(t), target)
    best, _ = scan(error, TEMPERATURES)
    return {"temperature": best}, rows.own / best - lse(best)


def fit_top_p(rows: Scaled, target: Tensor, fine: bool = True) -> tuple[dict[str, float], Tensor]:
    """The top-p that comes closest; `fine` looks around it on finer and finer grids."""
    error = lambda p: distance(rows.processed(top_p=p), target)
    best, _ = scan(error, NUCLEI, 16 if fine else 6)
    best = _local(error, best) if fine else best
    return {"top_p": best}, rows.processed(top_p=best)


def fit_min_p(rows: Scaled, target: Tensor, fine: bool = True) -> tuple[dict[str, float], Tensor]:
    """The min-p that comes closest; `fine` as in `fit_top_p`."""
    error = lambda p: distance(rows.processed(min_p=p), target)
    best, _ = scan(error, MINIMA, 16 if fine else 6)
    best = _local(error, best) if fine else best
    return {"min_p": best}, rows.processed(min_p=best)


def fit_top_k(rows: Scaled, target: Tensor, fine: bool = True) -> tuple[dict[str, float], Tensor]:
    """The top-k that comes closest, exactly: all k at once from the cumulative sums."""
    del fine
    limit = min(rows.cumulative.shape[1], 4096)
    last = torch.arange(limit, device=rows.rank.device)[None, :]
    mass = rows.cumulative.gather(1, torch.maximum(last, rows.rank[:, None]))
    predicted = rows.logp[:, None] - mass.log()
    error = (predicted - target[:, None]).abs().clamp(max=-IMPOSSIBLE).mean(0)
    best = int(error.argmin()) + 1
    return {"top_k": best}, rows.processed(top_k=best)


def _local(error: Callable[[float], float], place: float) -> float:
    """The function has steps; look around the place on a finer and finer grid."""
    for width in (0.02, 0.005, 0.001):
        grid = [min(0.99999, max(1e-5, place + width * i / 8)) for i in range(-8, 9)]
        place = min([place, *grid], key=error)
    return place
