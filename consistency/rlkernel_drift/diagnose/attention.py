"""Changes of attention: masks, scores, probabilities, sinks, heads, and caches that round or lose keys and values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlkernel_drift.diagnose.context import Context
from rlkernel_drift.diagnose.trials import Change
from rlkernel_drift.scoring.attention import Attention, AttentionChange

FACTORS = (0.25, 0.5, 0.7, 0.85, 0.95, 1.05, 1.2, 1.5, 2.0, 4.0, 8.0, 16.0)


def hidden_keys() -> Iterator[Change]:
    """Keys that queries do not see, as in a smaller window or a cache that was cut."""
    for name, (cause, values, hidden) in _HIDDEN.items():
        yield Change(
            name,
            cause,
            "inputs",
            partial(
                lambda hidden, own, c, n: c.with_attention(hiding(partial(hidden, n), own)),
                hidden,
                name in _OF_OWN_KEYS,
            ),
            values,
            parameter="tokens" if len(values) > 1 else "",
            shown=_both if values in (_STREAMED, _PAGES) else _range,
            effort=2,
        )


def _both(v: tuple[int, int]) -> str:
    return f"{v[0]}, {v[1]}"


def _range(v: int | tuple[int, int]) -> int | str:
    return v if isinstance(v, int) else f"{v[0]} to {sum(v) - 1}"


def attention(context: Context) -> Iterator[Change]:
    """Scores, sinks, heads, and keys and values as a cache rounds them."""
    yield from _of_scores()
    yield from _sinks_and_heads()
    yield from _of_bounded_scores()
    yield from _of_probabilities(context)
    yield from _of_cache()


def _of_scores() -> Iterator[Change]:
    """Scores scaled or capped."""
    yield Change(
        "another scale of the attention scores",
        "attention-scale",
        "attention",
        lambda c, f: c.with_attention(lambda call: replace(call, query=call.query * f)),
        FACTORS,
        True,
        start=1.0,
        parameter="factor",
    )
    yield Change(
        "a soft cap of the attention scores",
        "soft-cap",
        "attention",
        lambda c, cap: c.with_attention(_capped(cap)),
        (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0),
        True,
        parameter="cap",
    )


def _sinks_and_heads() -> Iterator[Change]:
    """Sinks left out or added; query heads that share keys in another order."""
    yield Change(
        "the attention sinks are left out",
        "attention-sinks",
        "attention",
        lambda c, _: c.with_attention(_without_sinks),
    )
    yield Change(
        "an attention sink is added",
        "attention-sinks",
        "attention",
        lambda c, logit: c.with_attention(partial(_sink, logit)),
        (-4.0, -2.0, 0.0, 2.0, 4.0),
        True,
        parameter="logit",
        effort=2,
    )
    yield Change(
        "query heads share keys and values in another order",
        "head-order",
        "attention",
        lambda c, back: c.with_attention(partial(_regrouped, back)),
        (True, False),
    )


def _of_bounded_scores() -> Iterator[Change]:
    """Scores clamped, or changed by distance or position."""
    yield Change(
        "attention scores are clamped from above",
        "operator",
        "attention",
        lambda c, limit: c.with_attention(_scored(lambda x: x.clamp(max=limit))),
        (0.5, 1.0, 2.0, 4.0, 8.0, 16.0),
        True,
        parameter="limit",
        operator="attention in every layer",
        effort=2,
    )
    for words, slope, values in (
        ("attention scores fall with the distance", _slope, (0.01, 0.03, 0.1, 0.3, 1.0)),
        ("attention scores with ALiBi's slopes", _alibi, (0.1, 0.5, 1.0)),
    ):
        yield Change(
            words,
            "operator",
            "attention",
            partial(lambda slope, c, x: c.with_attention(_scored(partial(slope, x))), slope),
            values,
            True,
            start=0.0,
            parameter="slope",
            operator="attention in every layer",
            effort=2,
        )
    yield Change(
        "attention scores that grow with the logarithm of the position",
        "attention-scale",
        "attention",
        lambda c, n: c.with_attention(_scored(partial(_logarithmic, n))),
        (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
        parameter="from position",
        operator="attention in every layer",
        effort=2,
    )


def _of_probabilities(context: Context) -> Iterator[Change]:
    yield Change(
        "attention probabilities rounded",
        "operator-dtype",
        "attention",
        lambda c, how: c.with_attention(_weighted(ROUNDINGS[how])),
        tuple(how for how in ROUNDINGS if context.dtype == torch.float32 or "float16" not in how),
        parameter="to",
        operator="attention in every layer",
        rounds=True,
    )
    for words, change, counts in (
        ("attention keeps only the keys with the largest scores", _strongest, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)),
        ("splits of the keys are merged without their sums", _unmerged, (4, 8, 16, 32, 64, 128, 256)),
    ):
        yield Change(
            words,
            "operator",
            "attention",
            partial(lambda change, c, n: c.with_attention(_weighted(partial(change, n))), change),
            counts,
            parameter="keys",
            operator="attention in every layer",
            effort=2,
        )


def _of_cache() -> Iterator[Change]:
    """Keys and values rounded, as by a cache in fewer bits."""
    for rounding, function in ROUNDINGS.items():
        for decoding in (False, True):
            yield Change(
                f"keys and values rounded to {rounding}{' where the response reads them' if decoding else ''}",
                "kv-cache-dtype",
                "attention",
                partial(
                    lambda function, later, c, which: c.with_attention(_cached(function, which, later)),
                    function,
                    decoding,
                ),
                ("kv", "k", "v") if decoding else ("kv", "k", "v", "qk", "qkv"),
                parameter="rounded",
                effort=1 + decoding,
                rounds=True,
            )


def scaled_scores(layer: int) -> Change:
    """The scores of one layer scaled."""
    scale = lambda f: _in_layer(layer, lambda call: replace(call, query=call.query * f))
    return Change(
        f"another scale of the attention scores in layer {layer}",
        "operator",
        "operators",
        lambda c, f: c.with_attention(scale(f)),
        (0.5, 0.8, 1.25, 2.0),
        True,
        start=1.0,
        parameter="factor",
        operator=f"layers.{layer}.attention",
        effort=2,
    )


def another_attention(layer: int) -> Change:
    """One layer's window, blocks, heads, sinks or probabilities."""
    return Change(
        f"another attention in layer {layer}",
        "operator",
        "operators",
        lambda c, how: c.with_attention(_in_layer(layer, _OF_A_LAYER[how])),
        tuple(_OF_A_LAYER),
        parameter="change",
        operator=f"layers.{layer}.attention",
        effort=2,
    )


