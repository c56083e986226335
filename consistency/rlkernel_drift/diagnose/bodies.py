"""Hypotheses about what the model was given and what it held: tokens, positions, padding, rope, weights, caches.

Integer parameters are scanned on a few sequences first; the best one is computed on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from rlkernel_drift.diagnose.context import Context
from rlkernel_drift.diagnose.hypothesis import NEAR_FLOOR, Hypothesis, Prediction, residual
from rlkernel_drift.scoring.model import Layout, replaced
from rlkernel_drift.scoring.semantics import golden
from rlkernel_drift.scoring.sequences import Sequences, joined
from rlkernel_drift.scoring.weights import QUANTISATIONS, linear_names, quantised

_SCAN_SEQUENCES = 3
_PROMISING = 0.92
_COARSE_STEPS, _FINE_STEPS = 8, 20
_SURE, _ACCEPTABLE = 0.25, 0.6
_PREFIXES = 48
_SHIFTS = (*range(1, 17), 24, 32, 48, 64, 96, 128, -1, -2, -3, -4, -8)
_MULTIPLES = (1, 8, 16, 32, 64, 128)


def few(context: Context, count: int = _SCAN_SEQUENCES) -> Context:
    """The context of the first sequences, for scans."""
    s = context.sequences
    count = min(count, len(s))
    keep = s.owner < count
    part = replace(
        s,
        ids=s.ids[:count],
        positions=s.positions[:count],
        rows=s.rows[:count],
        prompt=s.prompt[:count],
        targets=s.targets[keep],
        owner=s.owner[keep],
        token=s.token[keep],
    )
    return replace(context, sequences=part, target=context.target[keep], prompt_lengths=s.prompt[:count])


def error_of(context: Context, values: Tensor) -> float:
    """Mean residual of a prediction."""
    return residual(values, context.target, context.sequences.owner, len(context.sequences)).mean


Score = Callable[[Context, float], Tensor]
Change = Callable[[Sequences, float], Sequences]


def scan_sequences(context: Context, change: Change, values: Iterable[float]) -> dict[float, float]:
    """Errors on a few sequences for each value of a change of tokens or positions, all in one batch."""
    small = few(context)
    values = list(values)
    variants = [change(small.sequences, value) for value in values]
    hidden = small.hidden(joined(variants)).split(small.sequences.counted)
    return {v: error_of(small, small.predict(h)) for v, h in zip(values, hidden, strict=True)}


def body_battery(context: Context) -> Iterator[Hypothesis]:
    """All hypotheses that need another forward."""
    yield from _tokens(context)
    yield from _layout(context)
    yield from _rope(context)
    yield from _operators(context)
    yield from _weights(context)


def _scanned(name: str, cause: str, parameter: str, change: Change, values: list[int]) -> Hypothesis:
    def predict(c: Context) -> Prediction | None:
        if not values:
            return None
        errors = scan_sequences(c, change, values)
        best = int(min(errors, key=errors.__getitem__))
        hidden = c.hidden(change(c.sequences, best))
        return Prediction(c.predict(hidden), {parameter: best}, hidden)

    return Hypothesis(name, cause, predict)


def _plain(name: str, cause: str, change: Callable[[Context], Tensor]) -> Hypothesis:
    def predict(c: Context) -> Prediction:
        hidden = change(c)
        return Prediction(c.predict(hidden), {}, hidden)

    return Hypothesis(name, cause, predict)


# ---- tokens --------------------------------------------------------------------------------------------------------


def _tokens(context: Context) -> Iterator[Hypothesis]:
    longest = min(_PREFIXES, max(context.prompt_lengths, default=1) - 1)
    if longest >= 1:
        yield _plain(
            "the first prompt token is missing", "missing-bos", lambda c: c.hidden(c.sequences.without_head(1))
        )
        yield _scanned(
            "the beginning of the prompt is missing",
            "chat-template",
            "tokens",
            lambda s, k: s.without_head(int(k)),
            list(range(2, longest + 1)),
        )
        yield _scanned(
            "the end of the prompt is missing",
            "chat-template",
            "tokens",
            lambda s, k: s.without_prompt_tail(int(k)),
            list(range(1, longest + 1)),
        )
    if context.bos is not None:
        bos = context.bos
        yield _plain("a second first token", "missing-bos", lambda c: c.hidden(c.sequences.with_head(bos)))


# ---- positions, padding --------------------------------------------------------------------------------------------


def restarted(sequences: Sequences) -> Sequences:
    """Positions that start at zero again where the response begins."""
    return sequences.with_positions(
        [torch.cat([p[:n], p[n:] - p[n : n + 1]]) for p, n in zip(sequences.positions, sequences.prompt, strict=True)]
    )


def shifted(sequences: Sequences, amount: int) -> Sequences:
    """Positions of the response moved by an amount."""
    return sequences.with_positions(
        [
            torch.cat([p[:n], (p[n:] + amount).clamp(min=0)])
            for p, n in zip(sequences.positions, sequences.prompt, strict=True)
        ]
    )


def scaled(sequences: Sequences, factor: float) -> Sequences:
    """Positions divided by a factor, as linear scaling of rope does."""
    return sequences.with_positions([p.float() / factor for p in sequences.positions])


def _layout(context: Context) -> Iterator[Hypothesis]:
    yield _plain("positions restart with the response", "positions-restart", lambda c: c.hidden(restarted(c.sequences)))
    yield _scanned(
        "positions jump where the response begins",
        "positions-shift",
        "positions",
        lambda s, amount: shifted(s, int(amount)),
        list(_SHIFTS),
    )

    def padded(c: Context) -> Prediction:
        # The width is that of the whole batch, so that this cannot be tried on a few sequences.
        found = []
        longest = max(len(ids) for ids in c.sequences.ids)
        by_width = {-(-longest // multiple) * multiple: multiple for multiple in reversed(_MULTIPLES)}
        for multiple in by_width.values():
            hidden = c.hidden(layout=Layout("left", True, multiple, c.pad))
            values = c.predict(hidden)
            found.append((error_of(c, values), multiple, values, hidden))
        _, multiple, values, hidden = min(found, key=lambda item: item[0])
        return Prediction(values, {"multiple": multiple}, hidden)

    yield Hypothesis("left padding is attended to", "padding-side", padded)


# ---- rope ----------------------------------------------------------------------------------------------------------


def _rope(context: Context) -> Iterator[Hypothesis]:
    theta = context.model.theta
    if theta is not None:

        def base(c: Context) -> Prediction | None:
            def score(d: Context, exponent: float) -> Tensor:
                with d.model.rotary_base(10**exponent, d.dtype):
                    return d.hidden()

            best = _fit(c, score, [2.25 + i / 4 for i in range(20)])
            if best is None:
                return None
            hidden = score(c, best)
            return Prediction(c.predict(hidden), {"theta": 10**best}, hidden)

        yield Hypothesis("another rope base", "rope-base", base)

    def scaling(c: Context) -> Prediction | None:
        score = lambda d, x: d.hidden(scaled(d.sequences, 2**x))
        grid = [i / 3 for i in range(-6, 16) if i]
        best = _fit(c, score, grid, list(scan_sequences(c, lambda s, x: scaled(s, 2**x), grid).values()))
        if best is None:
            return None
        hidden = score(c, best)
        return Prediction(c.predict(hidden), {"factor": 2**best}, hidden)

    yield Hypothesis("rotary positions scaled", "rope-scaling", scaling)


def _operators(context: Context) -> Iterator[Hypothesis]:
    """Settings of operators that every layer shares."""

    def epsilon(c: Context) -> Prediction | None:
        def score(d: Context, exponent: float) -> Tensor:
            with d.model.norm_epsilon(10**exponent, d.dtype):
                return d.hidden()

        best = _fit(c, score, [i / 2 for i in range(-16, 1)])
        if best is None:
            return None
        hidden = score(c, best)
        return Prediction(c.predict(hidden), {"epsilon": 10**best}, hidden)

    yield Hypothesis("another epsilon in the norms", "norm-epsilon", epsilon)

    def rounded(c: Context) -> Tensor:
        with c.model.rotary_rounded(torch.bfloat16, c.dtype):
            return c.hidden()

    yield _plain("rotary frequencies rounded to bfloat16", "rope-dtype", rounded)
    if context.model.other_gelu(context.dtype):

        def gelu(c: Context) -> Tensor:
            with replaced(c.model.other_gelu(c.dtype)):
                return c.hidden()

        yield _plain("the exact GELU for its tanh approximation, or the reverse", "activation", gelu)


def _fit(context: Context, score: Score, grid: list[float], errors: list[float] | None = None) -> float | None:
    """A continuous parameter: a grid on a few sequences, then golden sections around its two best points.

    Two, because the error is bumpy away from its minimum. None where nothing on the grid comes any closer; fitted to
    the end only where it could be accepted.
    """
    small = few(context)
    error = lambda x: error_of(small, small.predict(score(small, x)))
    values = [error(x) for x in grid] if errors is None else errors
    as_is = error_of(small, small.predict(small.hidden()))
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


# ---- weights -------------------------------------------------------------------------------------------------------


def _weights(context: Context) -> Iterator[Hypothesis]:
    if context.references.previous is not None:
        yield Hypothesis("the version of the weights before", "stale-weights", _stale)
        yield Hypothesis("some tensors of the version before", "partial-sync", _partial)
        yield Hypothesis("prefixes cached with the weights before", "prefix-cache", _prefix)
    if context.references.adapter is not None:
        yield _plain("no LoRA adapter", "lora-missing", lambda c: c.edited(_adapter(c, 0.0)))
        yield Hypothesis("the LoRA adapter at another scale", "lora-scale", _lora_scale)
    yield from _embeddings(context)
    yield Hypothesis("weights rounded to eight bits", "quantised-weights", _quantised)
    yield Hypothesis("two projections exchanged in every layer", "swapped-weights", _swapped)


def _stale(c: Context) -> Prediction:
    hidden, weight = _previous(c), _previous_head(c)
    return Prediction(c.predict(hidden, weight=weight), {}, hidden, weight)


def _previous(c: Context) -> Tensor:
    assert c.references.previous is not None
    adapter = c.references.adapter
    model = c.references.previous
    edits = {} if adapter is None else {n: model.parameter(n) + u for n, u in adapter.updates.items()}
    with model.edited(edits, c.dtype):
        return model.hidden(c.sequences, c.dtype)


def _previous_head(c: Context) -> Tensor:
    assert c.references.previous is not None
    return c.references.previous.model.get_output_embeddings().weight.data


def old_tensors(c: Context) -> dict[str, Tensor]:
    """Tensors of the version before that differ from the model's, by name."""
    assert c.references.previous is not None
    old = dict(c.references.previous.model.named_parameters())
    new = dict(c.model.model.named_parameters())
    return {n: v.data for n, v in old.items() if n in new and v.shape == new[n].shape and not v.equal(new[n])}


