"""Changes of how log-probabilities are recorded: units, clamps, rounding, the wrong place, request or candidate."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rlkernel_drift.diagnose.context import Computation, Context, Rows
from rlkernel_drift.diagnose.search import Change

BF16, FP16 = torch.bfloat16, torch.float16
_MOST_DECIMALS = 5
_REPEATED = 3


def records(context: Context) -> Iterator[Change]:
    """Changes after the log-softmax: units, sign, clamps, rounding, places."""
    stream = lambda change: (
        lambda c, value: replace(c, stream=(*c.stream, lambda x, z, rows: change(x, z, rows, value)))
    )
    units = {"log base 2": 1 / math.log(2), "log base 10": 1 / math.log(10), "the sign reversed": -1.0}
    yield Change(
        "log-probabilities in another unit",
        "units",
        "records",
        stream(lambda x, z, rows, unit: x * units[unit]),
        tuple(units),
        parameter="unit",
    )
    yield Change(
        "probabilities in place of log-probabilities", "units", "records", stream(lambda x, z, rows, _: x.exp())
    )
    yield Change(
        "logits in place of log-probabilities",
        "units",
        "records",
        stream(lambda x, z, rows, _: z.gather(1, rows.sequences.targets.to(z.device)[:, None])[:, 0].to(x)),
    )
    yield Change(
        "log-probabilities multiplied by a factor",
        "units",
        "records",
        stream(lambda x, z, rows, factor: x * factor),
        parameter="factor",
        fit=lambda c, base: _ratio(c.score(base), c.target),
        effort=2,
    )
    yield Change(
        "a constant added to the log-probabilities",
        "units",
        "records",
        stream(lambda x, z, rows, shift: x + shift),
        parameter="constant",
        fit=lambda c, base: float((c.target - c.score(base)).nanmedian()),
        effort=2,
    )
    for low in (True, False):
        yield Change(
            f"log-probabilities clamped from {'below' if low else 'above'}",
            "clamped",
            "records",
            stream(partial(_clamp, low)),
            parameter="bound",
            fit=partial(_bound, low),
        )
    grid = _grid(context.target)
    if grid is not None:
        # All values lie on a grid, which chance cannot cause; whether each cell is the right one is re-scored.
        yield Change(
            f"log-probabilities rounded to {grid} when recorded",
            "rounded-records",
            "records",
            stream(lambda x, z, rows, _: _snapped(x, rows.target, grid)),
            parameter="grid",
            shown=lambda _: grid,
        )
    for lag, way in ((1, "earlier"), (-1, "later")):
        yield Change(
            f"log-probabilities shifted by one token, {way}",
            "off-by-one",
            "records",
            stream(lambda x, z, rows, lag: _shifted(x, rows.sequences.owner, lag)),
            (lag,),
            parameter="tokens",
        )
    yield Change(
        "requests exchanged",
        "exchanged-requests",
        "records",
        stream(_reordered),
        parameter="order",
        fit=_exchanged,
        shown=lambda order: json.dumps(order),
    )
    yield Change(
        "the log-probability of another candidate than the sampled token",
        "wrong-candidate",
        "records",
        stream(lambda x, z, rows, rank: z.log_softmax(-1).topk(rank + 1).values[:, rank].to(x)),
        (0, 1),
        parameter="rank",
    )
    yield Change(
        "the log-probability of the neighbouring token in this token's distribution",
        "wrong-candidate",
        "records",
        stream(_neighbour),
        (1, -1),
        parameter="token",
    )


def _ratio(x: Tensor, target: Tensor) -> float | None:
    known = torch.isfinite(target) & torch.isfinite(x) & (x < -0.05)
    return float((target[known] / x[known]).median()) if int(known.sum()) > 8 else None


def _clamp(low: bool, x: Tensor, z: Tensor, rows: Rows, bound: float) -> Tensor:
    return x.clamp(min=bound) if low else x.clamp(max=bound)


def _bound(low: bool, context: Context, _: Computation) -> float | None:
    """A bound that several values equal exactly."""
    known = context.target[torch.isfinite(context.target)]
    if not len(known):
        return None
    edge = known.min() if low else known.max()
    return float(edge) if int((known == edge).sum()) >= _REPEATED and float(edge) != 0 else None


def _grid(target: Tensor) -> str | None:
    """The coarsest grid on which all values lie: decimals, bfloat16 or float16."""
    known = target[torch.isfinite(target)].double()
    if len(known) < 8 or not known.any():
        return None
    fits = lambda n: bool(((known - known.round(decimals=n)).abs() <= known.abs() * 2.0**-24).all())
    decimals = next((n for n in range(0, _MOST_DECIMALS + 1) if fits(n)), None)
    if decimals is not None:
        return f"{decimals} decimals"
    same = lambda dtype: bool((known.float().to(dtype).float() == known.float()).all())
    return "bfloat16" if same(BF16) else "float16" if same(FP16) else None


def _snapped(x: Tensor, target: Tensor, grid: str) -> Tensor:
    """The target where it is within half a step of x, else x moved by half a step: noise cannot move it by a whole."""
    target = target.to(x)
    if grid.endswith("decimals"):
        half = torch.full_like(x, 0.5 * 10.0 ** -int(grid.split()[0]))
    else:
        bits = 8 if grid == "bfloat16" else 11
        half = 2.0 ** (torch.maximum(x.abs(), target.abs()).clamp(min=1e-30).log2().floor() - bits)
    half = half * 1.001 + 1e-6
    return torch.where((x - target).abs() <= half, target, x + (target - x).sign() * half)


def _shifted(x: Tensor, owner: Tensor, lag: int) -> Tensor:
    moved, same = torch.roll(x, lag), owner == torch.roll(owner, lag)
    place = torch.arange(len(x))
    inside = place >= lag if lag > 0 else place < len(x) + lag
    return torch.where((same & inside).to(x.device), moved, torch.full_like(moved, torch.nan))


def _neighbour(x: Tensor, z: Tensor, rows: Rows, lag: int) -> Tensor:
    targets, owner = rows.sequences.targets, rows.sequences.owner
    other, same = torch.roll(targets, -lag), owner == torch.roll(owner, -lag)
    values = z.log_softmax(-1).gather(1, other.to(z.device)[:, None])[:, 0].to(x)
    return torch.where(same.to(x.device), values, torch.nan)


def _exchanged(context: Context, base: Computation) -> list[int] | None:
    """For each request the one whose log-probabilities it holds; None if none holds another's."""
    x, owner, count = context.score(base), context.sequences.owner, len(context.sequences)
    mine = [x[owner == i] for i in range(count)]
    theirs = [context.target[owner == i] for i in range(count)]
    order = []
    for i in range(count):
        far = []
        for other in mine:
            n = min(len(other), len(theirs[i]))
            far.append(float((other[:n] - theirs[i][:n]).abs().nanmean()))
        far = [value if value == value else math.inf for value in far]
        best = min(range(count), key=far.__getitem__)
        order.append(best if far[best] < 0.1 * far[i] else i)
    return order if order != list(range(count)) else None


def _reordered(x: Tensor, z: Tensor, rows: Rows, order: list[int]) -> Tensor:
    owner = rows.sequences.owner
    if len(order) != len(rows.sequences):
        return x
    found = torch.full_like(x, torch.nan)
    for i, j in enumerate(order):
        mine, theirs = (owner == i).nonzero()[:, 0], x[(owner == j).to(x.device)]
        n = min(len(mine), len(theirs))
        found[mine[:n].to(x.device)] = theirs[:n]
    return found
