"""Changes of what is done with logits: how log-probabilities are recorded, processing for sampling, precision."""

from __future__ import annotations

import itertools
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
    fit_temperature,
    fit_top_k,
    fit_top_p,
    golden,
)

BF16, FP16 = torch.bfloat16, torch.float16
_MOST_DECIMALS = 5
_REPEATED = 3
_MOST_TOKENS, _MOST_BIASES, _NEWTON = 32, 12, 12
_LEAST = 6

Stream = Callable[[Tensor, Tensor, Rows], Tensor]


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
    for prompt in (True, False):
        yield Change(
            f"repetition penalty{'' if prompt else ' of the completion alone'}",
            "repetition-penalty",
            "logits",
            _processor(partial(_repetition, prompt)),
            grid,
            True,
            start=1.0,
            parameter="repetition_penalty",
            effort=2 - prompt,
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
    for words, stage, fit in (("some tokens", "logits", _biases), ("every token", "filters", _all_biases)):
        yield Change(
            f"a bias on {words}",
            "logit-bias",
            stage,
            _processor(_biased),
            fit=fit,
            parameter="biases",
            shown=lambda v: ", ".join(f"{t}: {b:+.4g}" for t, b in itertools.islice(v.items(), 6)) + ", ..." * (len(v) > 6),
            effort=2 + (stage == "filters"),
        )
    yield Change(
        "tokens below a probability masked out",
        "masked-tokens",
        "logits",
        lambda c, floor: replace(c, logits=(*c.logits, partial(_cutoff, math.exp(floor), c.sampling.temperature or 1.0))),
        tuple(-1.0 - 0.25 * i for i in range(32)),
        True,
        parameter="probability",
        shown=math.exp,
        effort=2,
    )
    yield Change(
        "the end of the sequence masked in the first tokens",
        "masked-tokens",
        "logits",
        _processor(_unended(context)),
        tuple(range(1, 65)),
        parameter="tokens",
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
    yield Change(
        "another temperature in each request",
        "temperature",
        "filters",
        _processor(_each_scaled),
        fit=_each_temperature,
        parameter="temperatures",
        shown=lambda values: ", ".join(f"{t:.3g}" for t in values),
        effort=3,
        implies=frozenset({"temperature by request"}),
        whole=True,
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
    return sampling if penalty is None else _processor(partial(_repetition, True))(sampling, penalty)


def _each_temperature(context: Context, base: Computation) -> list[float] | None:
    """The temperature of each request; 1 where nothing is to be explained."""
    z, owner, found = context.logits(base), context.sequences.owner, []
    for i in range(len(context.sequences)):
        mine = (owner == i) & context.target.isfinite()
        there = mine.to(z.device)
        if int(mine.sum()) < _LEAST:
            found.append(1.0)
            continue
        rows = SortedLogits(z[there], context.sequences.targets.to(z.device)[there])
        found.append(fit_temperature(rows, context.target.to(z.device)[there])[0]["temperature"])
    return found if max(found) > 1.02 * min(found) else None


def _each_scaled(z: Tensor, rows: Rows, temperatures: list[float]) -> Tensor:
    owner = rows.sequences.owner
    return z / torch.tensor(temperatures).to(z)[owner.to(z.device)][:, None]


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


def _repetition(prompt: bool, z: Tensor, rows: Rows, penalty: float) -> Tensor:
    if penalty <= 0:
        return z
    seen = _earlier(rows, z.shape[1], z.device, prompt) > 0
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


def _cutoff(least: float, temperature: float, z: Tensor, rows: Rows) -> Tensor:
    own = rows.sequences.targets.to(z.device)[:, None]
    p = (z / temperature).softmax(-1)
    kept = p >= p.amax(-1, keepdim=True).clamp(max=least)
    return z.masked_fill(~kept, -torch.inf).scatter(1, own, z.gather(1, own))


def _unended(context: Context) -> Callable[[Tensor, Rows, int], Tensor]:
    """Masks the tokens that end a sequence in the first tokens of each completion."""
    ends = getattr(context.model.config, "eos_token_id", None) if hasattr(context.model, "config") else None
    ends = [t for t in (ends if isinstance(ends, list) else [ends]) if isinstance(t, int)]

    def change(z: Tensor, rows: Rows, count: int) -> Tensor:
        early = torch.cat([row - row[0] < count for row in rows.sequences.rows]).to(z.device)
        masked = z.clone()
        masked[:, ends] = masked[:, ends].masked_fill(early[:, None], -torch.inf)
        own = rows.sequences.targets.to(z.device)[:, None]
        return masked.scatter(1, own, z.gather(1, own))

    return change


def _biased(z: Tensor, rows: Rows, biases: dict[int, float]) -> Tensor:
    z = z.clone()
    z[:, list(biases)] += torch.tensor(list(biases.values()), device=z.device)
    return z


def _newton(z: Tensor, targets: Tensor, own: Tensor, chosen: list[int], bias: Tensor) -> tuple[Tensor, float]:
    """Gauss-Newton steps of the biases of chosen tokens: log p changes by b[y] - log sum p exp(b)."""
    one = torch.zeros(len(z), len(chosen), dtype=torch.float64)
    place = {v: k for k, v in enumerate(chosen)}
    hit = torch.tensor([place.get(int(t), -1) for t in targets])
    one[hit >= 0, hit[hit >= 0]] = 1.0
    p = z.log_softmax(-1).exp()[:, chosen].double().cpu()
    logp = z.log_softmax(-1).gather(1, targets[:, None])[:, 0].double().cpu()
    d = own.double().cpu() - logp
    error = torch.inf
    for _ in range(_NEWTON):
        mass = (p * torch.expm1(bias)).sum(1) + 1
        rest = d - one @ bias + mass.clamp(min=1e-9).log()
        if not float(rest.abs().mean()) < 0.999 * error:
            break
        error, kept = float(rest.abs().mean()), bias
        slope = one - p * bias.exp() / mass[:, None]
        weight = 1 / (rest.abs() + 0.1 * rest.abs().mean()).clamp(min=1e-9)
        gram = (slope * weight[:, None]).t() @ slope
        gram += 1e-9 * gram.diagonal().mean() * torch.eye(len(chosen), dtype=torch.float64)
        bias = (bias + torch.linalg.solve(gram, (slope * weight[:, None]).t() @ rest)).clamp(-30, 30)
    return kept, error


def _biases(context: Context, base: Computation) -> dict[int, float] | None:
    """Tokens added one at a time, by how much their biases explain, until one adds little."""
    z, targets, own = _known(context, base)
    z = z / (base.sampling.temperature or 1.0)
    logp = z.log_softmax(-1)
    one = torch.zeros_like(logp).scatter(1, targets[:, None], 1.0)
    slope = one - logp.exp()
    norm = slope.square().sum(0).clamp(min=1e-9)
    chosen: list[int] = []
    bias, error = torch.zeros(0, dtype=torch.float64), float((own - logp.gather(1, targets[:, None])[:, 0]).abs().mean())
    first = error
    while len(chosen) < _MOST_BIASES:
        now = z.clone()
        now[:, chosen] += bias.to(z)
        rest = own - now.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        score = (slope * rest[:, None]).sum(0).square() / norm
        score[chosen] = -1
        best = None
        for v in score.topk(min(3, len(score))).indices.tolist():
            tried = _newton(z, targets, own, [*chosen, v], torch.cat([bias, torch.zeros(1, dtype=torch.float64)]))
            if best is None or tried[1] < best[0]:
                best = tried[1], tried[0], v
        if best is None or best[0] > 0.93 * error:
            break
        error, bias = best[0], best[1]
        chosen.append(best[2])
    if error > 0.7 * first:
        return None
    return dict(zip(chosen, bias.tolist(), strict=True))


def _all_biases(context: Context, base: Computation) -> dict[int, float] | None:
    """A bias on every token, where there are more log-probabilities than tokens."""
    z, targets, own = _known(context, base)
    size = z.shape[1]
    if len(own) < 1.1 * size:
        return None
    z = z / (base.sampling.temperature or 1.0)
    bias, _ = _newton(z, targets, own, list(range(size)), torch.zeros(size, dtype=torch.float64))
    return dict(enumerate(bias.tolist()))


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
    chosen: set[int] = set()
    best = lambda errors: (float(errors.min()), int(errors.argmin()))
    mass, error, sign = torch.zeros_like(p[:, :1]), before, torch.ones(size, device=p.device)
    while len(chosen) < _MOST_TOKENS:
        # One token more, one less, or one in place of another.
        moves = [(best(left(mass + sign * p)), ())]
        moves += [(best(left(mass - p[:, v : v + 1] + sign * p)), (v,)) for v in chosen] if len(chosen) > 1 else []
        (now, token), gone = min(moves, key=lambda move: move[0])
        if now > 0.997 * error:
            break
        error = now
        for v in (token, *gone):
            mass = mass + sign[v] * p[:, v : v + 1]
            sign[v] *= -1
            chosen ^= {v}
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
                parameter="path",
                shown=_described,
            )


def _described(path: dict[str, Any]) -> str:
    layout = path.get("layout")
    place = "decoded with a cache" if path.get("decoded") else "" if layout is None else f"padding {layout.pad}"
    return ", ".join(filter(None, (path.get("kernels", ""), place))) or "as declared"


def _paths(context: Context) -> tuple[dict[str, Any], ...]:
    """Rounding errors depend on kernels, layout and cache, so that those of one path do not remove those of another."""
    layouts: list[dict[str, Any]] = [{}, *({"layout": layout} for _, layout in LAYOUTS), {"decoded": True}]
    return tuple({"kernels": kernel, **layout} for kernel in context.model.kernels for layout in layouts)
