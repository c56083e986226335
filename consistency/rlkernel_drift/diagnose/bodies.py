"""Hypotheses about what the model was given and what it held: tokens, positions, padding, rope, weights, caches.

Each is built by `_plain` (no parameter), `_scanned` (an integer), `_fitted` (a real number) or `_variants` (a choice).
Parameters are searched on a few sequences first; the best value is computed on all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlkernel_drift.diagnose.context import Context
from rlkernel_drift.diagnose.hypothesis import NEAR_FLOOR, Hypothesis, Prediction, predicted
from rlkernel_drift.scoring.model import Layout, prefixed_hidden, replaced
from rlkernel_drift.scoring.semantics import golden
from rlkernel_drift.scoring.sequences import Sequences, joined
from rlkernel_drift.scoring.weights import QUANTISATIONS, linear_names, quantised
from rlkernel_drift.verdict import Scalar

_SCAN_SEQUENCES = 3
_PROMISING = 0.92
_COARSE_STEPS, _FINE_STEPS = 8, 20
_SURE, _ACCEPTABLE = 0.25, 0.6
_PREFIXES = 48
_SHIFTS = (*range(1, 17), 24, 32, 48, 64, 96, 128, -1, -2, -3, -4, -8)
_MULTIPLES = (1, 8, 16, 32, 64, 128)

Hidden = Callable[[Context, float], Tensor]
Change = Callable[[Sequences, Any], Sequences]


def body_battery(context: Context) -> Iterator[Hypothesis]:
    """All hypotheses that need another forward."""
    yield from _tokens(context)
    yield from _layout(context)
    yield from _rope(context)
    yield from _operators(context)
    yield from _weights(context)


# ---- builders ------------------------------------------------------------------------------------------------------


def _plain(name: str, cause: str, hidden: Callable[[Context], Tensor]) -> Hypothesis:
    return Hypothesis(name, cause, lambda c: predicted(c, hidden(c)))


def _scanned(name: str, cause: str, parameter: str, change: Change, values: Iterable[int]) -> Hypothesis:
    """A change of tokens or positions by an integer."""

    def predict(c: Context) -> Prediction | None:
        errors = _scan(c, change, values)
        if not errors:
            return None
        best = min(errors, key=errors.__getitem__)
        return predicted(c, c.hidden(change(c.sequences, best)), {parameter: best})

    return Hypothesis(name, cause, predict)


def _scan(context: Context, change: Change, values: Iterable[float]) -> dict[float, float]:
    """Error on a few sequences for each value of a change of tokens or positions, all in one batch."""
    small, values = context.first(_SCAN_SEQUENCES), list(values)
    if not values:
        return {}
    variants = joined([change(small.sequences, value) for value in values])
    hidden = small.hidden(variants).split(small.sequences.counted)
    return {value: _error(small, h) for value, h in zip(values, hidden, strict=True)}


def _error(context: Context, hidden: Tensor) -> float:
    return context.residual(context.predict(hidden)).mean


def _fitted(
    name: str,
    cause: str,
    parameter: str,
    hidden: Hidden,
    grid: list[float],
    scale: Callable[[float], float] = lambda x: x,
    change: Change | None = None,
) -> Hypothesis:
    """A continuous parameter.

    Args:
        hidden: hidden states at x; `scale(x)` is the parameter.
        change: the same variation as a change of the sequences, with which the grid is scanned in one batch.
    """

    def predict(c: Context) -> Prediction | None:
        errors = None if change is None else list(_scan(c, change, grid).values())
        best = _fit(c, hidden, grid, errors)
        return None if best is None else predicted(c, hidden(c, best), {parameter: scale(best)})

    return Hypothesis(name, cause, predict)


def _fit(context: Context, hidden: Hidden, grid: list[float], errors: list[float] | None) -> float | None:
    """Scans a grid on a few sequences, then runs golden sections around its two best points.

    It takes two points because the error is bumpy away from its minimum. None where no point of the grid is any closer
    than the declared computation; the last digits are fitted only where the hypothesis could be accepted.
    """
    small = context.first(_SCAN_SEQUENCES)
    error = lambda x: _error(small, hidden(small, x))
    values = [error(x) for x in grid] if errors is None else errors
    as_is = _error(small, small.hidden())
    order = sorted(range(len(grid)), key=values.__getitem__)
    if values[order[0]] > _PROMISING * as_is:
        return None
    place, value, step = grid[order[0]], values[order[0]], 0.0
    for best in order[:2]:
        low, high = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
        found = golden(error, low, high, _COARSE_STEPS)
        step = step or high - low
        if found[1] < value:
            (place, value), step = found, high - low
        if value < _SURE * as_is:
            break
    if value > _ACCEPTABLE * as_is:
        return place
    width = step * 0.618**_COARSE_STEPS * 3
    return golden(error, place - width, place + width, _FINE_STEPS)[0]


def _variants(
    name: str, cause: str, parameter: str, variants: Callable[[Context], Iterable[tuple[Scalar, Tensor]]]
) -> Hypothesis:
    """The best of several (value of the parameter, hidden states)."""

    def predict(c: Context) -> Prediction | None:
        found = (predicted(c, hidden, {parameter: value}) for value, hidden in variants(c))
        return min(found, key=lambda p: c.residual(p.values).mean, default=None)

    return Hypothesis(name, cause, predict)


def _inside(c: Context, change: contextlib.AbstractContextManager[None]) -> Tensor:
    with change:
        return c.hidden()


# ---- tokens --------------------------------------------------------------------------------------------------------


def _tokens(context: Context) -> Iterator[Hypothesis]:
    longest = min(_PREFIXES, max(context.sequences.prompt, default=1) - 1)
    beginning, end = "the beginning of the prompt is missing", "the end of the prompt is missing"
    if longest >= 1:
        first = lambda c: c.hidden(c.sequences.drop_first(1))
        yield _plain("the first prompt token is missing", "missing-bos", first)
        yield _scanned(beginning, "chat-template", "tokens", Sequences.drop_first, range(2, longest + 1))
        yield _scanned(end, "chat-template", "tokens", Sequences.drop_prompt_end, range(1, longest + 1))
    bos = context.bos
    if bos is not None:
        yield _plain("a second first token", "missing-bos", lambda c: c.hidden(c.sequences.prepend(bos)))


# ---- positions, padding --------------------------------------------------------------------------------------------


def restart_positions(sequences: Sequences) -> Sequences:
    """Positions that restart at zero where the response begins."""
    return _with_response(sequences, lambda positions: positions - positions[:1])


def shift_positions(sequences: Sequences, amount: int) -> Sequences:
    """Positions of the response moved by an amount."""
    return _with_response(sequences, lambda positions: (positions + amount).clamp(min=0))


def _with_response(sequences: Sequences, change: Callable[[Tensor], Tensor]) -> Sequences:
    starts = zip(sequences.positions, sequences.prompt, strict=True)
    return replace(sequences, positions=[torch.cat([p[:n], change(p[n:])]) for p, n in starts])


def scale_positions(sequences: Sequences, factor: float) -> Sequences:
    """Positions divided by a factor, as linear rope scaling does."""
    return replace(sequences, positions=[p.float() / factor for p in sequences.positions])


def _layout(context: Context) -> Iterator[Hypothesis]:
    restart = lambda c: c.hidden(restart_positions(c.sequences))
    yield _plain("positions restart with the response", "positions-restart", restart)
    jump = "positions jump where the response begins"
    yield _scanned(jump, "positions-shift", "positions", shift_positions, _SHIFTS)

    def padded(c: Context) -> Iterator[tuple[Scalar, Tensor]]:
        # The width is that of the whole batch, so this cannot be tried on a few sequences.
        longest = max(len(ids) for ids in c.sequences.ids)
        by_width = {-(-longest // multiple) * multiple: multiple for multiple in reversed(_MULTIPLES)}
        for multiple in by_width.values():
            yield multiple, c.hidden(layout=Layout("left", True, multiple, c.pad))

    yield _variants("left padding is attended to", "padding-side", "multiple", padded)


# ---- settings of the model -----------------------------------------------------------------------------------------


def _rope(context: Context) -> Iterator[Hypothesis]:
    if context.model.theta is not None:
        yield _fitted(
            "another rope base",
            "rope-base",
            "theta",
            lambda c, x: _inside(c, c.model.rotary_base(10**x, c.dtype)),
            [2.25 + i / 4 for i in range(20)],
            lambda x: 10**x,
        )
    scaled: Change = lambda s, x: scale_positions(s, 2**x)
    yield _fitted(
        "rotary positions scaled",
        "rope-scaling",
        "factor",
        lambda c, x: c.hidden(scaled(c.sequences, x)),
        [i / 3 for i in range(-6, 16) if i],
        lambda x: 2**x,
        scaled,
    )


def _operators(context: Context) -> Iterator[Hypothesis]:
    """Settings of operators that all layers share."""
    yield _fitted(
        "another epsilon in the norms",
        "norm-epsilon",
        "epsilon",
        lambda c, x: _inside(c, c.model.norm_epsilon(10**x, c.dtype)),
        [i / 2 for i in range(-16, 1)],
        lambda x: 10**x,
    )
    yield _plain(
        "rotary frequencies rounded to bfloat16",
        "rope-dtype",
        lambda c: _inside(c, c.model.rotary_rounded(torch.bfloat16, c.dtype)),
    )
    if context.model.other_gelu(context.dtype):
        yield _plain(
            "the exact GELU for its tanh approximation, or the reverse",
            "activation",
            lambda c: _inside(c, replaced(c.model.other_gelu(c.dtype))),
        )


# ---- weights -------------------------------------------------------------------------------------------------------

_SCALES = [0.1, 0.25, 0.5, 0.7, 0.9, 1.1, 1.4, 1.7, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0]
_PAIRS = (("k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_norm", "k_norm"), ("q_proj", "o_proj"))


def _weights(context: Context) -> Iterator[Hypothesis]:
    if context.references.previous is not None:
        yield Hypothesis("the previous version of the weights", "stale-weights", _stale)
        yield Hypothesis("some tensors of the previous version", "partial-sync", _partial)
        yield Hypothesis("prefixes cached with the previous weights", "prefix-cache", _prefix)
    adapter = context.references.adapter
    if adapter is not None:
        scaled: Hidden = lambda c, factor: c.hidden(edits=adapter.merged(c.model, factor))
        yield _plain("no LoRA adapter", "lora-missing", lambda c: scaled(c, 0.0))
        yield _fitted("the LoRA adapter at another scale", "lora-scale", "factor", scaled, _SCALES)
    yield from _embeddings(context)
    yield _variants("weights rounded to eight bits", "quantised-weights", "rounding", _quantised)
    yield _variants("two projections exchanged in every layer", "swapped-weights", "tensors", _swapped)


def _stale(c: Context) -> Prediction:
    assert c.references.previous is not None
    adapter, old = c.references.adapter, c.references.previous
    with old.edited({} if adapter is None else adapter.merged(old), c.dtype):
        hidden = old.hidden(c.sequences, c.dtype)
    return predicted(c, hidden, weight=_previous_head(c))


def _previous_head(c: Context) -> Tensor:
    assert c.references.previous is not None
    return c.references.previous.model.get_output_embeddings().weight.data


def old_tensors(c: Context) -> dict[str, Tensor]:
    """Tensors of the previous version that differ from the model's, by name."""
    assert c.references.previous is not None
    old = dict(c.references.previous.model.named_parameters())
    new = dict(c.model.model.named_parameters())
    return {n: v.data for n, v in old.items() if n in new and v.shape == new[n].shape and not v.equal(new[n])}


