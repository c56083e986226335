"""Launcher of csrc/cuda/linear_dgrad_rows_sm90.cu, linear's input gradient of at most 16 rows on Hopper.

A schedule of cuda/linear.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from rlkernel.kernels.cuda import driver
from rlkernel.kernels.cuda.driver import load, noted, tensor_map
from rlkernel.kernels.triton import common
from rlkernel.kernels.triton import linear as anchor

SOURCE = "linear_dgrad_rows_sm90.cu"
MOST_ROWS = 16
COLUMNS = (16, 32)  # per block: the choices
PIECE = 256  # k


def stage_bytes(rows: int, columns: int) -> int:
    """Shared memory of one piece of both operands and two mbarriers."""
    return 2 * PIECE * (rows + columns) + 16


def stages(rows: int, columns: int) -> int:
    """The number of pieces that fit in shared memory."""
    return driver.SHARED_BYTES // stage_bytes(rows, columns)


def macros(half: bool, fp32_out: bool, rows: int, columns: int) -> dict[str, int]:
    """The macros of a variant."""
    return {"HALF": half, "FP32_OUT": fp32_out, "ROWS": rows, "COLUMNS": columns, "STAGES": stages(rows, columns)}


def shared_bytes(rows: int, columns: int) -> int:
    return stages(rows, columns) * stage_bytes(rows, columns)


def launcher(
    device: int, dtype: torch.dtype, out: torch.dtype, rows: int, columns: int
) -> Callable[[Tensor, Tensor, int], Tensor]:
    """A function with the arguments of the anchor, `triton.linear.linear_dgrad`, for M from 1 to `rows`, contiguous
    operands, and N and K multiples of 8. Each block computes `columns` of dx, one of COLUMNS."""
    half, fp32_out = dtype == torch.float16, out == torch.float32
    kernels = {
        most: load(
            device, SOURCE, "rlk_linear_dgrad_rows", shared_bytes(most, columns),
            **macros(half, fp32_out, most, columns),
        )
        for most in ((8,) if rows <= 8 else (8, 16))
    }  # fmt: skip

    def run(dy: Tensor, weight: Tensor, chunks: int) -> Tensor:
        if (dy.data_ptr() | weight.data_ptr()) & 15:
            return anchor.linear_dgrad(dy, weight, chunks)
        (m, k), n = dy.shape, weight.shape[1]
        most = 8 if m <= 8 else 16
        with common.on_device(dy):
            dx = torch.empty((m, n), dtype=out, device=dy.device)
            maps = tensor_map(dy, most, 64), tensor_map(weight, PIECE, columns, 2 * columns)
            sizes = map(ctypes.c_int, (m, n, k))
            kernels[most](-(-n // columns), 160, *maps, ctypes.c_void_p(dx.data_ptr()), *sizes)
        return dx

    return noted(run, *kernels.values())