def rounded_in(layer: int) -> Change:
    """The cache of one layer rounded."""
    return Change(
        f"keys and values of layer {layer} rounded",
        "kv-cache-dtype",
        "operators",
        lambda c, v: c.with_attention(_in_layer(layer, _cached(ROUNDINGS[v[0]], "kv", v[1]))),
        tuple((how, decoding) for how in ROUNDINGS for decoding in (False, True)),
        parameter="to",
        shown=lambda v: v[0] + (" where the response reads them" if v[1] else ""),
        operator=f"layers.{layer}.attention",
        effort=2,
        rounds=True,
    )


def _in_layer(layer: int, change: AttentionChange) -> AttentionChange:
    return lambda call: change(call) if call.layer == layer else call


def _rolled(by: int, call: Attention) -> Attention:
    return replace(call, query=call.query.roll(by, 1))


def _scored(change: Callable[[Tensor], Tensor]) -> AttentionChange:
    return lambda call: replace(call, scores=(*call.scores, change))


def _weighted(change: Callable[[Tensor], Tensor]) -> AttentionChange:
    return lambda call: replace(call, probabilities=(*call.probabilities, change))


def _capped(cap: float) -> AttentionChange:
    uncapped = lambda call: replace(call, settings={**call.settings, "softcap": None})
    return lambda call: _scored(lambda x: torch.tanh(x / cap) * cap)(uncapped(call))


def _slope(slope: float, x: Tensor) -> Tensor:
    """Scores that fall with the distance, by a slope per token."""
    return x + slope * _distance(x)


