"""Products whose chunks of K are added ascending: linear's weight and bias gradients, the input gradient of an LM head.

Contract: orders.py, `linear`. A chunk is a chain from 0, and the chunks are added to the initial value in fp32. One
program computes all chunks of a tile, or, with split-K, one chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract.orders import SUM_TOKENS, WGRAD_TOKENS
from rlkernel.kernels.triton.common import add_partials_, cdiv, negative_zeros, on_device, options
from rlkernel.kernels.triton.matrix import (
    Tile,
    can_use_tma,
    chain,
    corner_of,
    descriptor,
    fit,
    shared_limit,
    strided,
    tile_at,
)

# ---- kernels -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["M", "K"])
def ascending_kernel(
    a,  # [M, K]
    b,  # [K, N]
    start,  # [M, N] fp32, strides of out
    out,  # [splits, M, N]
    M,
    N,
    K,
    SPAN,  # k per chunk; a run-time value, so that the loop inside a chunk is not unrolled
    SHARE,  # k per program: all of K, or SPAN (split-K)
    a_row,
    a_k,
    b_k,
    b_col,
    out_row,
    out_col,
    HAS_START: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    A_BY_K: tl.constexpr,
    B_BY_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One output tile: chunks of SPAN, each a chain from 0, added ascending to start.

    Without start the sum begins at -0, the identity of fp32 addition, so that it equals the first chunk.
    """
    tile_m, tile_n = tile_at(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    split = tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row_inside = (row < M - tile_m * BLOCK_M)[:, None]
    column_inside = (column < N - tile_n * BLOCK_N)[None, :]
    a = corner_of(a, tile_m, a_row, BLOCK_M, TMA)
    b = corner_of(b, tile_n, b_col, BLOCK_N, TMA)
    corner = tl.cast(tile_m, tl.int64) * BLOCK_M * out_row + tl.cast(tile_n, tl.int64) * BLOCK_N * out_col
    a_at = row[:, None] * a_row + k[None, :] * a_k
    b_at = k[:, None] * b_k + column[None, :] * b_col
    at = row[:, None] * out_row + column[None, :] * out_col
    if HAS_START:
        total = tl.load(start + corner + at, mask=row_inside & column_inside, other=0.0)
    else:
        total = negative_zeros((BLOCK_M, BLOCK_N))
    for first in range(split * SHARE, min(K, split * SHARE + SHARE), SPAN):
        total += chain(
            tl.zeros((BLOCK_M, BLOCK_N), tl.float32), a, b, first, min(SPAN, K - first),
            tile_m * BLOCK_M, tile_n * BLOCK_N, a_at, b_at, a_k, b_k, row_inside, column_inside,
            EVEN, TMA, A_BY_K, B_BY_K, BLOCK_K,
        )  # fmt: skip
    out += tl.cast(split, tl.int64) * M * N + corner
    tl.store(out + at, total.to(out.dtype.element_ty), mask=row_inside & column_inside)


@triton.jit(do_not_specialize=["COUNT"])
def ascend_kernel(partials, start, out, COUNT, SIZE, HAS_START: tl.constexpr, BLOCK: tl.constexpr):
    """out [SIZE] = start + partials [COUNT, SIZE], ascending, rounded once: the second pass of `ascending_kernel`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    if HAS_START:
        total = tl.load(start + at, mask=inside, other=0.0)
    else:
        total = negative_zeros((BLOCK,))
    for part in tl.range(0, COUNT, loop_unroll_factor=8):
        total += tl.load(partials + tl.cast(part, tl.int64) * SIZE + at, mask=inside, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def bias_grad_kernel(dy, partials, T, N, dy_row, dy_col, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """partials [chunk, N] = sum of dy [T, N] over the tokens of one chunk, ascending from 0."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chunk = tl.program_id(1)
    inside = column < N
    dy += column.to(tl.int64) * dy_col
    total = tl.zeros((BLOCK,), tl.float32)
    for token in range(chunk * TOKENS, min(T, chunk * TOKENS + TOKENS)):
        total += tl.load(dy + tl.cast(token, tl.int64) * dy_row, mask=inside, other=0.0).to(tl.float32)
    tl.store(partials + tl.cast(chunk, tl.int64) * N + column, total, mask=inside)


# ---- launchers -----------------------------------------------------------------------------------


def ascending_tile(m: int, n: int, element_size: int, chunks: int) -> Tile:
    """Tile of an [m, n] product whose chunks are added ascending; `split` is 1 or `chunks`."""
    if element_size == 4:
        tile = Tile(64, 64, 16, 8, 3)
    elif m <= 16:
        tile = Tile(16, 64, 128, 4, 4)
    elif cdiv(m, 128) * cdiv(n, 128) >= 128:
        tile = Tile(128, 128, 64, 8, 3)
    else:
        tile = Tile(64, 64, 64, 4, 4)
    few = cdiv(m, tile.m) * cdiv(n, tile.n) < 128
    return tile._replace(split=chunks if few else 1)


def ascending(
    a: Tensor,  # [M, K]
    b: Tensor,  # [K, N]
    out: Tensor,  # [M, N]
    span: int,
    *,
    start: Tensor | None = None,  # [M, N] fp32, strides of out, may be `out`
    tile: Tile | None = None,
) -> Tensor:
    """out = start + chains over chunks of `span` k, added ascending in fp32 and rounded once to out's dtype.

    Without start the sum is that of the chains. K is at least 1. Split-K partials that do not fit in memory are avoided
    unless the caller gives the tile.
    """
    (m, k), n, size = a.shape, b.shape[1], a.element_size()
    if out.numel() == 0:
        return out
    a, b = strided(a), strided(b)
    chunks, asked = cdiv(k, span), tile is not None
    tile = fit(tile or ascending_tile(m, n, size, chunks), min(span, k), size, shared_limit(a))
    if not out.is_contiguous():
        tile = tile._replace(split=1)
    a_by_k, b_by_k = a.stride(1) != 1, b.stride(1) == 1
    stored = (a.t() if a_by_k else a, b if b_by_k else b.t())
    tma = tile.tma and (span % tile.k == 0 or chunks == 1) and can_use_tma(*stored)
    with on_device(a):
        target = out
        if tile.split > 1:
            try:
                target = torch.empty(tile.split, m, n, dtype=torch.float32, device=a.device)
            except torch.OutOfMemoryError:
                if asked:  # a schedule chose the tile; its dispatcher then runs the anchor
                    raise
                tile = tile._replace(split=1)
        operands = (a, b)
        if tma:
            operands = (
                descriptor(stored[0], *((tile.k, tile.m) if a_by_k else (tile.m, tile.k))),
                descriptor(stored[1], *((tile.k, tile.n) if b_by_k else (tile.n, tile.k))),
            )
        ascending_kernel[(cdiv(m, tile.m) * cdiv(n, tile.n), tile.split)](
            *operands, start if target is out else None, target, m, n, k, span, k if tile.split == 1 else span,
            a.stride(0), a.stride(1), b.stride(0), b.stride(1), target.stride(-2), target.stride(-1),
            HAS_START=start is not None and target is out, EVEN=span % tile.k == 0 and k % tile.k == 0, TMA=tma,
            A_BY_K=a_by_k, B_BY_K=b_by_k, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP=8 * (m > tile.m),
            num_warps=tile.warps, num_stages=tile.stages, **options(matmul=True),
        )  # fmt: skip
        if target is not out:
            ascend(target, start, out)
    return out


def ascend(partials: Tensor, start: Tensor | None, out: Tensor) -> None:
    """out [M, N] = start + partials [count, M, N] fp32, ascending, rounded once; all contiguous."""
    size = out.numel()
    ascend_kernel[(cdiv(size, 256),)](
        partials, start, out, partials.shape[0], size, HAS_START=start is not None, BLOCK=256, num_warps=4, **options(),
    )  # fmt: skip


def add_dgrad_(running: Tensor, dy: Tensor, weight: Tensor, fresh: bool, span: int) -> None:
    """running [M, K] fp32 += dy [M, N] weight [N, K] in chunks of `span` n; `fresh` overwrites running."""
    ascending(dy, weight, running, span, start=None if fresh else running)


def wgrad_(grad: Tensor, dy: Tensor, x: Tensor, fresh: bool, tokens: int = WGRAD_TOKENS) -> None:
    """grad [N, K] fp32 += dy [T, N]^T x [T, K] in chunks of `tokens`; `fresh` overwrites a grad of any dtype."""
    if dy.shape[0] > 0:
        ascending(dy.t(), x, grad, tokens, start=None if fresh else grad)
    elif fresh:
        grad.zero_()


def linear_wgrad_(grad: Tensor, dy: Tensor, x: Tensor) -> None:
    wgrad_(grad, dy, x, False)


def linear_wgrad(dy: Tensor, x: Tensor) -> Tensor:
    grad = torch.empty(dy.shape[1], x.shape[1], dtype=dy.dtype, device=dy.device)
    wgrad_(grad, dy, x, True)
    return grad


def bias_grad_(grad: Tensor, dy: Tensor) -> None:
    """grad [N] fp32 += the sum of dy [T, N] over the tokens, in chunks of SUM_TOKENS added ascending."""
    tokens, n = dy.shape
    if dy.numel() == 0:
        return
    segments = cdiv(tokens, SUM_TOKENS)
    partials = torch.empty(segments, n, dtype=torch.float32, device=dy.device)
    with on_device(dy):
        bias_grad_kernel[(cdiv(n, 128), segments)](
            dy, partials, tokens, n, dy.stride(0), dy.stride(1),
            TOKENS=SUM_TOKENS, BLOCK=128, num_warps=4, **options(),
        )  # fmt: skip
        add_partials_(grad, partials)
