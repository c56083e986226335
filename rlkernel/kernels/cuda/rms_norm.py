"""Schedules of rms_norm's gradients for many wide rows on Hopper (rms_norm_grad_sm90.py).

The anchor, kernels/triton/rms_norm.py, also computes everything else. Certification compares dx and the partial sums of
the weight gradient, which the same kernel folds after either.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.contract import orders
from rlkernel.kernels.certification import Family, Run, Schedule
from rlkernel.kernels.cuda import driver, rms_norm_grad_sm90
from rlkernel.kernels.samples import KINDS, NONFINITE, finite, values
from rlkernel.kernels.schedule import ScheduledOp
from rlkernel.kernels.triton import rms_norm as anchor

FEW, MANY = 1024, orders.WGRAD_TOKENS  # buckets of rows: below FEW, up to MANY, above
EPSILONS = (1e-6, 1e-5, 0.0)

# ---- shape classes -------------------------------------------------------------------------------


class RMSNormShape(NamedTuple):
    """Shape class. A row's dx depends on no other row, and a partial sum only on the rows of its leaf."""

    device: int  # index, -1 for the CPU
    dtype: torch.dtype
    channels: int  # 0: too few rows or channels for a schedule
    has_dr: bool
    rows: int  # lower bound: FEW or MANY + 1; 0 if channels is 0


def shape_of(dy: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> RMSNormShape:
    channels = x.shape[-1]
    rows = x.numel() // channels
    plain = x.dtype == dy.dtype == weight.dtype == torch.bfloat16 == (x if dr is None else dr).dtype
    if rows < FEW or not plain or not rms_norm_grad_sm90.fits(channels, dr is not None, 4):
        return RMSNormShape(x.get_device(), x.dtype, 0, dr is not None, 0)
    return RMSNormShape(x.get_device(), x.dtype, channels, dr is not None, FEW if rows <= MANY else MANY + 1)


def call_key(dy: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> Hashable:
    channels = weight.shape[0]
    rows = x.numel() // channels
    second = None if dr is None else dr.dtype
    return channels, (rows >= FEW) + (rows > MANY), second, x.dtype, dy.dtype, weight.dtype, x.get_device()


def rows_of(s: RMSNormShape) -> list[int]:
    """A partial leaf, pairs without a second leaf, and whole chunks; the last is timed."""
    short = MANY // 2 + 21  # the later leaf of a pair has a few rows
    return [FEW + 7, short, MANY] if s.rows <= MANY else [MANY + 5, MANY + short, 2 * MANY]


def sample(s: RMSNormShape, rows: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    x = values(kind, rows, s.channels, s.dtype, generator)
    dy, dr = (values(finite(kind), rows, s.channels, s.dtype, generator) for _ in range(2))
    weight = values("normal", 1, s.channels, s.dtype, generator)[0]
    eps = EPSILONS[(rows + KINDS.index(kind) if kind in KINDS else rows) % len(EPSILONS)]
    if eps == 0.0:
        x[rows // 3] = 0.0  # 0 / 0
    return dy, dr if s.has_dr else None, x, weight, eps


# ---- schedules -----------------------------------------------------------------------------------


def _hopper(groups: int) -> Schedule[RMSNormShape]:
    def supports(s: RMSNormShape) -> bool:
        return s.channels > 0 and driver.on_hopper(s.device) and rms_norm_grad_sm90.fits(s.channels, s.has_dr, groups)

    def bind(s: RMSNormShape) -> Run:
        return rms_norm_grad_sm90.launcher(s.device, s.channels, s.has_dr, groups)

    return Schedule(f"hopper.{groups}", bind, supports)


gradients = ScheduledOp(
    Family(
        op="rms_norm_grad", anchor=anchor.gradients, shape=shape_of, rows=rows_of, sample=sample, call_key=call_key,
        versions=driver.versions, kinds=(*KINDS, NONFINITE),
        schedules=tuple(map(_hopper, rms_norm_grad_sm90.RESIDENT)),
    )
)  # fmt: skip


def rms_norm_grad(dy: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return anchor.rms_norm_grad(dy, dr, x, weight, eps, gradients.call)


def rms_norm_grad_(grad: Tensor, dy: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return anchor.rms_norm_grad_(grad, dy, dr, x, weight, eps, gradients.call)
