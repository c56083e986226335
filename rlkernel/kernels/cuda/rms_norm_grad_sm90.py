"""Launcher of csrc/cuda/rms_norm_grad_sm90.cu, rms_norm's gradients on Hopper.

Schedules of cuda/rms_norm.py; inputs that TMA cannot load run the anchor.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from rlkernel.kernels.cuda import driver
from rlkernel.kernels.cuda.driver import load, noted
from rlkernel.kernels.triton import common
from rlkernel.kernels.triton import rms_norm as anchor

SOURCE = "rms_norm_grad_sm90.cu"
STAGES = 2  # steps in shared memory
LEAST, MOST = 1024, 1 << 14  # least block width (more than half of it are channels); most channels
FIXED_BYTES = 2048  # upper bound of the source's static shared memory
RESIDENT = {4: 512, 2: 768, 1: 1024}
"""Groups of eight channels per thread, and the threads per SM for which the registers suffice."""


class Arguments(ctypes.Structure):
    """`struct Arguments` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("dy", "dr", "x", "weight", "dx", "partials")),
        ("tokens", ctypes.c_int64), ("pair", ctypes.c_int), ("eps", ctypes.c_float),
    )  # fmt: skip


def _block(channels: int) -> int:
    return max(LEAST, common.next_power_of_2(channels))


def threads(channels: int, groups: int) -> int:
    return _block(channels) // (8 * groups)


def shared_bytes(channels: int, has_dr: bool) -> int:
    """Stages, their mbarriers, the weight, and sums of a leaf."""
    rows = max(1, 2048 // _block(channels))
    return STAGES * rows * (2 + has_dr) * channels * 2 + common.cdiv(8 * STAGES, 16) * 16 + channels * 6


def fits(channels: int, has_dr: bool, groups: int) -> bool:
    """Whether the kernel takes these channels: a block has 32 to 1024 threads, and its rows fit in shared memory."""
    enough = LEAST // 2 < channels <= MOST and channels % 8 == 0
    held = shared_bytes(channels, has_dr) + FIXED_BYTES
    return enough and 32 <= threads(channels, groups) <= 1024 and held <= driver.SHARED_BYTES


def macros(channels: int, has_dr: bool, groups: int) -> dict[str, int]:
    """The macros of a variant."""
    each = shared_bytes(channels, has_dr) + FIXED_BYTES + 1024  # CUDA reserves 1 KiB per block
    resident, block = max(1, min(RESIDENT[groups] // threads(channels, groups), (228 << 10) // each)), _block(channels)
    return {
        "CHANNELS": channels, "BLOCK": block, "GROUPS": groups, "HAS_DR": has_dr, "STAGES": STAGES, "RESIDENT": resident
    }  # fmt: skip


def launcher(device: int, channels: int, has_dr: bool, groups: int) -> anchor.Gradients:
    """A function with the arguments of the anchor, `triton.rms_norm.gradients`, for bf16 with that many channels."""
    variant, block = macros(channels, has_dr, groups), threads(channels, groups)
    kernel = load(device, SOURCE, "rlk_rms_norm_grad", shared_bytes(channels, has_dr), **variant)

    def gradients(dy: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
        dr = None if dr is None else dr.contiguous()
        second = 0 if dr is None else dr.data_ptr()
        if (dy.data_ptr() | x.data_ptr() | weight.data_ptr() | second) & 15:
            return anchor.gradients(dy, dr, x, weight, eps)
        tokens = x.numel() // channels
        programs, pair = anchor.programs_of(tokens, channels)
        with common.on_device(x):
            dx = torch.empty_like(x)
            partials = torch.empty((programs, channels), dtype=torch.float32, device=x.device)
            given = Arguments(
                dy.data_ptr(), second, x.data_ptr(), weight.data_ptr(), dx.data_ptr(), partials.data_ptr(), tokens,
                pair, eps,
            )  # fmt: skip
            kernel(programs, block, given, pdl=True)
        return dx, partials

    return noted(gradients, kernel)
