"""Changes of what is done with logits: how log-probabilities are recorded, processing for sampling, precision."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlkernel_drift.diagnose.context import LAYOUTS, Computation, Context, Rows
from rlkernel_drift.diagnose.search import Change
from rlkernel_drift.scoring.model import Head, name_of
from rlkernel_drift.scoring.semantics import (
    TEMPERATURES,
    Scaled,
    SortedLogits,
    distance,
    fit_min_p,
    fit_top_k,
    fit_top_p,
    golden,
)

BF16, FP16 = torch.bfloat16, torch.float16
_MOST_DECIMALS = 5
_REPEATED = 3
_MOST_TOKENS = 6

Stream = Callable[[Tensor, Tensor, Rows], Tensor]


# ---- how log-probabilities are recorded ----------------------------------------------------------------------------


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


# ---- processing of the logits --------------------------------------------------------------------------------------


def processing(context: Context) -> Iterator[Change]:
    """Changes of the logits before the log-softmax: temperature, filters, penalties, biases, caps."""
    yield Change(
        "another temperature",
        "temperature",
        "logits",
        _sampled("temperature"),
        tuple(TEMPERATURES),
        True,
        start=context.sampling.temperature or 1.0,
        parameter="temperature",
    )
    given = _generation_config(context)
    if given:
        yield Change(
            "the settings of generation_config.json",
            "generation-config",
            "logits",
            _generation,
            (given,),
            implies=frozenset({"temperature", "top-p", "top-k", "min-p", "repetition-penalty"}),
        )
    for name, fit in _FILTERS.items():
        yield Change(f"renormalised over {name}", name, "logits", _settings, fit=partial(_filter, fit))
    grid = tuple(0.5 * 1.1**i for i in range(20))
    yield Change(
        "repetition penalty",
        "repetition-penalty",
        "logits",
        _processor(_repetition),
        grid,
        True,
        start=1.0,
        parameter="repetition_penalty",
    )
    grid = (-1.0, -0.5, -0.2, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0)
    for name in ("presence", "frequency"):
        for prompt in (False, True):
            yield Change(
                f"{name} penalty{' that counts the prompt' if prompt else ''}",
                f"{name}-penalty",
                "logits",
                _processor(partial(_penalty, name, prompt)),
                grid,
                True,
                start=0.0,
                parameter=f"{name}_penalty",
                effort=1 + prompt,
            )
    yield Change(
        "a soft cap of the logits",
        "soft-cap",
        "logits",
        _processor(lambda z, rows, cap: torch.tanh(z / cap) * cap),
        (2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 50.0),
        True,
        parameter="cap",
    )
    yield Change(
        "a bias on one token",
        "logit-bias",
        "logits",
        _processor(_biased),
        fit=_bias,
        effort=2,
    )
    yield Change("tokens masked out", "masked-tokens", "logits", _processor(_masked), fit=_mask, effort=2)
    yield Change(
        "repeated n-grams masked out",
        "masked-tokens",
        "logits",
        _processor(_ngrams),
        (2, 3, 4),
        parameter="no_repeat_ngram_size",
        effort=2,
    )
    yield Change(
        "padding entries of the vocabulary in the sum",
        "padded-vocabulary",
        "logits",
        _processor(_padded),
        tuple(round(2**i) for i in range(14)),
        True,
        parameter="entries",
        shown=lambda n: max(1, round(n)),
    )
    for name, fit in _FILTERS.items():
        yield Change(
            f"another temperature, and renormalised over {name}",
            name,
            "filters",
            _settings,
            fit=partial(_with_temperature, fit),
            effort=2,
            implies=frozenset({"temperature"}),
        )


_FILTERS: dict[str, Callable[[Scaled, Tensor], tuple[dict[str, float], float]]] = {
    "top-p": fit_top_p,
    "top-k": fit_top_k,
    "min-p": fit_min_p,
}


def _sampled(name: str) -> Callable[[Computation, Any], Computation | None]:
    def apply(c: Computation, value: Any) -> Computation | None:
        return None if value <= 0 else _settings(c, {name: value})

    return apply


def _settings(c: Computation, settings: dict[str, Any]) -> Computation:
    return replace(c, sampling=c.sampling.model_copy(update=settings))


def _processor(change: Callable[[Tensor, Rows, Any], Tensor]) -> Callable[[Computation, Any], Computation]:
    return lambda c, value: replace(c, logits=(*c.logits, lambda z, rows: change(z, rows, value)))


def _generation_config(context: Context) -> dict[str, Any]:
    """Sampling settings in the model directory's generation_config.json that differ from the defaults."""
    path = context.model.path and context.model.path / "generation_config.json"
    if not path or not path.is_file():
        return {}
    known = json.loads(path.read_text(encoding="utf-8"))
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    return {k: known[k] for k, v in plain.items() if isinstance(known.get(k), (int, float)) and known[k] != v}


