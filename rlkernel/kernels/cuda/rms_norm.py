"""rms_norm's gradients on CUDA: many wide rows by a kernel of Hopper's, where it has the Triton kernel's bits.

The anchor is that of kernels/triton/rms_norm.py, which also computes the forward, heads, few rows and dx alone; here
are the schedules that may take its place (cuda/rms_norm_hopper.py) and their certification. What is compared is dx and
the partial sums of the weight's gradient, which one kernel folds behind either.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.contract import orders
from rlkernel.kernels.certification import Family, Run, Schedule
from rlkernel.kernels.cuda import driver, rms_norm_hopper
from rlkernel.kernels.samples import KINDS, NONFINITE, finite, values
from rlkernel.kernels.schedule import ScheduledOp
from rlkernel.kernels.triton import rms_norm as anchor

FEW, MANY = 1024, orders.WGRAD_TOKENS  # rows by which classes differ: fewer than FEW, up to MANY, more
EPSILONS = (1e-6, 1e-5, 0.0)

# ---- shape classes -------------------------------------------------------------------------------


class Shape(NamedTuple):
    """Shape class of rms_norm's gradients. A row's dx knows no other row, and a partial sum those of its leaf."""

    device: int  # index, -1 for the CPU
    dtype: torch.dtype
    channels: int  # 0: no schedule has so few, or rows as few
    has_dr: bool
    rows: int  # at least so many: FEW or MANY + 1; 0 where channels are


def shape_of(dy: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> Shape:
    channels = x.shape[-1]
    rows = x.numel() // channels
    plain = x.dtype == dy.dtype == weight.dtype == torch.bfloat16 == (x if dr is None else dr).dtype
    if rows < FEW or not plain or not rms_norm_hopper.fits(channels, dr is not None, 4):
        return Shape(x.get_device(), x.dtype, 0, dr is not None, 0)
    return Shape(x.get_device(), x.dtype, channels, dr is not None, FEW if rows <= MANY else MANY + 1)


def call_key(dy: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> Hashable:
    channels = weight.shape[0]
    rows = x.numel() // channels
    second = None if dr is None else dr.dtype
    return channels, (rows >= FEW) + (rows > MANY), second, x.dtype, dy.dtype, weight.dtype, x.get_device()


def rows_of(s: Shape) -> list[int]:
    """Leaves short of rows, pairs short of a leaf, and whole chunks; the last is timed."""
    least = s.rows
    short = MANY // 2 + 21  # of a pair's later leaf a few rows
    return [FEW + 7, short, MANY] if least <= MANY else [MANY + 5, MANY + short, 2 * MANY]


def sample(s: Shape, rows: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    x = values(kind, rows, s.channels, s.dtype, generator)
    dy, dr = (values(finite(kind), rows, s.channels, s.dtype, generator) for _ in range(2))
    weight = values("normal", 1, s.channels, s.dtype, generator)[0]
    eps = EPSILONS[(rows + KINDS.index(kind) if kind in KINDS else rows) % len(EPSILONS)]
    if eps == 0.0:
        x[rows // 3] = 0.0  # 0 / 0
    return dy, dr if s.has_dr else None, x, weight, eps


# ---- schedules -----------------------------------------------------------------------------------


def _hopper(groups: int) -> Schedule[Shape]:
    def supports(s: Shape) -> bool:
        return s.channels > 0 and driver.on_hopper(s.device) and rms_norm_hopper.fits(s.channels, s.has_dr, groups)

    def bind(s: Shape) -> Run:
        return rms_norm_hopper.launcher(s.device, s.channels, s.has_dr, groups)

    return Schedule(f"hopper.{groups}", bind, supports)


gradients = ScheduledOp(
    Family(
        op="rms_norm_grad", anchor=anchor.gradients, shape=shape_of, rows=rows_of, sample=sample, call_key=call_key,
        versions=lambda: {"cuda compiler": driver.compiler()}, schedules=tuple(map(_hopper, rms_norm_hopper.RESIDENT)),
        kinds=(*KINDS, NONFINITE),
    )
)  # fmt: skip


def rms_norm_grad(
    dy: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return anchor.rms_norm_grad(dy, dr, x, weight, eps, gradients.call)


def rms_norm_grad_(grad: Tensor, dy: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return anchor.rms_norm_grad_(grad, dy, dr, x, weight, eps, gradients.call)
