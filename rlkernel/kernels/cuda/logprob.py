"""Schedules of logprob for many rows of a large vocabulary on Hopper (logprob_rows_sm90.py).

The anchor, kernels/triton/logprob.py, also computes few rows, small vocabularies and kept sets.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.contract import orders
from rlkernel.kernels.certification import Family, Run, Schedule
from rlkernel.kernels.cuda import driver, logprob_rows_sm90
from rlkernel.kernels.samples import KINDS, NONFINITE, values
from rlkernel.kernels.schedule import ScheduledOp
from rlkernel.kernels.triton import logprob as anchor

MANY = 1024  # rows of the upper class; below, a kernel's prologue and tail matter
TIMED, TIMED_OF_MANY = 512, 4096  # most rows of the timed sample
SAMPLE_BYTES = 1 << 29  # most bytes of the timed logits
RAGGED = 397  # rows that do not divide evenly among the blocks

# ---- shape classes -------------------------------------------------------------------------------


class LogprobShape(NamedTuple):
    """Shape class of logprob. A row's bits depend neither on other rows nor on its index."""

    device: int  # index, -1 for the CPU
    dtype: torch.dtype
    vocab: int
    rows: int  # lower bound: 0, the anchor's ROWS_FROM, or MANY
    dense: bool  # TMA can load the rows if they start at 16-byte addresses
    temperature: bool
    kept: bool


def shape_of(logits: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None) -> LogprobShape:
    tokens, vocab = logits.shape
    row = logits.stride(0)
    dense = logits.stride(1) == 1 and row >= vocab and vocab % 8 == 0 and row % 8 == 0
    rows = next((least for least in (MANY, anchor.ROWS_FROM) if tokens >= least), 0)
    return LogprobShape(
        logits.get_device(), logits.dtype, vocab, rows, dense, inv_temperature is not None, kept is not None
    )  # fmt: skip


def call_key(logits: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None) -> Hashable:
    tokens, vocab = logits.shape
    return (
        vocab, (tokens >= anchor.ROWS_FROM) + (tokens >= MANY), logits.dtype, logits.get_device(),
        inv_temperature is None, kept is None, logits.is_contiguous() or logits.stride(),
    )  # fmt: skip


def rows_of(s: LogprobShape) -> list[int]:
    most = min(TIMED_OF_MANY if s.rows >= MANY else TIMED, SAMPLE_BYTES // (s.dtype.itemsize * s.vocab))
    return [anchor.ROWS_FROM, RAGGED, max(anchor.ROWS_FROM, most)]


def sample(s: LogprobShape, rows: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    device = generator.device
    logits = values(kind, rows, s.vocab, s.dtype, generator)
    if rows == RAGGED:  # strided rows
        logits = torch.nn.functional.pad(logits, (0, 8), value=float("nan"))[:, : s.vocab]
    odd = torch.arange(0, rows, 29, device=device)
    for i, value in enumerate((float("nan"), float("inf"))):
        logits[odd[i::4], (odd[i::4] * 7919) % s.vocab] = value
    logits[odd[2::4]] = float("-inf")
    logits[odd[3::4], : s.vocab // 2] = float("-inf")
    targets = torch.randint(0, s.vocab, (rows,), device=device, generator=generator)
    targets[:3] = torch.tensor([-1, s.vocab, s.vocab - 1], device=device)
    inverse = None
    if s.temperature:
        inverse = 0.5 + torch.rand(rows, dtype=torch.float32, device=device, generator=generator)
    return logits, targets, inverse, None


# ---- schedules -----------------------------------------------------------------------------------


def _rows(setting: logprob_rows_sm90.Setting) -> Schedule[LogprobShape]:
    def supports(s: LogprobShape) -> bool:
        large = s.vocab >= anchor.TILES_FROM * orders.VOCAB_TILE and logprob_rows_sm90.fits(setting, s.vocab)
        plain = s.dtype.itemsize == 2 and s.rows > 0 and s.dense and not s.kept
        return plain and large and driver.on_hopper(s.device)

    def bind(s: LogprobShape) -> Run:
        return logprob_rows_sm90.launcher(s.device, s.dtype, s.vocab, s.temperature, setting)

    return Schedule(f"rows.{setting.warps}x{setting.pieces}", bind, supports)


logprob = ScheduledOp(
    Family(
        op="logprob", anchor=anchor.logprob, shape=shape_of, rows=rows_of, sample=sample, call_key=call_key,
        versions=driver.versions, schedules=tuple(map(_rows, logprob_rows_sm90.SETTINGS)),
        kinds=(*KINDS, NONFINITE),
    )
)  # fmt: skip
