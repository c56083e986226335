"""Gate 3: do tokens, positions, masks and media agree? Shows the first differing span, decoded on both sides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from rlkernel_drift.capsule import Capsule, SpanKind
from rlkernel_drift.gates import gate
from rlkernel_drift.knowledge import finding
from rlkernel_drift.pair import Pair
from rlkernel_drift.statistics import ONE_VALUE, owners
from rlkernel_drift.verdict import Finding, Gate

_CONTEXT = 8  # tokens of a differing span that are shown
_UNLIKELY = -1.8  # log-probability on the other side from which on a zero is a placeholder
_RAISED = 0.02  # nats by which renormalising over kept tokens raises the others
_FAR = 0.3  # nats by which most other tokens differ if the stream is shifted


def tokens_gate(pair: Pair, layout: Sequence[Finding] = ()) -> Gate:
    """Compares ids, positions, masks, templates, tokenizers and media of all matched sequences, after the layout."""
    findings = [*layout, *_models(pair), *_ids(pair), *_positions(pair), *_masks(pair), *_media(pair)]
    findings += _observations(pair)
    same = int((pair.train_token >= 0).sum())
    words = f"{same} tokens of {len(pair.matches)} sequences are equal, and so are their positions and masks"
    return gate("tokens", findings, words)


def _models(pair: Pair) -> list[Finding]:
    a, b = pair.rollout.manifest.model, pair.train.manifest.model
    found = []
    for key, cause, what in (
        ("chat_template", "chat-template", "chat templates"),
        ("tokenizer", "tokens-differ", "tokenizers"),
    ):
        left, right = getattr(a, key), getattr(b, key)
        if left is not None and right is not None and left != right:
            message = f"the two sides have different {what} (digests {left[:12]} and {right[:12]})"
            found.append(finding(cause, message, "warning", rollout=left, train=right))
    return found


# ---- ids -----------------------------------------------------------------------------------------------------------


def _ids(pair: Pair) -> list[Finding]:
    bad = []
    for i, j in pair.matches:
        x, y = pair.rollout.sequence(i), pair.train.sequence(j)
        if pair.train_token[x.start] < 0:
            bad.append((i, pair.rollout.ids[x], pair.train.ids[y]))
    if not bad:
        return []
    causes = [_cause(pair, i, a, b) for i, a, b in bad]
    cause = max(sorted(set(causes)), key=causes.count)
    i, a, b = next(item for item, its in zip(bad, causes, strict=True) if its == cause)
    begin, end_a, end_b = difference_span(a, b)
    where = f"sequence {i}, from token {begin}"
    left, right = _decode(pair.rollout, a, begin, end_a), _decode(pair.train, b, begin, end_b)
    message = (
        f"{len(bad)} of {len(pair.matches)} sequences have different tokens; {where}: rollout {left}, train {right}"
    )
    return [
        finding(
            cause,
            message,
            sequences=len(bad),
            of=len(pair.matches),
            sequence=i,
            token=begin,
            rollout_ids=[int(v) for v in a[begin : min(end_a, begin + _CONTEXT)]],
            train_ids=[int(v) for v in b[begin : min(end_b, begin + _CONTEXT)]],
            rollout_length=len(a),
            train_length=len(b),
        )
    ]


def difference_span(a: np.ndarray, b: np.ndarray) -> tuple[int, int, int]:
    """(first differing token, end of the differing span in a, end in b); the tokens after the spans are equal."""
    n = min(len(a), len(b))
    unequal = np.flatnonzero(a[:n] != b[:n])
    begin = int(unequal[0]) if len(unequal) else n
    tail = min(len(a), len(b)) - begin
    same = a[len(a) - tail :][::-1] == b[len(b) - tail :][::-1] if tail else np.zeros(0, bool)
    common = int(np.argmin(same)) if len(same) and not same.all() else len(same)
    return begin, len(a) - common, len(b) - common


def _cause(pair: Pair, sequence: int, a: np.ndarray, b: np.ndarray) -> str:
    begin, end_a, end_b = difference_span(a, b)
    short, long = (a, b) if len(a) < len(b) else (b, a)
    if 0 < len(long) - len(short) <= 2 and np.array_equal(long[len(long) - len(short) :], short):
        return "missing-bos"
    texts = (_text(pair.rollout, a[begin:end_a]), _text(pair.train, b[begin:end_b]))
    if None not in texts and texts[0] == texts[1]:
        return "retokenised"
    if len(a) != len(b) and (np.array_equal(long[: len(short)], short) or np.array_equal(long[-len(short) :], short)):
        return "truncated"
    prompt = _prompt_length(pair.rollout, sequence)
    if prompt is not None and end_a <= prompt:
        return "chat-template"
    return "tokens-differ"


def _prompt_length(capsule: Capsule, sequence: int) -> int | None:
    if capsule.spans is not None:
        mine = capsule.spans[(capsule.spans[:, 0] == sequence) & (capsule.spans[:, 3] == SpanKind.PROMPT)]
        if len(mine):
            return int(mine[:, 2].max())
    counted = np.flatnonzero(capsule.mask[capsule.sequence(sequence)])
    return int(counted[0]) if len(counted) else None


def _text(capsule: Capsule, ids: np.ndarray) -> str | None:
    pieces = [capsule.text(int(i)) for i in ids]
    return None if None in pieces else "".join(piece for piece in pieces if piece is not None)


def _decode(capsule: Capsule, ids: np.ndarray, begin: int, end: int) -> str:
    shown = ids[begin : min(end, begin + _CONTEXT)]
    text = _text(capsule, shown)
    more = ", ..." if end - begin > _CONTEXT else ""
    numbers = "[" + ", ".join(str(int(v)) for v in shown) + more + "]"
    return numbers if text is None else f"{numbers} {text!r}"


# ---- positions, masks, media ---------------------------------------------------------------------------------------


def _positions(pair: Pair) -> list[Finding]:
    there = pair.train_token >= 0
    gap = np.zeros(pair.rollout.tokens, np.int64)
    gap[there] = pair.train.positions[pair.train_token[there]].astype(np.int64) - pair.rollout.positions[there]
    if not gap.any():
        return []
    owner = owners(pair.rollout.cu_seqlens, np.arange(pair.rollout.tokens))
    steps = np.diff(gap, prepend=gap[:1])
    inside = (steps != 0) & (owner == np.concatenate([owner[:1], owner[:-1]]))
    if not inside.any():
        shift = int(np.abs(gap).max())
        message = f"all positions of a sequence are shifted by one amount (up to {shift}), which changes the result of "
        message += "learned and scaled position embeddings but not of rotary ones"
        return [finding("positions", message, "warning", shift=shift)]
    token = int(np.flatnonzero(inside)[0])
    sequence, index = pair.rollout.place(token)
    mine, other = int(pair.rollout.positions[token]), int(pair.train.positions[pair.train_token[token]])
    restart = min(mine, other) == 0 and index > 0
    message = f"sequence {sequence}, token {index}: position {mine} in the rollout, {other} in training"
    cause = "positions-restart" if restart else "positions-shift"
    count = len(np.unique(owner[inside]))
    return [finding(cause, f"{message} ({count} sequences)", sequence=sequence, token=index, sequences=count)]


def _masks(pair: Pair) -> list[Finding]:
    there = pair.train_token >= 0
    left, right = pair.rollout.mask[there], pair.train.mask[pair.train_token[there]]
    differ = int((left != right).sum())
    if not differ:
        return []
    token = int(np.flatnonzero(there)[np.flatnonzero(left != right)[0]])
    sequence, index = pair.rollout.place(token)
    only = int((left & ~right).sum())
    message = (
        f"{differ} tokens count on one side only ({only} in the rollout), first sequence {sequence}, token {index}"
    )
    return [finding("mask-differs", message, tokens=differ, rollout_only=only, sequence=sequence, token=index)]


def _observations(pair: Pair) -> list[Finding]:
    """Log-probabilities of exactly 0 on one side: placeholders of tokens that the policy did not sample."""
    streams = pair.streams()
    if streams is None:
        return []
    mask = pair.mask
    a, b = pair.rollout.logprobs[streams[0]], pair.from_train(pair.train.logprobs[streams[1]])
    for name, mine, other in (("rollout", a, b), ("train", b, a)):
        zero = mask & (mine == 0)
        dummy = zero & (other < -0.05)
        count = int(dummy.sum())
        # A token alone in its kept set has log-probability 0 too, but is likely on the other side.
        unlikely = count >= 3 and float(np.quantile(other[dummy], 0.25)) < _UNLIKELY
        # Renormalising over kept tokens makes zeros too, and raises the other tokens as well.
        rest = (mine - other)[mask & (mine != 0) & (np.abs(mine - other) > _RAISED)]
        unlikely = unlikely and (len(rest) < 8 or float((rest > 0).mean()) < 0.95)
        # If nearly all are 0, the statistics gate calls the stream a placeholder.
        if unlikely and count >= 0.001 * int(mask.sum()) and int(zero.sum()) <= ONE_VALUE * int(mask.sum()):
            sequence, index = pair.rollout.place(int(np.flatnonzero(dummy)[0]))
            message = f"{count} counted tokens have log-probability exactly 0 on the {name} side, unlikely on the other"
            message += _common(pair.rollout, np.flatnonzero(dummy))
            # Zeros at the ends while most other tokens differ too are the padding of a shift, which the search names.
            clear = mask & (mine != 0) & (np.minimum(mine, other) < -0.05)  # the others are near 0 on both sides
            shifted = clear.sum() >= 8 and float(np.median(np.abs(mine - other)[clear])) > _FAR
            if shifted and _at_ends(pair, mask, zero, dummy):
                continue
            return [finding("observation-tokens", message, tokens=count, sequence=sequence, token=index)]
    return []


def _at_ends(pair: Pair, mask: np.ndarray, zero: np.ndarray, dummy: np.ndarray) -> bool:
    """Whether all placeholders are before the first or after the last nonzero value of their sequences."""
    for i, _ in pair.matches:
        part = pair.rollout.sequence(i)
        values = np.flatnonzero(mask[part] & ~zero[part])
        if len(values) and dummy[part][values[0] : values[-1]].any():
            return False
    return True


def _common(capsule: Capsule, tokens: np.ndarray) -> str:
    """What tokens have in common, in words: their id, or that each is the first of its completion."""
    ids = np.unique(capsule.ids[tokens])
    if len(ids) == 1:
        return f"; each is token id {ids[0]}"
    counted = np.flatnonzero(capsule.mask)
    _, first = np.unique(owners(capsule.cu_seqlens, counted), return_index=True)
    return "; each is the first token of its completion" if np.isin(tokens, counted[first]).all() else ""


def _media(pair: Pair) -> list[Finding]:
    a, b = _media_of(pair.rollout), _media_of(pair.train)
    for i, j in pair.matches:
        left, right = a.get(i, []), b.get(j, [])
        if [digest for *_, digest in left] != [digest for *_, digest in right]:
            swapped = sorted(digest for *_, digest in left) == sorted(digest for *_, digest in right)
            what = "in another order" if swapped else "different"
            message = f"sequence {i}: the media are {what} ({len(left)} in the rollout, {len(right)} in training)"
            bare = next((name for name, side in (("rollout", a), ("train", b)) if not side), None)
            if bare is not None:
                message += f"; the {bare} side names no media"
            return [finding("swapped-media", message, sequence=i, same_set=swapped)]
        if left != right:
            return [_moved(i, *next((m, n) for m, n in zip(left, right, strict=True) if m != n))]
    x, y = _media_spans(pair.rollout), _media_spans(pair.train)
    for i, j in pair.matches if x and y else []:  # spans are optional, so a side may not declare its media
        spans = zip_longest(x.get(i, []), y.get(j, []))
        moved = next(((m, n) for m, n in spans if m != n), None)
        if moved is not None:
            return [_moved(i, *moved)]
    return []


def _moved(sequence: int, left: tuple[Any, ...] | None, right: tuple[Any, ...] | None) -> Finding:
    words = [f"{m[2]} at tokens {m[0]} to {m[1] - 1}" if m else "none" for m in (left, right)]
    message = f"sequence {sequence}: {words[0]} in the rollout, {words[1]} in training"
    return finding("moved-media", message, sequence=sequence)


def _media_of(capsule: Capsule) -> dict[int, list[tuple[Any, ...]]]:
    """(begin, end, kind, digest) of the media of each sequence, in the order of their tokens."""
    return _by_sequence((m.sequence, m.begin, m.end, m.kind, m.digest) for m in capsule.manifest.media)


def _media_spans(capsule: Capsule) -> dict[int, list[tuple[Any, ...]]]:
    """(begin, end, kind) of the media spans of each sequence."""
    spans = [] if capsule.spans is None else capsule.spans.tolist()
    return _by_sequence((i, b, e, SpanKind(kind).name.lower()) for i, b, e, kind in spans if kind >= SpanKind.IMAGE)


def _by_sequence(rows: Iterable[tuple[Any, ...]]) -> dict[int, list[tuple[Any, ...]]]:
    found: dict[int, list[tuple[Any, ...]]] = {}
    for sequence, *row in sorted(rows):
        found.setdefault(sequence, []).append(tuple(row))
    return found
