"""linear's input gradient of at most 16 rows on Hopper: one chain over K a column, no step of which waits.

The kernel is csrc/cuda/linear_dgrad_rows_sm90.cu; cuda/linear.py offers it to certification, as any schedule.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from rlkernel.kernels import build
from rlkernel.kernels.cuda import driver
from rlkernel.kernels.cuda.driver import Kernel, compile_cuda, noted, tensor_map
from rlkernel.kernels.triton import common

SOURCE = "linear_dgrad_rows_sm90.cu"
MOST_ROWS = 16
COLUMNS = (16, 32)  # a block may have
PIECE = 256  # k


def stage_bytes(rows: int, columns: int) -> int:
    """Shared memory of a piece of both operands, with two barriers."""
    return 2 * PIECE * (rows + columns) + 16


def stages(rows: int, columns: int) -> int:
    """Pieces that shared memory holds."""
    return driver.SHARED_BYTES // stage_bytes(rows, columns)


@functools.cache
def _kernel(device: int, dtype: torch.dtype, out: torch.dtype, rows: int, columns: int) -> Kernel:
    held = stages(rows, columns)
    macros = {
        "HALF": dtype == torch.float16, "FP32_OUT": out == torch.float32, "ROWS": rows, "COLUMNS": columns,
        "STAGES": held,
    }  # fmt: skip
    cubin = compile_cuda(build.source_dir() / "cuda" / SOURCE, "90a", {name: int(v) for name, v in macros.items()})
    return Kernel(cubin, "rlk_linear_dgrad_rows", held * stage_bytes(rows, columns))


def launcher(
    device: int, dtype: torch.dtype, out: torch.dtype, rows: int, columns: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """(dy [M, K], weight [K, N]) -> dx [M, N] for M from 1 to `rows`; both contiguous at 16-byte addresses, N and K
    multiples of 8. A block has `columns` of dx, one of COLUMNS.

    Raises:
        BuildError: there is no compiler for the kernel.
    """
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # the device's context exists from here on
        kernels = {most: _kernel(device, dtype, out, most, columns) for most in ((8,) if rows <= 8 else (8, 16))}

    def run(dy: Tensor, weight: Tensor) -> Tensor:
        (m, k), n = dy.shape, weight.shape[1]
        most = 8 if m <= 8 else 16
        with common.on_device(dy):
            dx = torch.empty((m, n), dtype=out, device=dy.device)
            maps = tensor_map(dy, most, 64), tensor_map(weight, PIECE, columns, 2 * columns)
            sizes = map(ctypes.c_int, (m, n, k))
            kernels[most](-(-n // columns), 160, *maps, ctypes.c_void_p(dx.data_ptr()), *sizes)
        return dx

    return noted(run, *kernels.values())
