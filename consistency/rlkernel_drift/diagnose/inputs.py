"""Changes of the model's inputs: tokens of the prompts, positions, padding, packed and exchanged requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlkernel_drift.diagnose.attention import neighbours
from rlkernel_drift.diagnose.context import Computation, Context
from rlkernel_drift.diagnose.trials import Change, each_request
from rlkernel_drift.scoring.sequences import Sequences

_PREFIXES = 48  # most tokens that are cut from a prompt
_SHIFTS = (*range(1, 17), 24, 32, 48, 64, 96, 128, -1, -2, -3, -4, -8)
_MULTIPLES = (1, 8, 16, 32, 64, 128)
_SPAN = 24  # tokens of a prompt within which spans are left out
_CANDIDATES, _FEW = 64, 12  # tokens that are tried, most common first; those tried where each costs more
_SEPARATORS = 8  # tokens after which another one may be inserted
_SMALL = 512  # largest vocabulary of which every token is tried
_LONGEST = 4  # tokens inserted in the last turn


def inputs(context: Context) -> Iterator[Change]:
    """Changes of tokens and positions, common ones first."""
    yield from _prompt_ends(context)
    yield from _positions(context)
    yield from _other_requests(context)
    yield from _prompt_tokens(context)


def _prompt_ends(context: Context) -> Iterator[Change]:
    """The beginning or the end of the prompts missing or doubled."""
    longest = min(_PREFIXES, max(context.sequences.prompt, default=1) - 1)
    if longest >= 1:
        yield _given("the first prompt token is missing", "missing-bos", Sequences.drop_first, (1,))
        yield _given(
            "the beginning of the prompt is missing",
            "chat-template",
            Sequences.drop_first,
            range(2, longest + 1),
            "tokens",
        )
        yield _given("prompts are truncated from the left", "truncated", _keep_last, range(1, longest + 1), "tokens")
        yield _given("prompts are truncated from the right", "truncated", _keep_first, range(1, longest + 1), "tokens")
        yield _given(
            "the end of the prompt is missing",
            "chat-template",
            Sequences.drop_prompt_end,
            range(1, longest + 1),
            "tokens",
        )
    if context.bos is not None:
        yield _given("a second first token", "missing-bos", Sequences.prepend, (context.bos,))
        yield _given(
            "more first tokens", "missing-bos", partial(_prepended, context.bos), (2, 3, 4), "tokens", effort=2
        )


def _positions(context: Context) -> Iterator[Change]:
    yield _given("positions restart with the response", "positions-restart", lambda s, _: restart_positions(s))
    yield _given("positions jump where the response begins", "positions-shift", shift_positions, _SHIFTS, "positions")
    widths = tuple(-(-max(context.sequences.prompt, default=1) // m) * m for m in _MULTIPLES)
    yield _given(
        "the response's positions count from the padded prompt",
        "positions-shift",
        _from_width,
        tuple(dict.fromkeys(widths)),
        "width",
    )
    yield _given(
        "the response's positions begin at a multiple", "positions-shift", _from_multiple, _MULTIPLES[1:], "multiple"
    )
    yield _given("all positions are shifted", "positions-shift", _all_shifted, (1, 2, 4, 8, 16, -1), "positions")
    yield _given("positions advance by another step in the response", "positions-shift", _stepped, (2, 3, 0.5), "step")
    yield _given("positions are clamped", "positions-shift", _clamped, (*range(4, 64, 4), 96, 128, 256), "largest")
    yield _padding(context)


def _other_requests(context: Context) -> Iterator[Change]:
    """Prompts of other requests read or seen."""
    yield Change(
        "prompts exchanged between requests",
        "exchanged-requests",
        "inputs",
        lambda c, order: _with(c, _exchanged(c.body.sequences, order)) if len(order) == len(c.body.sequences) else None,
        fit=_other_prompts,
        parameter="order",
        shown=str,
        effort=2,
        whole=True,
    )
    yield Change(
        "prompts see the prompt of a neighbouring request",
        "packed-attention",
        "inputs",
        lambda c, by: c.with_attention(partial(neighbours, by)),
        (1, -1),
        parameter="neighbour",
        whole=True,
    )
    for restart in (True, False):
        words = "restart" if restart else "go on"
        yield Change(
            f"packed sequences see the sequences before them (positions {words})",
            "packed-attention",
            "inputs",
            partial(lambda restart, c, size: _with(c, _packed(c.body.sequences, size, restart)), restart),
            _sizes(len(context.sequences)),
            parameter="sequences",
            whole=True,
        )


def _prompt_tokens(context: Context) -> Iterator[Change]:
    """Tokens inserted, replaced or left out in the prompts."""
    common = _candidates(context)
    yield _given("a token inserted at the end of the prompt", "chat-template", _appended, common, "token")
    yield _given("a token inserted behind the first token", "chat-template", _second, common, "token")
    for name, change, words in (
        ("a token replaced in the prompts", _replaced, "{} by {}"),
        ("a token inserted after each occurrence of another", _inserted_after, "after {}: {}"),
    ):
        yield Change(
            name,
            "chat-template",
            "inputs",
            partial(lambda change, c, v: _with(c, change(c.body.sequences, *v)), change),
            parameter="token",
            shown=partial(lambda words, v: words.format(*v), words),
            fit=partial(_best_pair, common, change),
            effort=2,
        )
    yield Change(
        "tokens inserted in the last turn of the prompt",
        "chat-template",
        "inputs",
        lambda c, v: _with(c, _in_last_turn(c.body.sequences, *v)),
        parameter="tokens",
        shown=lambda v: ", ".join(map(str, v[1])),
        fit=partial(_header, common),
        effort=3,
    )
    yield _given("turns before the last one of a token are missing", "truncated", last_turn, common, "token")
    yield _given("the first turn, up to a token, is missing", "chat-template", _without_first_turn, common, "token")
    yield _given("a token left out of the prompts", "chat-template", _without, common[:_FEW], "token", effort=2)
    yield _given("a token doubled in the prompts", "chat-template", _doubled, common[:_FEW], "token", effort=2)


def spans(context: Context) -> Iterator[Change]:
    """Spans of the prompts left out, each request its own."""
    longest = min(_SPAN, max(context.sequences.prompt, default=1) - 1)
    values = tuple((a, n) for n in range(1, longest) for a in range(1, longest - n))
    yield Change(
        "a span of each prompt is missing",
        "chat-template",
        "inputs",
        lambda c, found: _with(c, _cut_each(c.body.sequences, found)) if len(found) == len(c.body.sequences) else None,
        fit=lambda c, base: _spans(c, base, values),
        parameter="spans",
        whole=True,
        shown=lambda found: ", ".join("none" if not n else f"{a} to {a + n - 1}" for a, n in found),
        effort=2,
    )


def _given(
    name: str,
    cause: str,
    change: Callable[[Sequences, Any], Sequences],
    values: Any = (None,),
    parameter: str = "",
    effort: int = 1,
) -> Change:
    return Change(
        name,
        cause,
        "inputs",
        lambda c, value: _with(c, change(c.body.sequences, value)),
        tuple(values),
        parameter=parameter,
        effort=effort,
        shown=lambda v: v if not isinstance(v, tuple) else f"{v[0]} to {sum(v)}",
    )


def _with(c: Computation, sequences: Sequences) -> Computation:
    return c.with_body(sequences=sequences)


# ---- tokens --------------------------------------------------------------------------------------------------------


def _mapped(s: Sequences, change: Callable[[list[int]], list[int]]) -> Sequences:
    """Changes the prompts and keeps the completions; a prompt that would become empty is kept too."""
    ids, positions, rows, prompt = [], [], [], []
    for old, places, row, count in zip(s.ids, s.positions, s.rows, s.prompt, strict=True):
        before = old[:count].tolist()
        new = change(before) or before
        extra = len(new) - count
        ids.append(torch.cat([torch.tensor(new, dtype=old.dtype), old[count:]]))
        more = torch.arange(1, max(0, extra) + 1).to(places) + places[-1]
        positions.append(torch.cat([places, more])[: len(places) + extra])
        rows.append(row + extra)
        prompt.append(len(new))
    return replace(s, ids=ids, positions=positions, rows=rows, prompt=prompt)


def _keep_last(s: Sequences, count: int) -> Sequences:
    return _mapped(s, lambda p: p[-count:])


def _keep_first(s: Sequences, count: int) -> Sequences:
    return _mapped(s, lambda p: p[:count])


def _appended(s: Sequences, token: int) -> Sequences:
    return _mapped(s, lambda p: [*p, token])


def _second(s: Sequences, token: int) -> Sequences:
    return _mapped(s, lambda p: [*p[:1], token, *p[1:]])


def _replaced(s: Sequences, old: int, new: int) -> Sequences:
    return _mapped(s, lambda p: [new if t == old else t for t in p])


def _without(s: Sequences, token: int) -> Sequences:
    return _mapped(s, lambda p: [t for t in p if t != token])


def last_turn(s: Sequences, token: int) -> Sequences:
    """Prompts without what lies between their first token and the last occurrence of a token."""
    return _mapped(s, lambda p: [*p[:1], *p[max(1, len(p) - 1 - p[::-1].index(token)) :]] if token in p else p)


def _prepended(token: int, s: Sequences, count: int) -> Sequences:
    for _ in range(count):
        s = s.prepend(token)
    return s


def _without_first_turn(s: Sequences, token: int) -> Sequences:
    """Prompts without what lies between their first token and the end of the first turn, such as a system prompt."""
    return _mapped(s, lambda p: [*p[:1], *p[p.index(token, 1) + 1 :]] if token in p[1:-1] else p)


def _doubled(s: Sequences, token: int) -> Sequences:
    return _mapped(s, lambda p: [t for u in p for t in ([u, u] if u == token else [u])])


def _cut_each(s: Sequences, spans: list[tuple[int, int]]) -> Sequences:
    """Each prompt without its span (first token, number of tokens)."""
    each = iter(spans)

    def cut(prompt: list[int]) -> list[int]:
        start, count = next(each)
        return prompt[:start] + prompt[start + count :]

    return _mapped(s, cut)


def _worst_request(context: Context, base: Computation) -> Context:
    return context.part([int(context.residual(context.score(base)).sequences.nan_to_num(-1).argmax())])


def _spans(context: Context, base: Computation, spans: tuple[tuple[int, int], ...]) -> list[tuple[int, int]] | None:
    """The span to leave out of each prompt; None if no span explains half of the worst request."""
    small = _worst_request(context, base)
    cut = lambda c, span: _with(c, _cut_each(c.body.sequences, [span] * len(c.body.sequences)))
    errors = small.errors([cut(small.declared, span) for span in spans])
    if min(errors, default=0.0) > 0.5 * small.error(small.declared):
        return None
    return each_request(context, base, cut, spans, (0, 0))


def _exchanged(s: Sequences, order: list[int]) -> Sequences:
    """The prompt of another request in front of each completion."""
    prompts = iter([s.ids[j][: s.prompt[j]].tolist() for j in order])
    return _mapped(s, lambda _: next(prompts))


def _other_prompts(context: Context, base: Computation) -> list[int] | None:
    count = len(context.sequences)
    rolled = lambda c, by: _with(c, _exchanged(c.body.sequences, [(i + by) % count for i in range(count)]))
    found = each_request(context, base, rolled, range(1, min(count, _CANDIDATES)), 0)
    return None if found is None else [(i + by) % count for i, by in enumerate(found)]


def _candidates(context: Context) -> tuple[int, ...]:
    """Special tokens of the configuration, then the most common tokens."""
    config = context.model.config
    special = [getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "sep")]
    flat = [t for value in special for t in (value if isinstance(value, list) else [value]) if isinstance(t, int)]
    counts = Counter(t for ids in context.sequences.ids for t in ids.tolist())
    return tuple(dict.fromkeys([*flat, *(t for t, _ in counts.most_common(_CANDIDATES))]))


def _best_pair(
    common: tuple[int, ...], change: Callable[[Sequences, int, int], Sequences], context: Context, base: Computation
) -> tuple[int, int] | None:
    """A token of most prompts and the one that replaces or follows it.

    None unless they explain most of the worst request.
    """
    s = base.body.sequences
    inside = Counter(t for ids, n in zip(s.ids, s.prompt, strict=True) for t in set(ids[:n].tolist()))
    old = [t for t, count in inside.most_common(_SEPARATORS) if count >= 0.6 * len(s)]
    small = _worst_request(context, base)

    def best_of(pairs: Iterable[tuple[int, int]]) -> tuple[float, tuple[int, int]]:
        chosen = list(pairs)
        errors = small.errors([_with(small.declared, change(small.sequences, *pair)) for pair in chosen])
        return min(zip(errors, chosen, strict=True), default=(torch.inf, (0, 0)))

    before, every = small.error(small.declared), range(context.model.vocab_size)
    left, best = best_of((a, b) for a in old for b in common[:_FEW])
    if left < 0.8 * before:
        left, best = best_of((best[0], b) for b in (every if len(every) <= _SMALL else common))
    return best if left < 0.5 * before else None


def _inserted_after(s: Sequences, old: int, new: int) -> Sequences:
    return _mapped(s, lambda p: [t for u in p for t in ([u, new] if u == old else [u])])


def _in_last_turn(s: Sequences, header: int | None, tokens: tuple[int, ...]) -> Sequences:
    """Prompts with tokens behind the last one that is `header`, or at their end."""

    def insert(p: list[int]) -> list[int]:
        at = len(p) - p[::-1].index(header) if header in p else len(p)
        return [*p[:at], *tokens, *p[at:]]

    return _mapped(s, insert)


def _header(common: tuple[int, ...], context: Context, base: Computation) -> tuple[int | None, tuple[int, ...]] | None:
    """Up to `_LONGEST` tokens to insert, found from the last one backwards, and the token after which they belong.

    None unless they explain most of the worst request.
    """
    small = _worst_request(context, base)
    before, every = small.error(small.declared), range(context.model.vocab_size)

    def best_of(options: list[tuple[int | None, tuple[int, ...]]]) -> tuple[float, tuple[int | None, tuple[int, ...]]]:
        errors = small.errors([_with(small.declared, _in_last_turn(small.sequences, *each)) for each in options])
        least = min(errors)
        return least, options[errors.index(least)]

    headers = [None, *dict.fromkeys(small.sequences.ids[0][: small.sequences.prompt[0]].tolist()[-_SEPARATORS:])]
    left, (header, tokens) = best_of([(at, (token,)) for at in headers for token in common[: 2 * _FEW]])
    while left < 0.9 * before and len(tokens) < _LONGEST:
        known = every if len(every) <= _SMALL else common
        error, found = best_of([(header, (token, *tokens)) for token in known])
        if error > 0.9 * left:
            break
        left, (header, tokens) = error, found
    return (header, tokens) if left < 0.5 * before else None


def _sizes(count: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(min(size, count) for size in (2, 4, 8, count) if count > 1))


def _packed(s: Sequences, size: int, restart: bool) -> Sequences:
    """Each group of sequences as one sequence, without a mask between them."""
    ids, positions, rows, prompt = [], [], [], []
    for start in range(0, len(s), size):
        group = range(start, min(start + size, len(s)))
        offset = torch.tensor([0, *(len(s.ids[i]) for i in group)]).cumsum(0)
        ids.append(torch.cat([s.ids[i] for i in group]))
        whole = torch.arange(len(ids[-1]))
        positions.append(torch.cat([s.positions[i] for i in group]) if restart else whole)
        rows.append(torch.cat([s.rows[i] + offset[k] for k, i in enumerate(group)]))
        prompt.append(s.prompt[start])
    return replace(s, ids=ids, positions=positions, rows=rows, prompt=prompt)


# ---- positions -----------------------------------------------------------------------------------------------------


def restart_positions(sequences: Sequences) -> Sequences:
    """Positions that restart at zero where the response begins."""
    return _with_response(sequences, lambda positions: positions - positions[:1])


def shift_positions(sequences: Sequences, amount: int) -> Sequences:
    """Positions of the response moved by an amount."""
    return _with_response(sequences, lambda positions: (positions + amount).clamp(min=0))


def _stepped(sequences: Sequences, step: float) -> Sequences:
    return _with_response(sequences, lambda positions: positions[:1] + (positions - positions[:1]) * step)


def _clamped(sequences: Sequences, largest: int) -> Sequences:
    return replace(sequences, positions=[p.clamp(max=largest) for p in sequences.positions])


def _from_width(sequences: Sequences, width: int) -> Sequences:
    return _with_response(sequences, lambda positions: positions - positions[:1] + width)


def _from_multiple(sequences: Sequences, multiple: int) -> Sequences:
    return _with_response(sequences, lambda positions: positions + -positions[:1] % multiple)


def _all_shifted(sequences: Sequences, amount: int) -> Sequences:
    return replace(sequences, positions=[(p + amount).clamp(min=0) for p in sequences.positions])


def _with_response(sequences: Sequences, change: Callable[[Tensor], Tensor]) -> Sequences:
    starts = zip(sequences.positions, sequences.prompt, strict=True)
    return replace(sequences, positions=[torch.cat([p[:n], change(p[n:])]) for p, n in starts])


def scale_positions(sequences: Sequences, factor: float) -> Sequences:
    """Positions divided by a factor, as linear rope scaling does."""
    return replace(sequences, positions=[p.float() / factor for p in sequences.positions])


# ---- padding ---------------------------------------------------------------------------------------------------------


def _padding(context: Context) -> Change:
    """Left padding whose mask is lost, of prompts or of whole sequences, to the longest or to a multiple."""
    s = context.sequences
    widths = {"prompts": max(s.prompt, default=1), "sequences": max(map(len, s.ids), default=1)}
    values = [
        (what, -(-width // multiple) * multiple, place)
        for what, width in widths.items()
        for multiple in _MULTIPLES
        for place in ("counted", 0, 1)
    ]

    def apply(c: Computation, value: tuple[str, int, Any]) -> Computation:
        return _with(c, filled(c.body.sequences, *value, token=context.pad))

    return Change(
        "left padding is attended to",
        "padding-side",
        "inputs",
        apply,
        tuple(dict.fromkeys(values)),
        parameter="width",
        shown=lambda value: value[1],
    )


def filled(s: Sequences, what: str, width: int, place: Any, token: int) -> Sequences:
    """Padding tokens before prompts, or sequences, shorter than a width; at one position, or counted as tokens."""
    extra = [max(0, width - (n if what == "prompts" else len(ids))) for n, ids in zip(s.prompt, s.ids, strict=True)]
    ids = [torch.nn.functional.pad(x, (n, 0), value=token) for x, n in zip(s.ids, extra, strict=True)]
    positions = []
    for old, n in zip(s.positions, extra, strict=True):
        counted = torch.arange(n).to(old) if place == "counted" else torch.full((n,), place).to(old)
        positions.append(torch.cat([counted, old + n if place == "counted" else old]))
    rows = [row + n for row, n in zip(s.rows, extra, strict=True)]
    return replace(
        s, ids=ids, positions=positions, rows=rows, prompt=[n + m for n, m in zip(s.prompt, extra, strict=True)]
    )
