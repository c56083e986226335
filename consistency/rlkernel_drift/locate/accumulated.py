"""Accumulated error of every recorded operator: how far apart the sides are by then, for chart and heat map.

It grows from the first layer on and hardly moves at a faulty one; `locate.replay` finds that.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rlkernel_drift.locate.rows import Rows
from rlkernel_drift.pair import Pair
from rlkernel_drift.verdict import LayerView

_COLUMNS = 96


def relative_error(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Norm of the difference over the norm of b; 0 where both are zero."""
    scale = float(np.linalg.norm(b.astype(np.float64)))
    error = float(np.linalg.norm(a.astype(np.float64) - b.astype(np.float64)))
    return error / scale if scale > 0 else float(error > 0)


def accumulated_view(pair: Pair, rows: Rows) -> LayerView:
    """Relative errors of all operators with recorded values; fingerprints have none."""
    sides = (pair.rollout.operators.values, pair.train.operators.values)
    names = [name for name in rows.operators if all(side[name].values.ndim == 2 for side in sides)]
    groups = np.array_split(np.arange(len(rows.token)), min(_COLUMNS, len(rows.token)))
    view = LayerView(operators=names, heat_tokens=[int(rows.token[group[0]]) for group in groups])
    for name in names:
        a, b = (tensor.float32() for tensor in rows.values(pair, name))
        view.accumulated.append(relative_error(a, b))
        error = np.linalg.norm(a - b, axis=1)
        scale = np.maximum(np.linalg.norm(b, axis=1), 1e-30)
        with np.errstate(invalid="ignore"):  # infinite on both sides: a cell without colour
            cells = [float((error[group] / scale[group]).max()) for group in groups]
        view.heat.append([float(np.log10(cell)) if cell > 0 else None for cell in cells])
    return view


def repeated_operators(pair: Pair) -> list[str]:
    """Layer outputs of one side that are bit for bit one another: a recording of one buffer, not of the layers."""
    suspects = []
    for side in (pair.rollout, pair.train):
        outputs = [n for n in side.operators.values if n.startswith("layers.") and n.endswith(".output")]
        for before, after in pairwise(outputs):
            if np.array_equal(side.operators.values[before].values, side.operators.values[after].values):
                suspects.append(after)
    return suspects
