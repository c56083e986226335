"""Gate 7: where does the difference begin? By bits under a bitwise profile, else by accumulated errors as evidence."""

from __future__ import annotations

import numpy as np

from rlkernel_drift.gates import first_few, gate, skipped
from rlkernel_drift.knowledge import finding
from rlkernel_drift.locate import Rows, accumulated_view, common_rows, describe, first_divergence, repeated_operators
from rlkernel_drift.pair import Pair
from rlkernel_drift.verdict import Finding, Gate, LayerView

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
