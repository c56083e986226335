"""Launcher of csrc/cuda/attention_prefill_sm90.cu, attention forward of long prefill on Hopper.

A schedule of cuda/attention.py; inputs that its loads cannot read run the anchor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from rlkernel.kernels.cuda import driver
from rlkernel.kernels.cuda.driver import load, note_code, tensor_map
from rlkernel.kernels.triton import attention as anchor
from rlkernel.kernels.triton import common

SOURCE = "attention_prefill_sm90.cu"
HEAD_DIMS = (64, 128)
KEYS, ROWS, STAGES = 64, 128, 4  # keys per block, rows per tile, key blocks in shared memory
THREADS = 384
# Up to this many tiles in the longest sequence the queue interleaves all heads, so that the longest rows come first.
# With more tiles it goes head by head, so that concurrent blocks share keys in L2.
INTERLEAVED_TILES = 32


def most_interleaved(group: int) -> int:
    """The most queries of the longest sequence with interleaved heads; `group` query heads share a KV head."""
    return INTERLEAVED_TILES * ROWS // group


class Arguments(ctypes.Structure):
    """`struct Arguments` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "cu_q", "lens", "out", "lse", "next")),
        ("q_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in (
            "tiles", "hk", "group", "batch", "capacity", "split", "interleave", "tokens", "keys",
        )),
        ("scale_log2e", ctypes.c_float),
    )  # fmt: skip


def shared_bytes(d: int) -> int:
    """Keys and values, queries, merged splits in fp32, mbarriers, two tile messages, and alignment."""
    return 2 * STAGES * KEYS * 2 * d + ROWS * 2 * d + ROWS * 4 * d + 8 * (4 * STAGES + 6) + 2 * 24 + 1024


def macros(d: int, half: bool, padded: bool, skip: bool) -> dict[str, int]:
    """The macros of a variant."""
    return {"HEAD_DIM": d, "HALF": half, "PADDED": padded, "SKIP": skip}


def launcher(device: int, dtype: torch.dtype, d: int, padded: bool, skip: bool) -> Callable[..., None]:
    """A function with the arguments of the anchor, `triton.attention.prefill`, for keys and values that TMA can load.

    Args:
        padded: keys and values hold a fixed number of keys per sequence.
        skip: rescaling by 1 is skipped.
    """
    kernel = load(
        device, SOURCE, "rlk_attention_prefill", shared_bytes(d), **macros(d, dtype == torch.float16, padded, skip)
    )
    most = driver.multiprocessors(device)

    def prefill(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, lens: Tensor, max_q: int, max_k: int, scale: float, split: int,
        capacity: int, out: Tensor, lse: Tensor,
    ) -> None:  # fmt: skip
        (t, h, _), hk, batch = q.shape, k.shape[1], cu_q.shape[0] - 1
        tiles = common.cdiv(max_q * (h // hk), ROWS)
        count = tiles * hk * batch
        # Queries are loaded 16 bytes at a time, and tiles are numbered in 32 bits.
        if (q.data_ptr() | out.data_ptr()) & 15 or q.stride(0) % 8 or count > anchor.INT32 - most:
            return anchor.prefill(q, k, v, cu_q, lens, max_q, max_k, scale, split, capacity, out, lse)
        with common.on_device(q):
            taken = torch.zeros(1, dtype=torch.int32, device=q.device)
            arguments = Arguments(
                *(x.data_ptr() for x in (q, cu_q, lens, out, lse, taken)), q.stride(0), tiles, hk, h // hk, batch,
                capacity, split, hk if max_q <= most_interleaved(h // hk) else 1, t, k.shape[0],
                scale * common.LOG2E.value,
            )  # fmt: skip
            maps = (tensor_map(x.flatten(1), KEYS, 64) for x in (k, v))
            kernel(min(count, most), THREADS, *maps, arguments)

    return note_code(prefill, kernel)
