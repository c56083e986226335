"""Which recorded rows of two capsules belong to one token, and the operators that both recorded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlkernel_drift.capsule import Capsule, Tensor
from rlkernel_drift.capsule.fingerprint import row_fingerprints
from rlkernel_drift.pair import Pair


@dataclass(frozen=True)
class Rows:
    """Rows recorded on both sides.

    Attributes:
        token: [N] the rollout's packed token of each.
        rollout, train: [N] row of each in the two recordings.
        operators: names that both sides recorded, in the rollout's order.
    """

    token: NDArray[np.int64]
    rollout: NDArray[np.int64]
    train: NDArray[np.int64]
    operators: list[str]

    def values(self, pair: Pair, name: str) -> tuple[Tensor, Tensor]:
        """The common rows of an operator, on both sides; fingerprints of both where one side has only those."""
        a, b = pair.rollout.operators.values[name], pair.train.operators.values[name]
        a, b = Tensor(a.values[self.rollout], a.dtype), Tensor(b.values[self.train], b.dtype)
        if a.values.ndim != b.values.ndim:
            a, b = (Tensor(row_fingerprints(x.values), "I64") if x.values.ndim == 2 else x for x in (a, b))
        return a, b


def common_rows(pair: Pair) -> Rows | None:
    """Rows and operators that both sides recorded; None where there are none."""
    train = pair.train.operators.values
    names = [name for name, tensor in pair.rollout.operators.values.items() if _same_kind(tensor, train.get(name))]
    if not names:
        return None
    row_of = np.full(pair.train.tokens, -1, np.int64)
    row_of[_recorded(pair.train)] = np.arange(len(_recorded(pair.train)))
    token = _recorded(pair.rollout)
    partner = pair.train_token[token]
    train_row = np.where(partner >= 0, row_of[np.maximum(partner, 0)], -1)
    both = train_row >= 0
    if not both.any():
        return None
    return Rows(token[both], np.flatnonzero(both), train_row[both], names)


def _recorded(capsule: Capsule) -> NDArray[np.int64]:
    rows = capsule.operators.rows
    return np.arange(capsule.tokens) if rows is None else rows


def _same_kind(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and (a.values.ndim != b.values.ndim or a.shape[1:] == b.shape[1:])


def layer_of(operator: str) -> int | None:
    """Number of the layer in an operator's name."""
    parts = operator.split(".")
    return int(parts[1]) if len(parts) > 2 and parts[0] == "layers" and parts[1].isdigit() else None
