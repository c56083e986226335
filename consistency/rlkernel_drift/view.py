"""Tokens for the report: the worst ones, complete sequences, a scatter sample, a histogram; all bounded."""

from __future__ import annotations

import numpy as np

from rlkernel_drift.capsule import SpanKind
from rlkernel_drift.gates.statistics import position_profile
from rlkernel_drift.pair import Pair
from rlkernel_drift.statistics import Comparable, owners
from rlkernel_drift.verdict import Histogram, Token, TokenView

WORST = 50
STRIP_SEQUENCES = 4
STRIP_TOKENS = 400
SCATTER = 2000


def token_view(pair: Pair, compared: Comparable) -> TokenView:
    """The view of a comparison."""
    if not len(compared.d):
        return TokenView()
    size = np.abs(compared.d)
    worst = np.argsort(-size, kind="stable")[:WORST]
    difference = np.full(pair.rollout.tokens, np.nan)
    difference[compared.index] = compared.d
    train = np.full(pair.rollout.tokens, np.nan)
    train[compared.index] = compared.t
    make = lambda token: _token(pair, int(token), compared, difference, train)
    owner = owners(pair.rollout.cu_seqlens, compared.index[worst])
    sequences = list(dict.fromkeys(int(i) for i in owner))[:STRIP_SEQUENCES]
    strips = [[make(t) for t in _window(pair, i, compared.index[worst], owner)] for i in sequences]
    step = max(1, len(compared.d) // SCATTER)
    limit = float(np.quantile(size, 0.999)) or float(size.max()) or 1e-6
    counts, edges = np.histogram(np.clip(compared.d, -limit, limit), bins=81, range=(-limit, limit))
    return TokenView(
        worst=[make(compared.index[i]) for i in worst if size[i] > 0],
        strip=strips,
        scatter=[(float(r), float(t)) for r, t in zip(compared.r[::step], compared.t[::step], strict=True)],
        signed=Histogram(edges=edges.tolist(), counts=counts.tolist()),
        by_position=position_profile(pair, compared),
    )


def _window(pair: Pair, sequence: int, worst: np.ndarray, owner: np.ndarray) -> range:
    """The tokens of a sequence, or those around its worst one if the sequence is too long."""
    tokens = pair.rollout.sequence(sequence)
    if tokens.stop - tokens.start <= STRIP_TOKENS:
        return range(tokens.start, tokens.stop)
    centre = int(worst[owner == sequence][0])
    begin = min(max(tokens.start, centre - STRIP_TOKENS // 2), tokens.stop - STRIP_TOKENS)
    return range(begin, begin + STRIP_TOKENS)


def _token(pair: Pair, token: int, compared: Comparable, difference: np.ndarray, train: np.ndarray) -> Token:
    sequence, index = pair.rollout.place(token)
    identity = int(pair.rollout.ids[token])
    text = pair.rollout.text(identity)
    return Token(
        sequence=sequence,
        index=index,
        position=int(pair.rollout.positions[token]),
        id=identity,
        text=text if text is not None else pair.train.text(identity),
        rollout=_number(compared.rollout[token]),
        train=_number(train[token]),
        difference=_number(difference[token]),
        span=_span(pair, sequence, index),
    )


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _span(pair: Pair, sequence: int, index: int) -> str:
    spans = pair.rollout.spans
    if spans is None:
        return ""
    mine = spans[(spans[:, 0] == sequence) & (spans[:, 1] <= index) & (index < spans[:, 2])]
    return SpanKind(int(mine[0, 3])).name.lower() if len(mine) else ""