def _alibi(factor: float, x: Tensor) -> Tensor:
    """Scores with the slopes of ALiBi, https://arxiv.org/abs/2108.12409, times a factor."""
    heads = x.shape[1]
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, device=x.device) / heads)
    return x + factor * slopes.to(x)[:, None, None] * _distance(x)


def _distance(x: Tensor) -> Tensor:  # [L, K], zero on the diagonal
    queries, keys = x.shape[-2:]
    i = torch.arange(queries, device=x.device)[:, None] + keys - queries
    return (torch.arange(keys, device=x.device) - i).to(x)


def _logarithmic(start: int, x: Tensor) -> Tensor:
    """Scores times log(position) / log(start), at least one."""
    places = torch.arange(1, x.shape[-2] + 1, device=x.device) + x.shape[-1] - x.shape[-2]
    return x * (places.log() / math.log(start)).clamp(min=1.0).to(x)[:, None]


def _strongest(count: int, x: Tensor) -> Tensor:
    """Probabilities of the `count` keys with the largest, as in sparse attention."""
    least = x.topk(min(count, x.shape[-1]), -1).values[..., -1:]
    kept = x.masked_fill(x < least, 0.0)
    return kept / kept.sum(-1, keepdim=True) * x.sum(-1, keepdim=True)  # sinks keep their share


def _unmerged(size: int, x: Tensor) -> Tensor:
    """The mean over splits of `size` keys, each normalised by itself: split results merged without their sums."""
    parts = torch.nn.functional.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))
    sums = parts.sum(-1, keepdim=True)
    there = (sums > 0).to(x).sum(-2, keepdim=True)
    return (parts / torch.where(sums > 0, sums, 1) / there).flatten(-2)[..., : x.shape[-1]]


def _without_sinks(call: Attention) -> Attention:
    return replace(call, settings={**call.settings, "s_aux": None})


def _one_key_head(call: Attention) -> Attention:
    """Every query head reads the first key head."""
    return replace(call, key=call.key[:, :1].expand_as(call.key), value=call.value[:, :1].expand_as(call.value))


def _sink(logit: float, call: Attention) -> Attention:
    """A key of zeros with a value of zeros, which every query sees with this score."""
    pad = lambda x: torch.nn.functional.pad(x, (0, 0, 1, 0))
    mask = _mask(call)
    mask = torch.nn.functional.pad(mask.expand(-1, -1, call.query.shape[2], -1), (1, 0), value=logit)
    return replace(call, key=pad(call.key), value=pad(call.value), mask=mask)


def _regrouped(back: bool, call: Attention) -> Attention:
    """Query heads 0, G, 2G, ... read the first key head, instead of neighbours; their outputs may be put back."""
    groups = call.query.shape[1] // call.key.shape[1]
    order = torch.arange(call.query.shape[1]).view(groups, -1).t().flatten()
    return replace(call, query=call.query[:, order], order=order if back else None) if groups > 1 else call


def rounded(to: torch.dtype) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        limit = torch.finfo(to).max
        return x.clamp(-limit, limit).to(to).to(x.dtype)

    return change


def scaled_to(largest: float, to: torch.dtype | None, dims: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """Rounding with a scale: to a dtype, or to integers."""

    def change(x: Tensor) -> Tensor:
        scale = (x.float().abs().amax(dims, keepdim=True) / largest).clamp(min=1e-12)
        y = x.float() / scale
        return ((y.round() if to is None else y.to(to).float()) * scale).to(x.dtype)

    return change


_FP8 = torch.float8_e4m3fn
ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8": rounded(_FP8),
    "fp8 (e5m2)": rounded(torch.float8_e5m2),
    "fp8 with a scale of the tensor": scaled_to(448, _FP8, (0, 1, 2, 3)),
    "fp8 with a scale of each head": scaled_to(448, _FP8, (0, 2, 3)),
    "fp8 with a scale of each token": scaled_to(448, _FP8, (3,)),
    "int8 with a scale of each token": scaled_to(127, None, (3,)),
    "int8 with a scale of each head": scaled_to(127, None, (0, 2, 3)),
    "int4 with a scale of each head": scaled_to(7, None, (0, 2, 3)),
    "int8 with a scale of the tensor": scaled_to(127, None, (0, 1, 2, 3)),
    "int4 with a scale of each token": scaled_to(7, None, (3,)),
    "bfloat16": rounded(torch.bfloat16),
    "float16": rounded(torch.float16),
}
"""Roundings of keys and values [B, H, L, D] in a cache."""
BEFORE_ROPE: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8": rounded(_FP8),
    "int8 with a scale of each token": scaled_to(127, None, (2,)),
    "int4 with a scale of each token": scaled_to(7, None, (2,)),
}
"""Roundings of the outputs [B, L, C] of their projections."""


