"""Shared by the GEMM kernels: tile coordinates, the chain over K, tile sizes, TMA descriptors.

A chain is the contract's order inside a chunk of K (orders.py, `linear`): one fp32 accumulator, k ascending, one matrix
instruction's k at a time. Everything else changes no bit and is chosen for speed.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rlkernel.contract.orders import K_GROUP
from rlkernel.kernels.triton.common import IS_HIP, next_power_of_2

# ---- kernels -------------------------------------------------------------------------------------


@triton.jit
def tile_at(index, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Tile coordinates in bands of GROUP tile rows, column by column, so that concurrent tiles share operands in L2.

    GROUP = 0 means one tile row and skips the divisions, which would delay the first load.
    """
    if GROUP == 0:
        return 0, index
    rows = tl.cdiv(M, BLOCK_M)
    band = GROUP * tl.cdiv(N, BLOCK_N)
    first = index // band * GROUP
    height = min(rows - first, GROUP)
    return first + index % band % height, index % band // height


@triton.jit
def chain(
    acc, a, b, first, SPAN, row, column, a_at, b_at, a_k, b_k, a_inside, b_inside,
    EVEN: tl.constexpr, TMA: tl.constexpr, A_BY_K: tl.constexpr, B_BY_K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Continues acc [BM,BN] over k in [first, first + SPAN), ascending.

    With TMA, a and b are descriptors of [M,K] and [N,K] ([K,M] and [K,N] if A_BY_K and B_BY_K), and `row` and `column`
    are the tile's corner; TMA reads zeros past the matrix. Otherwise a and b are the addresses of the tile's corner at
    k = 0, and a_at [BM,BK], b_at [BK,BN] the offsets of its elements.
    """
    if TMA:
        for k in range(0, SPAN, BLOCK_K):
            if A_BY_K:
                x = a.load([first + k, row]).T
            else:
                x = a.load([row, first + k])
            if B_BY_K:
                y = b.load([first + k, column])
            else:
                y = b.load([column, first + k]).T
            acc = tl.dot(x, y, acc, input_precision="ieee")
    else:
        a += tl.cast(first, tl.int64) * a_k
        b += tl.cast(first, tl.int64) * b_k
        for k in range(0, SPAN, BLOCK_K):
            if EVEN:
                x = tl.load(a + a_at, mask=a_inside, other=0.0)
                y = tl.load(b + b_at, mask=b_inside, other=0.0)
            else:
                left = tl.arange(0, BLOCK_K) < SPAN - k
                x = tl.load(a + a_at, mask=a_inside & left[None, :], other=0.0)
                y = tl.load(b + b_at, mask=b_inside & left[:, None], other=0.0)
            acc = tl.dot(x, y, acc, input_precision="ieee")
            a += tl.cast(a_k, tl.int64) * BLOCK_K
            b += tl.cast(b_k, tl.int64) * BLOCK_K
    return acc


@triton.jit
def corner_of(pointer, index, stride, BLOCK: tl.constexpr, TMA: tl.constexpr):
    """Address of tile `index` along one dimension; with TMA the descriptor itself."""
    if TMA:
        corner = pointer
    else:
        corner = pointer + tl.cast(index, tl.int64) * BLOCK * stride
    return corner


# ---- tiles ---------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """Launch configuration of the GEMM kernels; it changes no bit.

    `m`, `n`, `k`: block sizes. `split`: split-K, the programs per output tile, each with chunks / split chunks. `tma`:
    whether TMA may load the operands.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    split: int = 1
    tma: bool = True


@functools.cache
def _shared_limit(device: int) -> int:
    found = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return int(found) or 101376


def shared_limit(t: Tensor) -> int:
    """Bytes of shared memory that a thread block may use on the tensor's GPU."""
    if IS_HIP or not t.is_cuda:  # a CPU tensor: Triton's interpreter
        return 65536
    return _shared_limit(t.device.index)


def fit(tile: Tile, span: int, element_size: int, limit: int) -> Tile:
    """The tile, with stages and k reduced to fit `limit` bytes of shared memory and a chunk of `span` k."""
    k = min(tile.k, next_power_of_2(span, K_GROUP))
    stages = min(tile.stages, 2) if IS_HIP else tile.stages
    buffers = max(1, stages - 1) if IS_HIP else stages
    while (tile.m + tile.n) * k * element_size * buffers > limit and buffers > 1:
        stages, buffers = stages - 1, buffers - 1
    while (tile.m + tile.n) * k * element_size * buffers > limit and k > K_GROUP:
        k //= 2
    return tile._replace(k=k, stages=stages)


# ---- operands ------------------------------------------------------------------------------------


@functools.cache
def _has_tma(device: int) -> bool:
    return not IS_HIP and torch.cuda.get_device_capability(device) >= (9, 0)


def can_use_tma(*matrices: Tensor) -> bool:
    """Whether TMA can load these matrices: Hopper or later, 16-bit, contiguous aligned rows."""
    return all(
        t.element_size() == 2 and t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.stride(0) >= t.shape[1] > 0
        and t.data_ptr() % 16 == 0 and (not t.is_cuda or _has_tma(t.device.index))
        for t in matrices
    )  # fmt: skip


def strided(t: Tensor) -> Tensor:
    """The matrix, copied unless one of its strides is 1 and all are below 2^23.

    Offsets inside a tile are 32-bit, those of its corner 64-bit.
    """
    return t if 1 in t.stride() and max(t.stride()) < 1 << 23 else t.contiguous()


def descriptor(t: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """TMA descriptor of a matrix for boxes of [rows, columns]."""
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, columns])
