"""attention forward of long prefill on Hopper in CUDA C++: launches of csrc/cuda/attention_prefill_sm90.cu.

cuda/attention.py offers it to certification, as any schedule; what its tiles cannot read runs the anchor.
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
from rlkernel.kernels.triton import attention as anchor
from rlkernel.kernels.triton import common

SOURCE = "attention_prefill_sm90.cu"
HEAD_DIMS = (64, 128)
KEYS, ROWS, STAGES = 64, 128, 4  # of a block of keys, of a tile, blocks of keys in shared memory
THREADS = 384
# So many tiles at most in the longest sequence: heads side by side, so that the longest rows of all come first. With
# more, blocks that run together share the keys of one head.
ACROSS_TILES = 32


def beside_at_most(group: int) -> int:
    """Queries of the longest sequence up to which tiles go through all heads side by side; `group` heads share keys."""
    return ACROSS_TILES * ROWS // group


class Arguments(ctypes.Structure):
    """`struct Arguments` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "cu_q", "lens", "out", "lse", "next")),
        ("q_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in (
            "tiles", "hk", "group", "batch", "room", "split", "across", "tokens", "keys",
        )),
        ("scale_log2e", ctypes.c_float),
    )  # fmt: skip


def shared_bytes(d: int) -> int:
    """Keys and values, queries, the merged splits in fp32, barriers, what is told of two tiles, and alignment."""
    return 2 * STAGES * KEYS * 2 * d + ROWS * 2 * d + ROWS * 4 * d + 8 * (4 * STAGES + 6) + 2 * 24 + 1024


def macros(d: int, half: bool, room: bool, skip: bool) -> dict[str, int]:
    """The macros of a variant."""
    return {"HEAD_DIM": d, "HALF": int(half), "ROOM": int(room), "SKIP": int(skip)}


@functools.cache
def _kernel(device: int, d: int, half: bool, room: bool, skip: bool) -> Kernel:
    cubin = compile_cuda(build.source_dir() / "cuda" / SOURCE, "90a", macros(d, half, room, skip))
    return Kernel(cubin, "rlk_attention_prefill", shared_bytes(d))


def launcher(device: int, dtype: torch.dtype, d: int, room: bool, skip: bool) -> Callable[..., None]:
    """A function with the arguments of the anchor, `triton.attention.prefill`, for keys and values that the copy engine
    can fetch; `skip` leaves out products with 1.

    Raises:
        BuildError: there is no compiler for the kernel.
    """
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # the device's context exists from here on
        kernel = _kernel(device, d, dtype == torch.float16, room, skip)
    most = driver.multiprocessors(device)

    def prefill(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, lens: Tensor, max_q: int, max_k: int, scale: float, split: int,
        room: int, out: Tensor, lse: Tensor,
    ) -> None:  # fmt: skip
        (t, h, _), hk, batch = q.shape, k.shape[1], cu_q.shape[0] - 1
        tiles = common.cdiv(max_q * (h // hk), ROWS)
        count = tiles * hk * batch
        # Queries come 16 bytes at a time, and tiles are numbered in 32 bits.
        if (q.data_ptr() | out.data_ptr()) & 15 or q.stride(0) % 8 or count > anchor.INT32 - most:
            return anchor.prefill(q, k, v, cu_q, lens, max_q, max_k, scale, split, room, out, lse)
        with common.on_device(q):
            taken = torch.zeros(1, dtype=torch.int32, device=q.device)
            arguments = Arguments(
                *(x.data_ptr() for x in (q, cu_q, lens, out, lse, taken)), q.stride(0), tiles, hk, h // hk, batch,
                room, split, hk if max_q <= beside_at_most(h // hk) else 1, t, k.shape[0], scale * common.LOG2E.value,
            )  # fmt: skip
            maps = (tensor_map(x.flatten(1), KEYS, 64) for x in (k, v))
            kernel(min(count, most), THREADS, *maps, arguments)

    return noted(prefill, kernel)
