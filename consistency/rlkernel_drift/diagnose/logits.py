"""Changes of the logits before the log-softmax: sampling settings, penalties, biases, masks; and of their precision."""

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
from rlkernel_drift.diagnose.trials import Change
from rlkernel_drift.diagnose.vocabulary import (
    all_biases,
    biased,
    biases,
    cutoff,
    known,
    mask,
    masked,
    ngrams,
    unended,
    without_likeliest,
)
from rlkernel_drift.scoring.model import Head, name_of
from rlkernel_drift.scoring.semantics import (
    TEMPERATURES,
    Scaled,
    SortedLogits,
    around,
    distance,
    fit_min_p,
    fit_temperature,
    fit_top_k,
    fit_top_p,
    golden,
)
from rlkernel_drift.scoring.sequences import Sequences

BF16, FP16 = torch.bfloat16, torch.float16
_LEAST = 6  # tokens from which a temperature is fitted
_PLACES = 128  # most places of the completions that have a temperature of their own
_SHOWN = 12  # temperatures that a verdict lists


# ---- processing of the logits --------------------------------------------------------------------------------------


def processing(context: Context) -> Iterator[Change]:
    """Changes of the logits before the log-softmax: temperature, filters, penalties, biases, masks, caps."""
    yield from _sampling(context)
    yield from _penalties()
    yield from _vocabulary(context)
    yield _bias("some tokens", "logits", biases)
    yield from _masks(context)
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


def filters(context: Context) -> Iterator[Change]:
    """Changes of the logits with many values: biases of every token, temperatures by place, two settings together."""
    yield _bias("every token", "filters", all_biases)
    for words, group in _GROUPS.items():
        yield Change(
            f"another temperature {words}",
            "temperature",
            "filters",
            _processor(partial(_each_scaled, group)),
            fit=partial(_each_temperature, group),
            parameter="temperatures",
            shown=_listed,
            effort=3,
            implies=frozenset({f"temperature {words}"}),
            whole=True,
        )
    for name, fit in _FILTERS.items():
        yield Change(
            f"another temperature, and renormalised over {name}",
            name,
            "filters",
            _settings,
            fit=partial(_with_temperature, fit),
            rounds=True,
            effort=2,
            implies=frozenset({"temperature"}),
        )


def _sampling(context: Context) -> Iterator[Change]:
    """Temperature, filters, and both as in generation_config.json."""
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
        # Noise moves tokens over the edge of a kept set, as it does over that of a rounding.
        yield Change(f"renormalised over {name}", name, "logits", _settings, fit=partial(_filter, fit), rounds=True)


def _penalties() -> Iterator[Change]:
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