def _cached(function: Callable[[Tensor], Tensor], which: str, decoding: bool) -> AttentionChange:
    def change(call: Attention) -> Attention:
        query = function(call.query) if "q" in which else call.query
        key = function(call.key) if "k" in which else call.key
        value = function(call.value) if "v" in which else call.value
        if not decoding:
            return replace(call, query=query, key=key, value=value)
        # Queries of the prompt see exact keys and values, those of the response rounded ones: both sets, with a mask.
        mask, lowest = _mask(call), torch.finfo(call.query.dtype).min
        response = (
            torch.arange(mask.shape[2], device=mask.device)[None, None, :, None] >= call.prompts[:, None, None, None]
        )
        both = torch.cat([mask.masked_fill(response, lowest), mask.masked_fill(~response, lowest)], -1)
        return replace(call, key=torch.cat([call.key, key], 2), value=torch.cat([call.value, value], 2), mask=both)

    return change


# ---- masks -----------------------------------------------------------------------------------------------------------


def _mask(call: Attention) -> Tensor:  # [B or 1, 1, L, L]
    if call.mask is not None:
        return call.mask
    length = call.query.shape[2]
    i = torch.arange(length, device=call.query.device)
    lowest = torch.finfo(call.query.dtype).min
    return torch.zeros(1, 1, length, length, dtype=call.query.dtype, device=i.device).masked_fill(
        i > i[:, None], lowest
    )


def hiding(hidden: Callable[[Attention, Tensor, Tensor], Tensor], own: bool = False) -> AttentionChange:
    """Hides keys from queries. `hidden` maps a call, the query indices and the key indices to a mask of hidden keys.

    Args:
        own: whether a query's own key can be hidden too; that of the first token is not.
    """

    def change(call: Attention) -> Attention:
        mask = _mask(call)
        i = torch.arange(mask.shape[-1], device=mask.device)[None, None, :, None]
        j = i.transpose(2, 3)
        prompts = replace(call, prompts=call.prompts[:, None, None, None])
        gone = hidden(prompts, i, j) & ((i != j) | (own & (i > 0)))
        return replace(call, mask=mask.masked_fill(gone, torch.finfo(call.query.dtype).min))

    return change


def neighbours(by: int, call: Attention) -> Attention:
    """Prompts also see the prompt of the sequence `by` places before them in the batch; responses do not."""
    length = call.query.shape[2]
    i = torch.arange(length, device=call.query.device)[None, None, :, None]
    prompts = call.prompts[:, None, None, None]
    seen = (i < prompts) & (i.transpose(2, 3) < prompts.roll(by, 0))
    lowest = torch.finfo(call.query.dtype).min
    mask = torch.cat([_mask(call).expand(len(prompts), -1, -1, -1), torch.where(seen, 0.0, lowest).to(call.query)], -1)
    both = lambda x: torch.cat([x, x.roll(by, 0)], 2)
    return replace(call, key=both(call.key), value=both(call.value), mask=mask)


