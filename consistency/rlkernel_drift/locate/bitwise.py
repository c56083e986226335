"""First divergence in bitwise mode: the first operator, in the order of computation, with a bit that differs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlkernel_drift.capsule import Tensor
from rlkernel_drift.locate.rows import Rows, layer_of
from rlkernel_drift.pair import Pair
from rlkernel_drift.statistics import tensor_ulps
from rlkernel_drift.verdict import Divergence


def first_divergence(pair: Pair, rows: Rows) -> Divergence | None:
    """Operator, token, element and ulps of the first difference; None where all recorded bits are equal.

    Operators of different dtypes, and those recorded in part on one side only, are compared by their values.
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
            operator=name,
            layer=layer_of(name),
            sequence=sequence,
            index=index,
            rows=int(wrong.sum()),
            of=len(wrong),
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
    """The divergence in one sentence."""
    where = f"{found.operator}, sequence {found.sequence}, token {found.index}"
    if found.element is None:
        return f"first difference: {where} ({found.rows} of {found.of} fingerprints differ)"
    apart = "other dtypes" if found.ulps is None else f"{found.ulps} ulp{'s' if found.ulps != 1 else ''} apart"
    return (
        f"first difference: {where}, element {found.element}: rollout {found.rollout!r}, train {found.train!r}, "
        f"{apart} ({found.rows} of {found.of} rows differ)"
    )