def _generation(c: Computation, given: dict[str, Any]) -> Computation:
    sampling = _settings(c, {k: v for k, v in given.items() if k != "repetition_penalty"})
    penalty = given.get("repetition_penalty")
    return sampling if penalty is None else _processor(_repetition)(sampling, penalty)


def _known(context: Context, base: Computation) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets and log-probabilities of the tokens whose target is finite."""
    z = context.logits(base)
    known = torch.isfinite(context.target)
    there = known.to(z.device)
    return z[there], context.sequences.targets.to(z.device)[there], context.target.to(z.device)[there]


def _filter(fit: Any, context: Context, base: Computation) -> dict[str, Any] | None:
    z, targets, own = _known(context, base)
    parameters, left = fit(SortedLogits(z, targets).at(base.sampling.temperature or 1.0), own)
    return parameters if left < 0.98 * context.error(base) else None


_GRID = [0.3 * 1.1**i for i in range(24)]
_FEW_ROWS, _VALLEYS = 160, 2


def _with_temperature(fit: Any, context: Context, base: Computation) -> dict[str, Any] | None:
    """Fits the temperature with an exact fit of the filter at each step, first on a few rows, then on all of them."""
    z, targets, own = _known(context, base)
    few, rows = SortedLogits(z[:_FEW_ROWS], targets[:_FEW_ROWS]), SortedLogits(z, targets)
    error = lambda t: fit(few.at(t), own[:_FEW_ROWS])[1]
    values = [error(t) for t in _GRID]
    order = sorted(range(len(values)), key=values.__getitem__)
    if values[order[0]] > 0.8 * error(base.sampling.temperature or 1.0):
        return None
    around = lambda i: (_GRID[max(0, i - 1)], _GRID[min(len(values) - 1, i + 1)])
    t, _ = min((golden(error, *around(i), 14) for i in order[:_VALLEYS]), key=lambda found: found[1])
    t, _ = golden(lambda t: fit(rows.at(t), own)[1], t * 0.98, t * 1.02, 12)
    # Near the optimum the kept sets no longer change, so the last steps fit the temperature for fixed sets.
    for width in (2e-3, 1e-4):
        parameters, _ = fit(rows.at(t), own)
        fixed = lambda x: distance(rows.at(x).processed(**parameters), own)  # noqa: B023
        t, _ = golden(fixed, t * (1 - width), t * (1 + width), 16)
    return {"temperature": t, **fit(rows.at(t), own)[0]}


def _earlier(rows: Rows, size: int, device: torch.device, prompt: bool) -> Tensor:  # [N, V] counts
    """How often each token occurs before each counted row's token, in the completion or also in the prompt."""
    counts = torch.zeros(len(rows.sequences.targets), size, device=device)
    n = 0
    for ids, places, start in zip(rows.sequences.ids, rows.sequences.rows, rows.sequences.prompt, strict=True):
        for row in places.tolist():
            part = ids[(0 if prompt else start) : row + 1].to(device)
            counts[n].index_add_(0, part, torch.ones_like(part, dtype=counts.dtype))
            n += 1
    return counts


def _repetition(z: Tensor, rows: Rows, penalty: float) -> Tensor:
    if penalty <= 0:
        return z
    seen = _earlier(rows, z.shape[1], z.device, True) > 0
    return torch.where(seen, torch.where(z > 0, z / penalty, z * penalty), z)


def _penalty(name: str, prompt: bool, z: Tensor, rows: Rows, amount: float) -> Tensor:
    counts = _earlier(rows, z.shape[1], z.device, prompt)
    return z - amount * ((counts > 0).to(z) if name == "presence" else counts)


def _ngrams(z: Tensor, rows: Rows, size: int) -> Tensor:
    z, n = z.clone(), 0
    for ids, places in zip(rows.sequences.ids, rows.sequences.rows, strict=True):
        words = ids.tolist()
        for row in places.tolist():
            last = words[row + 2 - size : row + 1]
            starts = (k for k in range(row + 2 - size) if words[k : k + size - 1] == last)
            banned = [words[k + size - 1] for k in starts if k + size - 1 <= row]
            z[n, banned] = -torch.inf
            n += 1
    own = rows.sequences.targets.to(z.device)[:, None]
    return z.scatter(1, own, torch.where(z.gather(1, own).isinf(), -30.0, z.gather(1, own)))


def _padded(z: Tensor, rows: Rows, entries: float) -> Tensor:
    """`entries` further entries with logit zero, as a head padded with zero rows has, added to the sum of the first."""
    count = torch.full((len(z), 1), math.log(max(1, round(entries))), device=z.device, dtype=z.dtype)
    return torch.cat([z, count], 1)


def _biased(z: Tensor, rows: Rows, value: dict[str, Any]) -> Tensor:
    z = z.clone()
    z[:, value["token"]] += value["bias"]
    return z