_PAGES = tuple((page, at) for page in (4, 8, 16, 32, 64) for at in (page - 1, 0))
_COUNTS = (*range(1, 33), 40, 48, 64, 96, 128, 256, 512, 1024)
_FIRST = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
_STREAMED = tuple((first, last) for first in (1, 2, 4, 8) for last in (8, 12, 16, 20, 24, 32, 48, 64, 96, 128))
_BLOCKS = tuple((n * k, n) for n in (4, 8, 16, 32, 64) for k in range(1, 5))
Hidden = Callable[[Any, Attention, Tensor, Tensor], Tensor]
_HIDDEN: dict[str, tuple[str, tuple[Any, ...], Hidden]] = {
    "attention sees only the last tokens": ("attention-window", _COUNTS, lambda n, call, i, j: j <= i - n),
    "the response sees only the last tokens": (
        "attention-window",
        _COUNTS,
        lambda n, call, i, j: (i >= call.prompts) & (j <= i - n),
    ),
    "attention sees only the first tokens and the last ones": (
        "cache-cut",
        _STREAMED,
        lambda n, call, i, j: (j >= n[0]) & (j <= i - n[1]),
    ),
    "the response does not see the end of the prompt": (
        "cache-cut",
        _FIRST,
        lambda n, call, i, j: (i >= call.prompts) & (j < call.prompts) & (j >= call.prompts - n),
    ),
    "keys are not seen": (
        "cache-cut",
        tuple((0, n) for n in _FIRST) + _BLOCKS,
        lambda b, call, i, j: (j >= b[0]) & (j < sum(b)),
    ),
    "the response does not see keys": (
        "cache-cut",
        tuple((0, n) for n in _FIRST) + _BLOCKS,
        lambda b, call, i, j: (i >= call.prompts) & (j >= b[0]) & (j < sum(b)),
    ),
    "a key of each page is not seen": ("cache-cut", _PAGES, lambda v, call, i, j: (j % v[0] == v[1]) & (j < i - 1)),
    "attention sees only the keys of its block": (
        "cache-cut",
        (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 64, 128),
        lambda n, call, i, j: i // n != j // n,
    ),
    "prompts see only the keys of their block": (
        "cache-cut",
        (4, 6, 8, 10, 12, 16, 24, 32, 64, 128),
        lambda n, call, i, j: (i < call.prompts) & (i // n != j // n),
    ),
    "the newest keys are not seen": ("cache-cut", (1, 2, 3, 4), lambda n, call, i, j: j >= i - n),
    "a token's own key is not seen": ("cache-cut", (0,), lambda n, call, i, j: i == j),
    "the response does not see its own key": ("cache-cut", (0,), lambda n, call, i, j: (i == j) & (i >= call.prompts)),
    "the response does not see the newest keys": (
        "cache-cut",
        (1, 2, 3, 4),
        lambda n, call, i, j: (i >= call.prompts) & (j >= i - n),
    ),
    "the response sees only the first tokens and its last ones": (
        "cache-cut",
        _FIRST,
        lambda n, call, i, j: (i >= call.prompts) & (j >= n) & (j <= i - n),
    ),
}
"""Name -> (cause, values of the change, mask of the keys that a query does not see)."""
_OF_OWN_KEYS = ("a token's own key is not seen", "the response does not see its own key")
_WINDOWS = (1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 14, 16, 20, 24, 32, 48, 64)
_OF_A_LAYER: dict[str, AttentionChange] = {
    **{f"heads exchanged by {n}": partial(_rolled, n) for n in (1, 2, 3)},
    "every query head reads the first key head": _one_key_head,
    **{
        f"query heads share keys in another order{', outputs put back' if back else ''}": partial(_regrouped, back)
        for back in (True, False)
    },
    **{f"a window of {n} tokens": hiding(partial(lambda n, call, i, j: j <= i - n, n)) for n in _WINDOWS},
    **{f"blocks of {n} tokens": hiding(partial(lambda n, call, i, j: i // n != j // n, n)) for n in (8, 16, 32)},
    "the first key is not seen": hiding(lambda call, i, j: j == 0),
    "the newest key is not seen": hiding(lambda call, i, j: j == i - 1),
    "a token's own key is not seen": hiding(lambda call, i, j: i == j, own=True),
    "the response does not see its own key": hiding(lambda call, i, j: (i == j) & (i >= call.prompts), own=True),
    "no sinks": _without_sinks,
    "a sink with logit 0": partial(_sink, 0.0),
    **{f"probabilities rounded to {how}": _weighted(ROUNDINGS[how]) for how in ("fp8", "bfloat16")},
}
"""Changes of the attention of one layer."""
