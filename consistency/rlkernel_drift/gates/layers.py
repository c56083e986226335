"""Gate 7: where does the difference begin? By bits under a bitwise profile, else by accumulated errors as evidence."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rlkernel_drift.capsule import Capsule, Tensor, layer_of
from rlkernel_drift.capsule.fingerprint import row_fingerprints
from rlkernel_drift.gates import first_few, gate, skipped
from rlkernel_drift.knowledge import finding
from rlkernel_drift.pair import Pair
from rlkernel_drift.statistics import tensor_ulps
from rlkernel_drift.verdict import Divergence, Finding, Gate, LayerView


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
        """The common rows of an operator on both sides, as fingerprints if one side has only those."""
        a, b = pair.rollout.operators.values[name], pair.train.operators.values[name]
        a, b = Tensor(a.values[self.rollout], a.dtype), Tensor(b.values[self.train], b.dtype)
        if a.values.ndim != b.values.ndim:
            a, b = (Tensor(row_fingerprints(x.values), "I64") if x.values.ndim == 2 else x for x in (a, b))
        return a, b


def common_rows(pair: Pair) -> Rows | None:
    """Rows and operators that both sides recorded; None if there are none."""
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


def first_divergence(pair: Pair, rows: Rows) -> Divergence | None:
    """Operator, token, element and ulps of the first difference; None if all recorded bits are equal.

    Operators that were recorded in different dtypes are compared by value.
    """
    for name in rows.operators:
        a, b = rows.values(pair, name)
        differs = _differs(a, b)
        wrong = np.atleast_1d(differs.reshape(len(differs), -1).any(axis=1))
        if not wrong.any():
            continue
        row = int(np.argmax(wrong))
        sequence, index = pair.rollout.place(int(rows.token[row]))
        found = Divergence(
            operator=name, layer=layer_of(name), sequence=sequence, index=index, rows=int(wrong.sum()), of=len(wrong)
        )
        return found if differs.ndim == 1 else found.model_copy(update=_element(a, b, differs, row))
    return None


def _differs(a: Tensor, b: Tensor) -> NDArray[np.bool_]:
    if a.dtype == b.dtype:
        unsigned = np.dtype(f"u{a.values.dtype.itemsize}")
        left, right = (np.ascontiguousarray(tensor.values).view(unsigned) for tensor in (a, b))
        return np.not_equal(left, right)
    return np.not_equal(a.float32(), b.float32())


def _element(a: Tensor, b: Tensor, differs: NDArray[np.bool_], row: int) -> dict[str, object]:
    element = int(np.argmax(differs[row]))
    ulps = tensor_ulps(Tensor(a.values[row], a.dtype), Tensor(b.values[row], b.dtype))
    return {
        "element": element,
        "rollout": float(a.float32()[row, element]),
        "train": float(b.float32()[row, element]),
        "ulps": None if ulps is None else int(ulps[element]),
    }


def describe(found: Divergence) -> str:
    """The divergence as a sentence."""
    where = f"{found.operator}, sequence {found.sequence}, token {found.index}"
    if found.element is None:
        return f"first difference: {where} ({found.rows} of {found.of} fingerprints differ)"
    distance = "different dtypes" if found.ulps is None else f"{found.ulps} ulp{'s' if found.ulps != 1 else ''} apart"
    return (
        f"first difference: {where}, element {found.element}: rollout {found.rollout!r}, train {found.train!r}, "
        f"{distance} ({found.rows} of {found.of} rows differ)"
    )


_COLUMNS = 96


def relative_error(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Norm of the difference over the norm of b; 0 where both are zero."""
    scale = float(np.linalg.norm(b.astype(np.float64)))
    error = float(np.linalg.norm(a.astype(np.float64) - b.astype(np.float64)))
    return error / scale if scale > 0 else float(error > 0)