def _bias(context: Context, base: Computation) -> dict[str, Any] | None:
    """The token, and the bias, that explain most: log p changes by b [y = v] - log(1 + p_v (e^b - 1))."""
    z, targets, own = _known(context, base)
    logp = (z / (base.sampling.temperature or 1.0)).log_softmax(-1)
    d = own - logp.gather(1, targets[:, None])[:, 0]
    p = logp.exp()
    one = torch.zeros_like(p).scatter(1, targets[:, None], 1.0)
    slope = one - p  # first order
    score = (slope * d[:, None]).sum(0) ** 2 / slope.square().sum(0).clamp(min=1e-9)
    best: tuple[float, dict[str, Any]] | None = None
    left = lambda v, b: float((d - b * one[:, v] + torch.log1p(p[:, v] * (math.exp(b) - 1))).abs().mean())
    for v in score.topk(min(4, len(score))).indices.tolist():
        for low, high in ((-12.0, 0.0), (0.0, 12.0)):
            b, error = golden(partial(left, v), low, high, 40)
            if best is None or error < best[0]:
                best = error, {"token": v, "bias": b}
    return best[1] if best is not None and best[0] < 0.7 * float(d.abs().mean()) else None


def _masked(z: Tensor, rows: Rows, value: dict[str, Any]) -> Tensor:
    z = z.clone()
    own = rows.sequences.targets.to(z.device)[:, None]
    kept = z.gather(1, own)
    z[:, json.loads(value["tokens"]) if "tokens" in value else slice(value["first"], value["last"] + 1)] = -torch.inf
    return z.scatter(1, own, kept)


def _mask(context: Context, base: Computation) -> dict[str, Any] | None:
    """A few tokens, or all ids from or up to one, without which the sum explains most: log p grows by -log(1 - p)."""
    z, targets, own = _known(context, base)
    logp = (z / (base.sampling.temperature or 1.0)).log_softmax(-1)
    d = own - logp.gather(1, targets[:, None])[:, 0]
    p = logp.exp().scatter(1, targets[:, None], 0.0)
    size, before = p.shape[1], float(d.abs().mean())
    left = lambda mass: (d[:, None] + torch.log1p(-mass.clamp(max=1 - 1e-6))).abs().mean(0)
    below = p.cumsum(1)
    above = below[:, -1:] - below + p
    tail, head = left(above), left(below)
    found: list[tuple[float, dict[str, Any]]] = [
        (float(tail.min()), {"first": int(tail.argmin()), "last": size - 1}),
        (float(head.min()), {"first": 0, "last": int(head.argmin())}),
    ]
    chosen: list[int] = []
    mass, error = torch.zeros_like(p[:, :1]), before
    while len(chosen) < _MOST_TOKENS:
        tried = left(mass + p)
        tried[chosen] = torch.inf
        best = int(tried.argmin())
        if float(tried[best]) > 0.9 * error:
            break
        error, mass = float(tried[best]), mass + p[:, best : best + 1]
        chosen.append(best)
    if chosen:
        found.append((error, {"tokens": json.dumps(sorted(chosen))}))
    error, value = min(found, key=lambda each: each[0])
    return value if error < 0.7 * before else None


# ---- precision -----------------------------------------------------------------------------------------------------


def precision(context: Context) -> Iterator[Change]:
    """Rounding in the head and in the layers."""
    choices = [
        ("logits rounded to bfloat16", "bf16-logits", Head(logits=BF16)),
        ("head and logits in bfloat16", "bf16-logits", Head(inputs=BF16, logits=BF16)),
        ("logits rounded to float16", "bf16-logits", Head(logits=FP16)),
        ("head in bfloat16", "head-dtype", Head(inputs=BF16)),
        ("head in float16", "head-dtype", Head(inputs=FP16)),
        ("head and logits in float16", "head-dtype", Head(inputs=FP16, logits=FP16)),
        ("head in float32", "head-dtype", Head()),
    ]
    for name, cause, head in choices:
        if head != context.head:
            apply = partial(lambda head, c, _: replace(c, head=head), head)
            yield Change(name, cause, "precision", apply, rounds=head != Head())
    for dtype in (torch.float32, BF16, FP16):
        if dtype == context.dtype:
            continue
        paths = ({},) if dtype == torch.float32 else _paths(context)
        for logits in (False, True) if dtype != torch.float32 else (False,):
            head = Head(logits=dtype) if logits else context.head
            yield Change(
                f"layers in {name_of(dtype)}{', logits too' if logits else ''}",
                "body-dtype",
                "precision",
                partial(lambda dtype, head, c, path: replace(c.with_body(dtype=dtype, **path), head=head), dtype, head),
                paths,
                implies=frozenset({"bf16-logits"}) if logits else frozenset(),
                dtype=name_of(dtype),
            )


def _paths(context: Context) -> tuple[dict[str, Any], ...]:
    """Rounding errors depend on kernels, layout and cache, so that those of one path do not remove those of another."""
    layouts: list[dict[str, Any]] = [{}, *({"layout": layout} for _, layout in LAYOUTS), {"decoded": True}]
    return tuple({"kernels": kernel, **layout} for kernel in context.model.kernels for layout in layouts)