def predict_with_old(c: Context, tensors: dict[str, Tensor]) -> Tensor:  # [N]
    """Log-probabilities with these tensors of the previous version in place of the model's."""
    head = tensors.get("lm_head.weight")
    if c.model.tied:
        head = tensors.get("model.embed_tokens.weight", head)
    body = {n: v for n, v in tensors.items() if n != "lm_head.weight"}
    return c.predict(c.hidden(edits=body), weight=head)


def _partial(c: Context) -> Prediction | None:
    """Greedy: adds the tensor whose old value explains most until the next one does not help.

    None where all old tensors together leave only noise, because then the whole version is old.
    """
    old = old_tensors(c)
    if len(old) < 2:
        return None
    small = c.first(_SCAN_SEQUENCES)
    enough = 0.0 if c.floor is None else NEAR_FLOOR * c.floor.mean
    chosen: dict[str, Tensor] = {}
    error = _error(small, small.hidden())
    if small.residual(_stale(small).values).mean <= enough:
        return None
    groups = _groups(old)
    while len(chosen) < len(old) // 2 and error > enough:
        trials = {
            key: small.residual(predict_with_old(small, chosen | {n: old[n] for n in names})).mean
            for key, names in groups.items()
            if not set(names) <= set(chosen)
        }
        if not trials:
            break
        best = min(trials, key=trials.__getitem__)
        if trials[best] > 0.8 * error:
            break
        chosen |= {n: old[n] for n in groups[best]}
        error = trials[best]
        if len(groups[best]) > 1:
            groups = {n: [n] for n in old}
    if not chosen:
        return None
    return Prediction(predict_with_old(c, chosen), {"tensors": len(chosen), "first": min(chosen)})


