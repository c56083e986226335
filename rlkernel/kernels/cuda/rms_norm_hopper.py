"""rms_norm's gradients on Hopper in CUDA C++: launches of csrc/cuda/rms_norm_grad_sm90.cu.

cuda/rms_norm.py offers it to certification, as any schedule; what the copy engine cannot read runs the anchor.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from rlkernel.kernels import build
from rlkernel.kernels.cuda import driver
from rlkernel.kernels.cuda.driver import Kernel, compile_cuda, noted
from rlkernel.kernels.triton import common
from rlkernel.kernels.triton import rms_norm as anchor

SOURCE = "rms_norm_grad_sm90.cu"
STAGES = 2  # steps that are in shared memory at a time
LEAST, MOST = 1024, 1 << 14  # least width of a block, more than half of which are channels; and most channels
FIXED_BYTES = 2048  # of shared memory at most, that the source asks for by itself
RESIDENT = {4: 512, 2: 768, 1: 1024}
"""Groups of eight channels that a thread may have, and how many threads of a multiprocessor registers suffice for."""


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
    """Stages, their barriers, the weight, and sums of a leaf."""
    rows = max(1, 2048 // _block(channels))
    return STAGES * rows * (2 + has_dr) * channels * 2 + common.cdiv(8 * STAGES, 16) * 16 + channels * 6


def fits(channels: int, has_dr: bool, groups: int) -> bool:
    """Whether a block of so many channels exists: it has 32 to 1024 threads, and shared memory holds its rows."""
    enough = LEAST // 2 < channels <= MOST and channels % 8 == 0
    held = shared_bytes(channels, has_dr) + FIXED_BYTES
    return enough and 32 <= threads(channels, groups) <= 1024 and held <= driver.SHARED_BYTES


def macros(channels: int, has_dr: bool, groups: int) -> dict[str, int]:
    """The macros of a variant."""
    each = shared_bytes(channels, has_dr) + FIXED_BYTES + 1024  # and what a block of any kernel takes
    resident = max(1, min(RESIDENT[groups] // threads(channels, groups), (228 << 10) // each))
    return {"CHANNELS": channels, "BLOCK": _block(channels), "GROUPS": groups, "HAS_DR": int(has_dr),
            "STAGES": STAGES, "RESIDENT": resident}  # fmt: skip


@functools.cache
def _kernel(device: int, channels: int, has_dr: bool, groups: int) -> Kernel:
    cubin = compile_cuda(build.source_dir() / "cuda" / SOURCE, "90a", macros(channels, has_dr, groups))
    return Kernel(cubin, "rlk_rms_norm_grad", shared_bytes(channels, has_dr))


def launcher(device: int, channels: int, has_dr: bool, groups: int) -> anchor.Gradients:
    """A function with the arguments of the anchor, `triton.rms_norm.gradients`, for bf16 of so many channels.

    Raises:
        BuildError: there is no compiler for the kernel.
    """
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # the device's context exists from here on
        kernel = _kernel(device, channels, has_dr, groups)
    block = threads(channels, groups)

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
            kernel(programs, block, given, early=True)
        return dx, partials

    return noted(gradients, kernel)