def accumulated_view(pair: Pair, rows: Rows) -> LayerView:
    """Relative errors of all operators with recorded values, not only fingerprints."""
    sides = (pair.rollout.operators.values, pair.train.operators.values)
    names = [name for name in rows.operators if all(side[name].values.ndim == 2 for side in sides)]
    groups = np.array_split(np.arange(len(rows.token)), min(_COLUMNS, len(rows.token)))
    view = LayerView(operators=names, heat_tokens=[int(rows.token[group[0]]) for group in groups])
    for name in names:
        a, b = (tensor.float32() for tensor in rows.values(pair, name))
        view.accumulated.append(relative_error(a, b))
        error = np.linalg.norm(a - b, axis=1)
        scale = np.maximum(np.linalg.norm(b, axis=1), 1e-30)
        with np.errstate(invalid="ignore"):  # infinite on both sides gives NaN, a cell without colour
            cells = [float((error[group] / scale[group]).max()) for group in groups]
        view.heat.append([float(np.log10(cell)) if cell > 0 else None for cell in cells])
    return view


def repeated_operators(pair: Pair) -> list[str]:
    """Layer outputs that equal the previous layer's bit for bit, because one buffer was recorded for all layers."""
    suspects = []
    for side in (pair.rollout, pair.train):
        outputs = [n for n in side.operators.values if n.startswith("layers.") and n.endswith(".output")]
        for before, after in pairwise(outputs):
            if np.array_equal(side.operators.values[before].values, side.operators.values[after].values):
                suspects.append(after)
    return suspects


# ---- first divergence ------------------------------------------------------------------------------------------------


# Relative unit in the last place of each stored dtype: the largest change by one rounding.
_ROUNDING = {"F32": 2.0**-23, "F16": 2.0**-10, "BF16": 2.0**-7}


def layers_gate(pair: Pair, bitwise: bool) -> tuple[Gate, LayerView | None]:
    """Compares recorded operators; fails on a differing bit under a bitwise profile, and under any profile on values
    that are NaN or infinite on one side only.
    """
    rows = common_rows(pair)
    if rows is None:
        return skipped("layers", "no operator was recorded on both sides for the same tokens"), None
    repeated = repeated_operators(pair)
    if repeated:
        message = f"{first_few(repeated)} equal the previous layer bit for bit: one buffer was recorded for all layers"
        return gate("layers", [finding("nothing-compared", message, "warning")], ""), None
    view = accumulated_view(pair, rows)
    view.first = first_divergence(pair, rows)
    broken = _one_side_broken(pair, rows)
    if broken is not None:
        return gate("layers", [broken], ""), view
    if view.first is None:
        return gate("layers", [], f"{len(rows.operators)} operators of {len(rows.token)} tokens have equal bits"), view
    message = describe(view.first)
    if bitwise:
        return gate("layers", [_first(message, pair, rows, view)], ""), view
    words = f"{message}; both sides round, so this is weak evidence; `diagnose --model` replays the layers"
    return gate("layers", [finding("operator", words, "note", operator=view.first.operator)], words), view


def _one_side_broken(pair: Pair, rows: Rows) -> Finding | None:
    """The first operator with values that are finite on one side only, which rounding cannot cause."""
    for name in rows.operators:
        tensors = rows.values(pair, name)
        if any(tensor.dtype == "I64" for tensor in tensors):
            continue
        finite = [np.isfinite(tensor.float32()).reshape(len(rows.token), -1) for tensor in tensors]
        wrong = (finite[0] != finite[1]).any(axis=1)
        if not wrong.any():
            continue
        sequence, index = pair.rollout.place(int(rows.token[np.argmax(wrong)]))
        count = int(wrong.sum())
        side = "rollout" if (finite[1] & ~finite[0]).any() else "train"
        message = (
            f"{name} is NaN or infinite on the {side} side and finite on the other, first at sequence {sequence}, "
            f"token {index} ({count} of {len(wrong)} rows)"
        )
        return finding("not-finite", message, operator=name, sequence=sequence, token=index, rows=count)
    return None


def _first(message: str, pair: Pair, rows: Rows, view: LayerView) -> Finding:
    """What the first difference means: everything recorded before it is equal, so the error is its own."""
    assert view.first is not None
    name = view.first.operator
    if name not in view.operators:
        return finding("operator", message, operator=name)
    error = view.accumulated[view.operators.index(name)] or 0.0
    unit = max(_ROUNDING.get(tensor.dtype, 0.0) for tensor in rows.values(pair, name))
    if error > unit:
        return finding("operator", f"{message}; relative error {error:.2g}", operator=name, error=error)
    words = f"{message}; equal inputs, relative error {error:.2g}: its kernels round differently"
    return finding("kernels", words, operator=name, error=error)
