"""Replays each operator of the reference on the recorded inputs, and splices recorded layer outputs into its forward.

An operator's local error is compared with its rounding on the same input: its result in the recorded dtype against a
wider one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from rlkernel_drift.capsule import Capsule, Tensor
from rlkernel_drift.diagnose.context import Context
from rlkernel_drift.scoring.operators import as_torch, forward, replay, spliced

_EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
_WIDE = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}
OUTLIER = 3.0
_MAX_SEQUENCES = 4


@dataclass(frozen=True)
class LocalError:
    """Relative error of an operator replayed on recorded inputs, and its rounding on the same inputs."""

    error: float
    rounding: float

    @property
    def ratio(self) -> float:
        """About 1 for a healthy operator, infinite for one that makes NaN of finite inputs."""
        return self.error / self.rounding


def recorded_sequences(capsule: Capsule) -> list[tuple[int, np.ndarray]]:
    """Sequences of which every token was recorded with values: (number, rows in the recording)."""
    operators = capsule.operators
    values = [t for t in operators.values.values() if t.values.ndim == 2]
    if not values:
        return []
    rows = np.arange(capsule.tokens) if operators.rows is None else operators.rows
    found = []
    for i in range(capsule.sequences):
        part = capsule.sequence(i)
        low, high = np.searchsorted(rows, (part.start, part.stop))
        if high - low == part.stop - part.start:
            found.append((i, np.arange(low, high)))
    return found[:_MAX_SEQUENCES]


def local_errors(context: Context, capsule: Capsule) -> dict[str, LocalError] | None:
    """Local errors of the recorded operators, in their order; None if no sequence was recorded completely."""
    chosen = recorded_sequences(capsule)
    if not chosen:
        return None
    values = {n: t for n, t in capsule.operators.values.items() if t.values.ndim == 2}
    squares: dict[str, list[float]] = {}
    wide = _WIDE[context.dtype]
    with context.model.edited(context.merged, context.dtype), context.model.edited(context.merged, wide):
        for i, rows in chosen:
            part = capsule.sequence(i)
            ids = torch.from_numpy(capsule.ids[part].astype(np.int64))
            positions = torch.from_numpy(capsule.positions[part].astype(np.int64))
            recorded = {n: as_torch(Tensor(t.values[rows], t.dtype)) for n, t in values.items()}
            narrow = replay(context.model.in_dtype(context.dtype), ids, positions, recorded)
            exact = replay(context.model.in_dtype(wide), ids, positions, recorded)
            for name, value in recorded.items():
                if name in narrow:
                    _add(squares.setdefault(name, [0.0] * 3), value, narrow[name].cpu(), exact[name].cpu())
    result = {}
    for name, (error, rounding, norm) in squares.items():
        scale = max(norm, 1e-60)
        least = _EPS[context.dtype] / 2
        result[name] = LocalError((error / scale) ** 0.5, max((rounding / scale) ** 0.5, least))
    return result


def _add(sums: list[float], recorded: torch.Tensor, narrow: torch.Tensor, exact: torch.Tensor) -> None:
    # Where the inputs make the replay NaN as well, the fault is in an earlier operator.
    there = narrow.isfinite() & exact.isfinite()
    wide, narrow, exact = recorded.double()[there], narrow.double()[there], exact.double()[there]
    # The nearer replay counts, because an engine may keep more digits inside an operator than transformers does.
    error = min(float((wide - x).square().sum()) for x in (narrow, exact))
    sums[0] += error if math.isfinite(error) else math.inf
    sums[1] += float((narrow - exact).square().sum())
    sums[2] += float(exact.square().sum())


def splice(context: Context, capsule: Capsule) -> list[float]:
    """Mean |difference| that is left when layer k's output is replaced by the recorded one, for every layer.

    The first entry is the difference without a replacement.

    Args:
        context: of the recorded sequences only, in the order of `recorded_sequences`.
    """
    layers = [n for n in capsule.operators.values if n.startswith("layers.") and n.endswith(".output")]
    rows_of = dict(recorded_sequences(capsule))
    sequences = context.sequences
    numbers = [capsule.place(int(sequences.token[sequences.owner == k][0]))[0] for k in range(len(sequences))]
    model = context.model.in_dtype(context.dtype)
    left = []
    with context.model.edited(context.merged, context.dtype):
        for name in (None, *layers):
            hidden = []
            for k, number in enumerate(numbers):
                ids, positions = sequences.ids[k], sequences.positions[k]
                if name is None:
                    out = forward(model, ids, positions)
                else:
                    tensor = capsule.operators.values[name]
                    output = as_torch(Tensor(tensor.values[rows_of[number]], tensor.dtype))
                    out = spliced(model, ids, positions, name, output)
                hidden.append(out[sequences.rows[k].to(out.device)])
            left.append(float((context.predict(torch.cat(hidden)) - context.target).abs().nanmean()))
    return left