def _vocabulary(context: Context) -> Iterator[Change]:
    """Every logit moved or capped."""
    yield Change(
        "two parts of the vocabulary exchanged",
        "swapped-weights",
        "logits",
        _processor(_exchanged_parts),
        tuple(
            (count, *pair)
            for count in (2, 4, 8)
            if context.model.vocab_size % count == 0
            for pair in itertools.combinations(range(count), 2)
        ),
        parameter="parts",
        shown=lambda v: f"{v[1] + 1} and {v[2] + 1} of {v[0]}",
        operator="lm_head",
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


def _bias(words: str, stage: str, fit: Callable[[Context, Computation], Any]) -> Change:
    return Change(
        f"a bias on {words}",
        "logit-bias",
        stage,
        _processor(biased),
        fit=fit,
        parameter="biases",
        shown=lambda v: ", ".join(f"{t}: {b:+.4g}" for t, b in itertools.islice(v.items(), 6)) + ", ..." * (len(v) > 6),
        effort=3 + (stage == "filters"),
        implies=frozenset({"masked-tokens"}),  # as a bias without a bound
    )


def _masks(context: Context) -> Iterator[Change]:
    """Tokens that are masked out: by probability, by place, or named."""
    yield Change(
        "tokens below a probability masked out",
        "masked-tokens",
        "logits",
        lambda c, floor: replace(
            c, logits=(*c.logits, partial(cutoff, math.exp(floor), c.sampling.temperature or 1.0))
        ),
        tuple(-1.0 - 0.25 * i for i in range(32)),
        True,
        parameter="probability",
        shown=math.exp,
        effort=2,
    )
    yield Change(
        "the likeliest tokens masked out, down to the last above a probability (XTC)",
        "masked-tokens",
        "logits",
        _processor(without_likeliest),
        (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4),
        parameter="probability",
        effort=2,
    )
    yield Change(
        "the end of the sequence masked in the first tokens",
        "masked-tokens",
        "logits",
        _processor(unended(context)),
        tuple(range(1, 65)),
        parameter="tokens",
    )
    yield Change("tokens masked out", "masked-tokens", "logits", _processor(masked), fit=mask, effort=2)
    yield Change(
        "repeated n-grams masked out",
        "masked-tokens",
        "logits",
        _processor(ngrams),
        (2, 3, 4),
        parameter="no_repeat_ngram_size",
        effort=2,
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
    own = json.loads(path.read_text(encoding="utf-8"))
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    return {k: own[k] for k, v in plain.items() if isinstance(own.get(k), (int, float)) and own[k] != v}


def _generation(c: Computation, given: dict[str, Any]) -> Computation:
    sampling = _settings(c, {k: v for k, v in given.items() if k != "repetition_penalty"})
    penalty = given.get("repetition_penalty")
    return sampling if penalty is None else _processor(partial(_repetition, True))(sampling, penalty)


def _place(s: Sequences) -> Tensor:  # [N]
    """The place of each counted token in its completion; neighbours share one in long completions."""
    place = torch.cat([row - row[0] for row in s.rows])
    return place // (1 + int(place.max()) // _PLACES)


_GROUPS: dict[str, Callable[[Sequences], Tensor]] = {
    "in each request": lambda s: s.owner,
    "at each place of the completions": _place,
}


def _each_temperature(group: Callable[[Sequences], Tensor], context: Context, base: Computation) -> list[float] | None:
    """The temperature of each request or place; 1 where nothing is to be explained."""
    z, groups, found = context.logits(base), group(context.sequences), []
    for i in range(int(groups.max()) + 1):
        mine = (groups == i) & context.target.isfinite()
        there = mine.to(z.device)
        if int(mine.sum()) < _LEAST:
            found.append(1.0)
            continue
        rows = SortedLogits(z[there], context.sequences.targets.to(z.device)[there])
        found.append(fit_temperature(rows, context.target.to(z.device)[there]))
    return found if max(found) > 1.02 * min(found) else None


def _listed(values: list[float]) -> str:
    more = f", ... ({min(values):.3g} to {max(values):.3g})" if len(values) > _SHOWN else ""
    return ", ".join(f"{t:.3g}" for t in values[:_SHOWN]) + more


def _each_scaled(group: Callable[[Sequences], Tensor], z: Tensor, rows: Rows, temperatures: list[float]) -> Tensor:
    return z / torch.tensor(temperatures).to(z)[group(rows.sequences).to(z.device)][:, None]


def _filter(fit: Any, context: Context, base: Computation) -> dict[str, Any] | None:
    z, targets, own = known(context, base)
    parameters, left = fit(SortedLogits(z, targets).at(base.sampling.temperature or 1.0), own)
    return parameters if left < 0.98 * context.error(base) else None


_GRID = [0.3 * 1.1**i for i in range(24)]  # temperatures
_FEW_ROWS, _VALLEYS = 160, 2  # rows of the first fit; minima on the grid that are refined


def _with_temperature(fit: Any, context: Context, base: Computation) -> dict[str, Any] | None:
    """Fits the temperature with an exact fit of the filter at each step, first on a few rows, then on all of them."""
    z, targets, own = known(context, base)
    few, rows = SortedLogits(z[:_FEW_ROWS], targets[:_FEW_ROWS]), SortedLogits(z, targets)
    error = lambda t: fit(few.at(t), own[:_FEW_ROWS])[1]
    values = [error(t) for t in _GRID]
    order = sorted(range(len(values)), key=values.__getitem__)
    if values[order[0]] > 0.8 * error(base.sampling.temperature or 1.0):
        return None
    t, _ = min((golden(error, *around(_GRID, i), 14) for i in order[:_VALLEYS]), key=lambda found: found[1])
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


def _exchanged_parts(z: Tensor, rows: Rows, which: tuple[int, int, int]) -> Tensor:
    count, a, b = which
    parts = list(z.chunk(count, 1))
    parts[a], parts[b] = parts[b], parts[a]
    return torch.cat(parts, 1)


def _padded(z: Tensor, rows: Rows, entries: float) -> Tensor:
    """`entries` further entries with logit zero, as a head padded with zero rows has, added to the sum of the first."""
    count = torch.full((len(z), 1), math.log(max(1, round(entries))), device=z.device, dtype=z.dtype)
    return torch.cat([z, count], 1)


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
        ("logits rounded to float8_e4m3fn", "bf16-logits", Head(logits=torch.float8_e4m3fn)),
    ]
    for name, cause, head in choices:
        if head != context.head:
            apply = partial(lambda head, c, _: replace(c, head=head), head)
            yield Change(name, cause, "precision", apply, rounds=head != Head())
    for dtype in (BF16, FP16) if not context.sampling.filters else ():
        yield Change(
            f"log-softmax in {name_of(dtype)}",
            "bf16-logits",
            "precision",
            partial(lambda dtype, c, _: replace(c, stream=(*c.stream, partial(_narrow_softmax, dtype))), dtype),
            rounds=True,
        )
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


def _narrow_softmax(dtype: torch.dtype, logp: Tensor, z: Tensor, rows: Rows) -> Tensor:
    return rows.sampled(z.to(dtype).log_softmax(-1)).float()


def _described(path: dict[str, Any]) -> str:
    layout = path.get("layout")
    place = "decoded with a cache" if path.get("decoded") else "" if layout is None else f"padding {layout.pad}"
    return ", ".join(filter(None, (path.get("kernels", ""), place))) or "as declared"


def _paths(context: Context) -> tuple[dict[str, Any], ...]:
    """Rounding errors depend on kernels, layout and cache, so that those of one path do not remove those of another."""
    layouts: list[dict[str, Any]] = [{}, *({"layout": layout} for _, layout in LAYOUTS), {"decoded": True}]
    return tuple({"kernels": kernel, **layout} for kernel in context.model.kernels for layout in layouts)
