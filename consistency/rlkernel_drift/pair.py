"""Two capsules with matched sequences, the train side in the order of the rollout's tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlkernel_drift.capsule import Capsule
from rlkernel_drift.statistics import Comparable, owners
from rlkernel_drift.verdict import Coverage


@dataclass(frozen=True)
class Pair:
    """A rollout and a train capsule.

    Attributes:
        matches: (sequence of rollout, sequence of train) in the rollout's order.
        alone: sequences of (rollout, train) without a partner.
        train_token: [T of rollout] the corresponding token of the train side, -1 where the sequence has no partner
            with the same ids.
    """

    rollout: Capsule
    train: Capsule
    matches: list[tuple[int, int]]
    alone: tuple[list[int], list[int]]
    train_token: NDArray[np.int64]

    @property
    def mask(self) -> NDArray[np.bool_]:
        """[T of rollout] tokens that count on both sides."""
        there = self.train_token >= 0
        mask = self.rollout.mask & there
        mask[there] &= self.train.mask[self.train_token[there]]
        return mask

    def from_train(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """A stream of the train side in the rollout's order; NaN without a partner."""
        result = np.full(self.rollout.tokens, np.nan, np.float32)
        there = self.train_token >= 0
        result[there] = values[self.train_token[there]]
        return result

    def compared(self, streams: tuple[str, str] | None = None) -> Comparable | None:
        """The comparable tokens of two streams; None if a side has no log-probabilities."""
        names = streams or self.streams()
        if names is None:
            return None
        return Comparable(self.rollout.logprobs[names[0]], self.from_train(self.train.logprobs[names[1]]), self.mask)

    @property
    def coverage(self) -> Coverage:
        """Sequences and tokens that count on both sides, out of those that count on the larger side."""
        sides = (self.rollout, self.train)
        return Coverage(
            sequences=_counted(self.mask, self.rollout),
            of=max(_counted(side.mask, side) for side in sides),
            tokens=int(self.mask.sum()),
            of_tokens=max(int(side.mask.sum()) for side in sides),
        )

    def streams(self) -> tuple[str, str] | None:
        """The streams to compare, both processed or both raw if both sides have such streams."""
        for values in ("processed", "raw"):
            left, right = _stream(self.rollout, values), _stream(self.train, values)
            if left and right:
                return left, right
        left, right = self.rollout.stream, self.train.stream
        return (left, right) if left and right else None


def _counted(mask: NDArray[np.bool_], capsule: Capsule) -> int:
    """Sequences with a token in the mask."""
    return len(np.unique(owners(capsule.cu_seqlens, np.flatnonzero(mask))))


def _stream(capsule: Capsule, values: str) -> str | None:
    """The side's stream, processed or raw; without temperature and filters the two are equal."""
    sampling = capsule.manifest.sampling
    names = [values]
    if sampling.temperature == 1 and not sampling.filters:
        names = [values, "raw" if values == "processed" else "processed"]
    return next((f"{p}.{v}" for p in capsule.phases for v in names if f"{p}.{v}" in capsule.logprobs), None)


def _numbered(ids: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Each id with its number of earlier occurrences, because completions of one prompt may share an id."""
    seen: Counter[int] = Counter()
    found = []
    for key in ids.tolist():
        found.append((key, seen[key]))
        seen[key] += 1
    return found


def match(rollout: Capsule, train: Capsule) -> Pair:
    """Matches sequences by id (equal ids in their order) if both sides have ids, else by order."""
    a, b = rollout.sequence_ids, train.sequence_ids
    if a is not None and b is not None:
        place = {key: i for i, key in enumerate(_numbered(b))}
        matches = [(i, place[key]) for i, key in enumerate(_numbered(a)) if key in place]
    else:
        matches = [(i, i) for i in range(min(rollout.sequences, train.sequences))]
    left, right = {i for i, _ in matches}, {j for _, j in matches}
    train_token = np.full(rollout.tokens, -1, np.int64)
    for i, j in matches:
        x, y = rollout.sequence(i), train.sequence(j)
        if x.stop - x.start == y.stop - y.start and np.array_equal(rollout.ids[x], train.ids[y]):
            train_token[x] = np.arange(y.start, y.stop)
    alone = (
        [i for i in range(rollout.sequences) if i not in left],
        [j for j in range(train.sequences) if j not in right],
    )
    return Pair(rollout, train, matches, alone, train_token)