def _partial(c: Context) -> Prediction | None:
    """Greedy: the tensor, then the next, whose old value explains most; stops where the next one does not help.

    None where all of them together leave only noise: that is the whole version before.
    """
    old = old_tensors(c)
    if len(old) < 2:
        return None
    small = few(c)
    enough = 0.0 if c.floor is None else NEAR_FLOOR * c.floor.mean
    chosen: dict[str, Tensor] = {}
    error = error_of(small, small.predict(small.hidden()))
    if error_of(small, _stale(small).values) <= enough:
        return None
    groups = _groups(old)
    while len(chosen) < len(old) // 2 and error > enough:
        trials = {
            key: error_of(small, predict_with_old(small, chosen | {n: old[n] for n in names}))
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
    names = sorted(chosen)
    return Prediction(predict_with_old(c, chosen), {"tensors": len(names), "first": names[0]})


def _groups(old: dict[str, Tensor]) -> dict[str, list[str]]:
    """Single tensors in a small model; in a deep one layers first, or the scan would take hours."""
    if len(old) <= 128:
        return {name: [name] for name in old}
    groups: dict[str, list[str]] = {}
    for name in old:
        key = name.split(".layers.")[1].split(".")[0] if ".layers." in name else name
        groups.setdefault(key, []).append(name)
    return groups


def predict_with_old(c: Context, tensors: dict[str, Tensor]) -> Tensor:
    """Log-probabilities with these tensors of the version before in place of the model's."""
    head = next((tensors[n] for n in ("lm_head.weight",) if n in tensors), None)
    if c.model.tied and "model.embed_tokens.weight" in tensors:
        head = tensors["model.embed_tokens.weight"]
    body = {n: v for n, v in tensors.items() if n != "lm_head.weight"}
    return c.predict(c.edited(body), weight=head)


def _prefix(c: Context) -> Prediction | None:
    """The first tokens' keys and values from the weights before, the rest on top of them with the new ones."""
    longest = min(_PREFIXES, min(c.prompt_lengths))
    if longest < 2:
        return None
    small = few(c, 2)
    errors = {k: error_of(small, small.predict(_cached(small, k))) for k in range(1, longest)}
    best = min(errors, key=errors.__getitem__)
    return Prediction(c.predict(_cached(c, best)), {"tokens": best})


@torch.no_grad()
def _cached(c: Context, prefix: int) -> Tensor:
    assert c.references.previous is not None
    old, new = c.references.previous.in_dtype(c.dtype), c.model.in_dtype(c.dtype)
    parts = []
    for ids, positions, rows in zip(c.sequences.ids, c.sequences.positions, c.sequences.rows, strict=True):
        device = c.model.device
        first = old.base_model(
            input_ids=ids[None, :prefix].to(device), position_ids=positions[None, :prefix].to(device), use_cache=True
        )
        rest = new.base_model(
            input_ids=ids[None, prefix:].to(device),
            position_ids=positions[None, prefix:].to(device),
            past_key_values=first.past_key_values,
            use_cache=True,
        ).last_hidden_state[0]
        parts.append(rest[(rows - prefix).to(device)])
    return torch.cat(parts)


def _adapter(c: Context, factor: float) -> dict[str, Tensor]:
    assert c.references.adapter is not None
    return c.references.adapter.merged(c.model, factor)


def _lora_scale(c: Context) -> Prediction | None:
    score = lambda d, f: d.edited(_adapter(d, f))
    best = _fit(c, score, [0.1, 0.25, 0.5, 0.7, 0.9, 1.1, 1.4, 1.7, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0])
    if best is None:
        return None
    hidden = score(c, best)
    return Prediction(c.predict(hidden), {"factor": best}, hidden)


def _embeddings(context: Context) -> Iterator[Hypothesis]:
    """The head takes the embedding where it has weights of its own, or an old copy where they are tied."""
    embedding = context.model.model.get_input_embeddings().weight.data
    if not context.model.tied:

        def tied(c: Context) -> Prediction:
            hidden = c.hidden()
            return Prediction(c.predict(hidden, weight=embedding), {}, hidden, embedding)

        yield Hypothesis("the head is the embedding", "tied-embedding", tied)

        def reverse(c: Context) -> Prediction:
            head = c.model.model.get_output_embeddings().weight.data
            hidden = c.edited({"model.embed_tokens.weight": head})
            return Prediction(c.predict(hidden), {}, hidden)

        yield Hypothesis("the embedding is the head", "tied-embedding", reverse)
    elif context.references.previous is not None:

        def stale(c: Context) -> Prediction:
            weight = _previous_head(c)
            return Prediction(c.predict(c.hidden(), weight=weight), {}, None, weight)

        yield Hypothesis("the tied head is of the version before", "tied-embedding", stale)


def _quantised(c: Context) -> Prediction:
    names = linear_names(c.model)
    found = []
    for how in QUANTISATIONS:
        hidden = c.edited({name: quantised(c.model.parameter(name), how) for name in names})
        values = c.predict(hidden)
        found.append((error_of(c, values), how, values, hidden))
    _, how, values, hidden = min(found, key=lambda item: item[0])
    return Prediction(values, {"rounding": how}, hidden)


_PAIRS = (("k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_norm", "k_norm"), ("q_proj", "o_proj"))


def _swapped(c: Context) -> Prediction | None:
    names = [name for name, _ in c.model.model.named_parameters()]
    found = []
    for left, right in _PAIRS:
        edits: dict[str, Tensor] = {}
        for name in names:
            other = name.replace(f".{left}.", f".{right}.")
            if f".{left}." in name and other in names:
                a, b = c.model.parameter(name), c.model.parameter(other)
                if a.shape == b.shape:
                    edits |= {name: b, other: a}
        if edits:
            hidden = c.edited(edits)
            values = c.predict(hidden)
            found.append((error_of(c, values), f"{left} and {right}", values, hidden))
    if not found:
        return None
    _, pair, values, hidden = min(found, key=lambda item: item[0])
    return Prediction(values, {"tensors": pair}, hidden)