def _groups(old: dict[str, Tensor]) -> dict[str, list[str]]:
    """Single tensors in a small model; whole layers first in a deep one, because the scan would take hours."""
    if len(old) <= 128:
        return {name: [name] for name in old}
    groups: dict[str, list[str]] = {}
    for name in old:
        key = name.split(".layers.")[1].split(".")[0] if ".layers." in name else name
        groups.setdefault(key, []).append(name)
    return groups


def _prefix(c: Context) -> Prediction | None:
    """Keys and values of the first tokens from the previous weights, the rest computed on top with the new ones."""
    assert c.references.previous is not None
    old, new = c.references.previous.in_dtype(c.dtype), c.model.in_dtype(c.dtype)
    cached = lambda d, count: d.predict(prefixed_hidden(old, new, d.sequences, count))
    small = c.first(2)
    counts = range(1, min(_PREFIXES, *c.sequences.prompt))
    best = min(counts, key=lambda count: small.residual(cached(small, count)).mean, default=None)
    return None if best is None else Prediction(cached(c, best), {"tokens": best})


def _embeddings(context: Context) -> Iterator[Hypothesis]:
    """An untied head and the embedding taken for one another, or an old copy of a tied head."""
    if not context.model.tied:
        embedding = context.model.model.get_input_embeddings().weight.data
        head = context.model.model.get_output_embeddings().weight.data
        yield Hypothesis(
            "the head is the embedding", "tied-embedding", lambda c: predicted(c, c.hidden(), weight=embedding)
        )
        yield _plain(
            "the embedding is the head", "tied-embedding", lambda c: c.hidden(edits={"model.embed_tokens.weight": head})
        )
    elif context.references.previous is not None:
        weight = _previous_head(context)
        yield Hypothesis(
            "the tied head is of the previous version",
            "tied-embedding",
            lambda c: Prediction(c.predict(c.hidden(), weight=weight), weight=weight),
        )


def _quantised(c: Context) -> Iterator[tuple[Scalar, Tensor]]:
    names = linear_names(c.model)
    for how in QUANTISATIONS:
        yield how, c.hidden(edits={name: quantised(c.model.parameter(name), how) for name in names})


def _swapped(c: Context) -> Iterator[tuple[Scalar, Tensor]]:
    names = [name for name, _ in c.model.model.named_parameters()]
    for left, right in _PAIRS:
        edits: dict[str, Tensor] = {}
        for name in names:
            other = name.replace(f".{left}.", f".{right}.")
            if f".{left}." in name and other in names:
                a, b = c.model.parameter(name), c.model.parameter(other)
                if a.shape == b.shape:
                    edits |= {name: b, other: a}
        if edits:
            yield f"{left} and {right}", c.hidden(edits=edits)
