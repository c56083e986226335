"""What the GPU tests share: data, and the comparison of rows alone with the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops.op_checks import rand
from torch import Tensor

from rlkernel.contract import assert_bitwise
from rlkernel.kernels import schedule
from rlkernel.kernels.schedule import ScheduledOp

DEVICE = "cuda"
ROWS = (1, 2, 16, 33, 64, 256, 1000)
Record = Callable[..., None]

low_precision = pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bf16", "fp16"))


def data(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers on the GPU, the same everywhere."""
    return rand(seed, *shape, dtype=dtype).to(DEVICE)


def slices(rows: int) -> list[slice]:
    """Where to cut 1..1000 rows out of a batch: at its start, its end and an odd place."""
    return [slice(at, at + m) for m in ROWS if m <= rows for at in {0, rows - m, min(37, rows - m)}]


def assert_rows_alone(run: Callable[..., Any], batch: tuple[Tensor | None, ...], what: str) -> int:
    """`run` of some rows gives the bits that they have in `run` of the whole batch; returns the number of cases."""
    whole = run(*batch)
    whole = (whole,) if isinstance(whole, Tensor) else tuple(whole)
    rows = next(t.shape[0] for t in batch if t is not None)
    cases = slices(rows)
    for piece in cases:
        some = run(*(None if t is None else t[piece] for t in batch))
        for i, (s, w) in enumerate(zip((some,) if isinstance(some, Tensor) else some, whole, strict=True)):
            assert_bitwise(s, w[piece], f"{what}, rows {piece.start}:{piece.stop} alone, tensor {i}")
    return len(cases)


def faster_schedule(op: ScheduledOp, run: Callable[[], object]) -> str:
    """The one schedule of `op` that `run` runs through, in strict mode; it must have been found faster than the anchor,
    and no other one faster than it."""
    op.forget()
    with schedule.strict():
        run()
        ran = list(op._runs.values())
    assert len(set(ran)) == 1, f"{op.family.op}: {len(ran)} classes ran"
    found = [(key, name) for key, bound in op._bound.items() for name, fn in bound.items() if fn is ran[0]]
    assert len(found) == 1, f"{op.family.op}: the anchor ran, of {op.verdicts()}"
    ((key, name),) = found
    verdict = op._verdicts[key]
    times = {trial.name: trial.ms for trial in verdict.trials if trial.ms is not None}
    assert times[name] == min(times.values()) < verdict.anchor_ms, f"{op.family.op}: {name} ran, {verdict}"
    return name
