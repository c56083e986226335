"""Changes of how log-probabilities are recorded: units, clamps, rounding, the wrong place, request or candidate."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlkernel_drift.diagnose.context import Computation, Context, Rows
from rlkernel_drift.diagnose.trials import Change
from rlkernel_drift.scoring.sequences import Sequences

BF16, FP16 = torch.bfloat16, torch.float16
_MOST_DECIMALS = 5
_REPEATED = 3  # equal values at an end of the range from which on it is a clamp
_FAR, _BULK = 4.0, 0.95  # an outlier is this far beyond the floor's maximum and beyond this quantile
_FEW = 0.03  # largest share of outliers


def records(context: Context) -> Iterator[Change]:
    """Changes after the log-softmax: units, sign, clamps, rounding, places."""
    yield from _quantities()
    yield from _single_values()
    yield from _arithmetic()
    yield from _limited(context)
    yield from _places()


def _stream(change: Callable[[Tensor, Tensor, Rows, Any], Tensor]) -> Callable[[Computation, Any], Computation]:
    """Appends a change (log-probabilities, logits, rows, value) of the recorded stream."""
    return lambda c, value: replace(c, stream=(*c.stream, lambda x, z, rows: change(x, z, rows, value)))


def _quantities() -> Iterator[Change]:
    """Another unit or quantity in place of log-probabilities."""
    units = {"log base 2": 1 / math.log(2), "log base 10": 1 / math.log(10), "the sign reversed": -1.0}
    yield Change(
        "log-probabilities in another unit",
        "units",
        "records",
        _stream(lambda x, z, rows, unit: x * units[unit]),
        tuple(units),
        parameter="unit",
    )
    for name, (cause, quantity) in _QUANTITIES.items():
        yield Change(
            f"{name} in place of log-probabilities",
            cause,
            "records",
            _stream(partial(lambda quantity, x, z, rows, _: quantity(x, z, rows), quantity)),
        )
    yield Change(
        "the values of each request are summed, averaged or reordered",
        "aggregated",
        "records",
        _stream(_aggregated),
        tuple(_AGGREGATES),
        parameter="into",
    )


def _single_values() -> Iterator[Change]:
    """Placeholders and outliers."""
    for last in (False, True):
        yield Change(
            f"a placeholder in place of the {'last' if last else 'first'} value of each request",
            "placeholder",
            "records",
            _stream(partial(_placed, last)),
            parameter="value",
            fit=partial(_placeholder, last),
        )
    yield Change(
        "a few tokens hold other values",
        "few-tokens",
        "records",
        _stream(lambda x, z, rows, few: x.index_fill(0, torch.tensor(few, device=x.device), torch.nan)),
        parameter="tokens",
        fit=_outliers,
        shown=lambda few: len(few),
        effort=3,
        whole=True,
    )


def _arithmetic() -> Iterator[Change]:
    """Log-probabilities scaled, shifted or mixed, and sums over a part of the vocabulary."""
    yield Change(
        "probabilities scaled and shifted before the logarithm",
        "units",
        "records",
        _stream(lambda x, z, rows, v: (v["factor"] * x.exp() + v["added"]).clamp(min=1e-9).log()),
        fit=_affine,
        effort=2,
    )
    yield Change(
        "log-probabilities multiplied by a factor",
        "units",
        "records",
        _stream(lambda x, z, rows, factor: x * factor),
        parameter="factor",
        fit=lambda c, base: _ratio(c.score(base), c.target),
        effort=2,
    )
    yield Change(
        "a constant added to the log-probabilities",
        "units",
        "records",
        _stream(lambda x, z, rows, shift: x + shift),
        parameter="constant",
        fit=lambda c, base: float((c.target - c.score(base)).nanmedian()),
        effort=2,
    )
    yield Change(
        "labels smoothed over the vocabulary",
        "units",
        "records",
        _stream(lambda x, z, rows, share: (1 - share) * x + share * z.log_softmax(-1).mean(-1)),
        (1e-3, 3e-3, 0.01, 0.03, 0.1, 0.2),
        True,
        start=0.0,
        parameter="share",
        effort=2,
    )
    yield Change(
        "the log-softmax sums a part of the vocabulary",
        "vocabulary-shard",
        "records",
        _stream(_partial_sum),
        tuple((a, b) for a in range(8) for b in range(a + 1, 9) if (a, b) != (0, 8)),
        parameter="part",
        shown=lambda part: f"eighths {part[0] + 1} to {part[1]}",
        effort=2,
    )


def _limited(context: Context) -> Iterator[Change]:
    """Log-probabilities clamped or rounded."""
    for low in (True, False):
        yield Change(
            f"log-probabilities clamped from {'below' if low else 'above'}",
            "clamped",
            "records",
            _stream(partial(_clamp, low)),
            parameter="bound",
            fit=partial(_bound, low),
        )
    for probabilities in (False, True):
        known = context.target.double()
        grid = _grid(known.exp() if probabilities else known, probabilities)
        if grid is not None:
            # Chance does not put all values on a grid; re-scoring checks whether each value is rounded correctly.
            yield Change(
                f"{'' if not probabilities else 'probabilities, not '}log-probabilities rounded to {grid}",
                "rounded-records",
                "records",
                _stream(partial(lambda grid, p, x, z, rows, _: _snapped(x, rows.target, grid, p), grid, probabilities)),
                parameter="grid",
                shown=partial(lambda grid, _: grid, grid),
            )


def _places() -> Iterator[Change]:
    """Values of another token, request or candidate."""
    for lag in (1, -1, 2, -2):
        yield Change(
            f"log-probabilities shifted by {'one token' if abs(lag) == 1 else 'two tokens'}, "
            f"{'earlier' if lag > 0 else 'later'}",
            "off-by-one",
            "records",
            _stream(lambda x, z, rows, lag: _shifted(x, rows.sequences.owner, lag)),
            (lag,),
            parameter="tokens",
        )
    yield Change(
        "requests exchanged",
        "exchanged-requests",
        "records",
        _stream(_reordered),
        parameter="order",
        fit=_exchanged,
        whole=True,
        shown=lambda order: json.dumps(order),
    )
    yield Change(
        "the log-probability of the neighbouring token in this token's distribution",
        "wrong-candidate",
        "records",
        _stream(_neighbour),
        (1, -1),
        parameter="token",
    )


def _partial_sum(x: Tensor, z: Tensor, rows: Rows, part: tuple[int, int]) -> Tensor:
    size = z.shape[1]
    return rows.sampled(z) - z[:, size * part[0] // 8 : size * part[1] // 8].logsumexp(-1)


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


def _grid(values: Tensor, probabilities: bool) -> str | None:
    """The coarsest grid on which all values lie: decimals, bfloat16 or float16."""
    known = values[torch.isfinite(values)].double()
    if len(known) < 8 or not known.any():
        return None
    error = known.abs() * 2.0**-24 if not probabilities else known * known.log().abs() * 2.0**-23 + 1e-9
    fits = lambda n: bool(((known - known.round(decimals=n)).abs() <= error).all())
    decimals = next((n for n in range(0, _MOST_DECIMALS + 1) if fits(n)), None)
    if decimals is not None:
        return f"{decimals} decimals"
    if probabilities:
        return None
    same = lambda dtype: bool((known.float().to(dtype).float() == known.float()).all())
    return "bfloat16" if same(BF16) else "float16" if same(FP16) else None


def _snapped(x: Tensor, target: Tensor, grid: str, probabilities: bool) -> Tensor:
    """The target where it is within half a step of x, else x moved by half a step towards it.

    A value that noise moves over the middle of two roundings is thus off by the noise and not by a whole step.
    """
    target = target.to(x)
    if probabilities:
        step = 0.5 * 10.0 ** -int(grid.split()[0])
        low, high = ((target.exp() + way * step).clamp(min=1e-9).log() for way in (-1, 1))
        return torch.where((x >= low) & (x <= high), target, torch.where(x < low, x + target - low, x + target - high))
    if grid.endswith("decimals"):
        half = torch.full_like(x, 0.5 * 10.0 ** -int(grid.split()[0]))
    else:
        bits = 8 if grid == "bfloat16" else 11
        half = 2.0 ** (torch.maximum(x.abs(), target.abs()).clamp(min=1e-30).log2().floor() - bits)
    half = half * 1.001 + 1e-6
    return torch.where((x - target).abs() <= half, target, x + (target - x).sign() * half)


def _entropy(z: Tensor) -> Tensor:
    logp = z.log_softmax(-1)
    return -(logp.exp() * logp).nansum(-1)


_QUANTITIES: dict[str, tuple[str, Callable[[Tensor, Tensor, Rows], Tensor]]] = {
    "probabilities": ("units", lambda x, z, rows: x.exp()),
    "logits": ("units", lambda x, z, rows: rows.sampled(z)),
    "logits minus their maximum": ("units", lambda x, z, rows: rows.sampled(z) - z.amax(-1)),
    "entropies": ("wrong-candidate", lambda x, z, rows: _entropy(z)),
    "negative entropies": ("wrong-candidate", lambda x, z, rows: -_entropy(z)),
    "the likeliest candidates' values": ("wrong-candidate", lambda x, z, rows: z.log_softmax(-1).amax(-1)),
    "the values of the likeliest other candidates": ("wrong-candidate", lambda x, z, rows: _other(z, rows)),
    "the second candidates' values": ("wrong-candidate", lambda x, z, rows: z.log_softmax(-1).topk(2).values[:, 1]),
}


def _other(z: Tensor, rows: Rows) -> Tensor:
    return z.log_softmax(-1).scatter(1, rows.index(z), -torch.inf).amax(-1)


_AGGREGATES: dict[str, Callable[[Tensor], Tensor]] = {
    "running sums": lambda x: x.cumsum(0),
    "running means": lambda x: x.cumsum(0) / torch.arange(1, len(x) + 1).to(x),
    "sums of the rest": lambda x: x.flip(0).cumsum(0).flip(0),
    "their sum": lambda x: x.sum().expand_as(x),
    "their mean": lambda x: x.mean().expand_as(x),
    "values divided by their number": lambda x: x / len(x),
    "values in reversed order": lambda x: x.flip(0),
}


def _aggregated(x: Tensor, z: Tensor, rows: Rows, how: str) -> Tensor:
    found, owner = x.clone(), rows.sequences.owner.to(x.device)
    for i in range(len(rows.sequences)):
        mine = owner == i
        found[mine] = _AGGREGATES[how](x[mine])
    return found


def _ends(rows: Sequences, last: bool) -> Tensor:  # [N] bool
    """The first or last counted token of each sequence."""
    other = rows.owner.roll(-1 if last else 1)
    ends = rows.owner != other
    if len(ends):
        ends[-1 if last else 0] = True
    return ends


def _placed(last: bool, x: Tensor, z: Tensor, rows: Rows, value: float) -> Tensor:
    return torch.where(_ends(rows.sequences, last).to(x.device), value, x)


def _placeholder(last: bool, context: Context, _: Computation) -> float | None:
    """The one value that all first, or last, tokens have."""
    values = context.target[_ends(context.sequences, last)]
    values = values[values.isfinite()]
    return float(values[0]) if len(values) > 1 and bool((values == values[0]).all()) else None


def _outliers(context: Context, base: Computation) -> list[int] | None:
    """A few tokens far beyond the noise; None where there are many, or none."""
    assert context.floor is not None
    size = (context.target - context.score(base)).abs()
    known = size[size.isfinite()]
    if not len(known):
        return None
    far = size > max(_FAR * context.floor.maximum, _FAR * float(known.quantile(_BULK)))
    return far.nonzero()[:, 0].tolist() if 0 < int(far.sum()) <= max(2, _FEW * len(size)) else None


def _affine(context: Context, base: Computation) -> dict[str, float] | None:
    """The factor and the summand of the probabilities by least squares, twice, the second time without outliers."""
    x, y = context.score(base).double().exp(), context.target.double().exp()
    known = torch.isfinite(x) & torch.isfinite(y)
    x, y = x[known], y[known]
    keep = torch.ones_like(x, dtype=torch.bool)
    for _ in range(2):
        if int(keep.sum()) < 8 or float(x[keep].std()) == 0:
            return None
        a = float(((x - x[keep].mean()) * (y - y[keep].mean()))[keep].mean() / x[keep].var(correction=0))
        b = float(y[keep].mean() - a * x[keep].mean())
        rest = (y - a * x - b).abs()
        keep = rest <= 4 * rest.median() + 1e-7
    return {"factor": a, "added": b}


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
