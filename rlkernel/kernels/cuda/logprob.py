"""logprob on CUDA: many rows of a large vocabulary by a kernel of Hopper's, where it has the Triton kernel's bits.

The anchor is that of kernels/triton/logprob.py, which also computes few rows, small vocabularies and kept sets; here
are the schedules that may take its place (cuda/logprob_rows.py) and their certification.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.contract import orders
from rlkernel.kernels.certification import Family, Run, Schedule
from rlkernel.kernels.cuda import driver, logprob_rows
from rlkernel.kernels.samples import KINDS, NONFINITE, values
from rlkernel.kernels.schedule import ScheduledOp
from rlkernel.kernels.triton import logprob as anchor

MANY = 1024  # rows, from which on a class is another: below it a kernel's start and end count
TIMED, TIMED_OF_MANY = 512, 4096  # rows, at most
SAMPLE_BYTES = 1 << 29  # of the logits that are timed, at most
RAGGED = 397  # rows that leave some for all blocks to share

# ---- shape classes -------------------------------------------------------------------------------


class Shape(NamedTuple):
    """Shape class of logprob. A row's bits know neither the others nor its place."""

    device: int  # index, -1 for the CPU
    dtype: torch.dtype
    vocab: int
    rows: int  # at least so many: 0, the anchor's ROWS_FROM, or MANY
    dense: bool  # TMA can load the rows, if they begin at 16-byte addresses
    temperature: bool
    kept: bool


def shape_of(logits: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None) -> Shape:
    tokens, vocab = logits.shape
    row = logits.stride(0)
    dense = logits.stride(1) == 1 and row >= vocab and vocab % 8 == 0 and row % 8 == 0
    rows = next((least for least in (MANY, anchor.ROWS_FROM) if tokens >= least), 0)
    return Shape(
        logits.get_device(), logits.dtype, vocab, rows, dense, inv_temperature is not None, kept is not None
    )  # fmt: skip


def call_key(logits: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None) -> Hashable:
    tokens, vocab = logits.shape
    return (
        vocab, (tokens >= anchor.ROWS_FROM) + (tokens >= MANY), logits.dtype, logits.get_device(),
        inv_temperature is None, kept is None, logits.is_contiguous() or logits.stride(),
    )  # fmt: skip


def rows_of(s: Shape) -> list[int]:
    most = min(TIMED_OF_MANY if s.rows >= MANY else TIMED, SAMPLE_BYTES // (s.dtype.itemsize * s.vocab))
    return [anchor.ROWS_FROM, RAGGED, max(anchor.ROWS_FROM, most)]


def sample(s: Shape, rows: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    device = generator.device
    logits = values(kind, rows, s.vocab, s.dtype, generator)
    if rows == RAGGED:  # with a gap between rows
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


def _rows(setting: logprob_rows.Setting) -> Schedule[Shape]:
    def supports(s: Shape) -> bool:
        if not driver.on_hopper(s.device):
            return False
        large = s.vocab >= anchor.TILES_FROM * orders.VOCAB_TILE
        return s.dtype.itemsize == 2 and s.rows > 0 and s.dense and large and not s.kept and logprob_rows.fits(
            setting, s.vocab
        )  # fmt: skip

    def bind(s: Shape) -> Run:
        return logprob_rows.launcher(s.device, s.dtype, s.vocab, s.temperature, setting)

    return Schedule(f"rows.{setting.warps}x{setting.pieces}", bind, supports)


logprob = ScheduledOp(
    Family(
        op="logprob", anchor=anchor.logprob, shape=shape_of, rows=rows_of, sample=sample, call_key=call_key,
        versions=lambda: {"cuda compiler": driver.compiler()}, schedules=tuple(map(_rows, logprob_rows.SETTINGS)),
        kinds=(*KINDS, NONFINITE),
    )
)  # fmt: skip
