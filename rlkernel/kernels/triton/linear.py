"""linear on GPUs: one fp32 tensor-core chain per chunk of K, chunks added in a balanced binary tree, any tile shape.

Contract: orders.py, `linear`. Tile and split-K change no bit and are chosen from (M, N, K) for speed. Zeros after the
last k leave a chain unchanged, so masked tails change no bit either.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract.orders import DGRAD_CHUNK, DGRAD_WHOLE
from rlkernel.kernels.triton.common import after_previous, cdiv, negative_zeros, on_device, options, pdl
from rlkernel.kernels.triton.linear_grad import ascending
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


@triton.jit
def tree(
    acc, a, b, first, SPAN, row, column, a_at, b_at, a_k, b_k, a_inside, b_inside, LEVELS: tl.constexpr,
    EVEN: tl.constexpr, TMA: tl.constexpr, A_BY_K: tl.constexpr, B_BY_K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Balanced binary tree over 2^LEVELS chunks of SPAN; LEVELS = 0 is one chain that continues acc.

    The loops stay rolled, because the compiler would move all additions of unrolled loops to the end and spill. Partial
    sums start at -0, the identity of fp32 addition.
    """
    if LEVELS == 0:
        total = chain(
            acc, a, b, first, SPAN, row, column, a_at, b_at, a_k, b_k, a_inside, b_inside,
            EVEN, TMA, A_BY_K, B_BY_K, BLOCK_K,
        )  # fmt: skip
    else:
        total = negative_zeros(acc.shape)
        for half in tl.range(0, 2):
            total += tree(
                acc, a, b, first + half * (SPAN << (LEVELS - 1)), SPAN, row, column, a_at, b_at, a_k, b_k,
                a_inside, b_inside, LEVELS - 1, EVEN, TMA, A_BY_K, B_BY_K, BLOCK_K,
            )  # fmt: skip
    return total


@triton.jit(do_not_specialize=["M"])
def gemm_kernel(
    a,  # [M, K]
    b,  # [K, N]
    bias,  # [N]
    start,  # [M, N] fp32: initial value of the chains
    out,  # [splits, M, N]
    M,
    N,
    SPAN,  # k per chunk
    a_row,
    a_k,
    b_k,
    b_col,
    LEVELS: tl.constexpr,  # 2^LEVELS chunks per program
    HAS_BIAS: tl.constexpr,
    HAS_START: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    B_BY_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    tile_m, tile_n = tile_at(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    split = tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row_inside = (row < M - tile_m * BLOCK_M)[:, None]
    column_inside = (column < N - tile_n * BLOCK_N)[None, :]
    corner = tl.cast(tile_m, tl.int64) * BLOCK_M * N + tile_n * BLOCK_N
    at = row[:, None] * N + column[None, :]
    if HAS_START:
        acc = tl.load(start + corner + at, mask=row_inside & column_inside, other=0.0)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = tree(
        acc, corner_of(a, tile_m, a_row, BLOCK_M, TMA), corner_of(b, tile_n, b_col, BLOCK_N, TMA),
        split * (SPAN << LEVELS), SPAN, tile_m * BLOCK_M, tile_n * BLOCK_N,
        row[:, None] * a_row + k[None, :] * a_k, k[:, None] * b_k + column[None, :] * b_col, a_k, b_k,
        row_inside, column_inside, LEVELS, EVEN, TMA, False, B_BY_K, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias + tile_n * BLOCK_N + column[None, :], mask=column_inside, other=0.0).to(tl.float32)
    out += tl.cast(split, tl.int64) * M * N + corner
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=row_inside & column_inside)


@triton.jit
def fold(partials, SIZE, inside, LEVELS: tl.constexpr, BLOCK: tl.constexpr):
    """`tree` over stored partial sums with a stride of SIZE elements."""
    if LEVELS == 0:
        total = tl.load(partials, mask=inside, other=0.0)
    else:
        total = fold(partials, SIZE, inside, LEVELS - 1, BLOCK)
        half = tl.cast(SIZE, tl.int64) << (LEVELS - 1)
        total += fold(partials + half, SIZE, inside, LEVELS - 1, BLOCK)
    return total


@triton.jit
def fold_kernel(
    partials,  # [programs(1) * 2^LEVELS, SIZE] fp32
    bias,  # [N]
    out,  # [programs(1), SIZE]
    SIZE,
    N,
    LEVELS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    total = fold(partials + group * SIZE * (1 << LEVELS) + at, SIZE, inside, LEVELS, BLOCK)
    if HAS_BIAS:
        total += tl.load(bias + at % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + group * SIZE + at, total.to(out.dtype.element_ty), mask=inside)


# ---- launchers -----------------------------------------------------------------------------------


def gemm_tile(m: int, n: int, element_size: int, chunks: int, limit: int) -> Tile:
    """Tile of an [m, n] product of `chunks` chunks: many programs for few rows, large tiles for many rows.

    Each level of the tree keeps one more accumulator in registers. GPUs before Hopper, recognised by `limit` (bytes of
    shared memory), also load operands through registers and so need the smaller tile for fewer chunks.
    """
    if element_size == 4:
        tile = Tile(16, 64, 16, 4, 3) if m <= 16 else Tile(64, 64, 16, 8, 3)
    elif m <= 32:
        rows = 16 if m <= 16 else 32
        # decode is bound by reading the weight, so enough programs must read concurrently
        tile = Tile(rows, 32 if chunks == 1 and n < 128 * 64 else 64, 128 if rows == 16 else 64, 4, 4)
    elif m <= 64:
        tile = Tile(64, 64, 128, 4, 4)
    elif m <= 128:
        tile = Tile(128, 64, 64, 4, 4)
    elif chunks == 1 and limit > 200_000 and cdiv(m, 128) * cdiv(n, 256) >= 128:
        tile = Tile(128, 256, 64, 8, 3)
    elif chunks <= 2 or (chunks <= 4 and limit > 200_000):
        tile = Tile(128, 128, 64, 8, 3)
    else:
        tile = Tile(128, 64, 64, 8, 3)
    programs = cdiv(m, tile.m) * cdiv(n, tile.n)
    split = max(1, chunks // 8)  # at most 8 chunks per program: three pending accumulators
    while split < chunks and programs * split < 128:
        split *= 2
    return tile._replace(split=split)


def gemm(
    a: Tensor,  # [M, K]
    b: Tensor,  # [K, N]
    out: Tensor,  # [M, N] contiguous
    *,
    bias: Tensor | None = None,  # [N]
    start: Tensor | None = None,  # [M, N] fp32 contiguous, may be `out`
    chunks: int = 1,
    tile: Tile | None = None,
) -> Tensor:
    """out = a b (+ bias): the contract's chain and tree in fp32, rounded once to out's dtype.

    Args:
        a, b: strided matrices of one dtype.
        start: initial value of the chain in place of 0; needs chunks = 1.
        chunks: P, divides K.
        tile: for tests and tuning; default by shape.
    """
    (m, k), n = a.shape, b.shape[1]
    if out.numel() == 0:
        return out
    a, b = strided(a), strided(b)
    bias = None if bias is None else bias.contiguous()
    span = k // chunks
    limit = shared_limit(a)
    tile = fit(tile or gemm_tile(m, n, a.element_size(), chunks, limit), span, a.element_size(), limit)
    levels = (chunks // tile.split).bit_length() - 1
    by_k = b.stride(1) == 1  # otherwise b is the transpose of a matrix [N, K] with contiguous rows
    even = span % tile.k == 0
    tma = tile.tma and (even or chunks == 1) and can_use_tma(a, b if by_k else b.t())
    with on_device(a):
        target = out if tile.split == 1 else torch.empty(tile.split, m, n, dtype=torch.float32, device=a.device)
        operands = (a, b)
        if tma:
            box = (tile.k, tile.n) if by_k else (tile.n, tile.k)
            operands = (descriptor(a, tile.m, tile.k), descriptor(b if by_k else b.t(), *box))
        gemm_kernel[(cdiv(m, tile.m) * cdiv(n, tile.n), tile.split)](
            *operands, bias, start, target, m, n, span, a.stride(0), a.stride(1), b.stride(0), b.stride(1),
            LEVELS=levels, HAS_BIAS=bias is not None and tile.split == 1, HAS_START=start is not None,
            EVEN=even, TMA=tma, B_BY_K=by_k, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP=8 * (m > tile.m),
            num_warps=tile.warps, num_stages=tile.stages, **pdl(a), **options(matmul=True),
        )  # fmt: skip
        while target is not out:
            target = fold_partials(target, bias, out)
    return out


def fold_partials(partials: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """One pass over partials [2^n, M, N] that adds up to eight neighbours; the last pass writes `out`."""
    count, size = partials.shape[0], out.numel()
    leaves = min(8, count)
    last = leaves == count
    to = out if last else torch.empty(count // leaves, *out.shape, dtype=torch.float32, device=out.device)
    fold_kernel[(cdiv(size, 512), count // leaves)](
        partials, bias, to, size, out.shape[1],
        LEVELS=leaves.bit_length() - 1, HAS_BIAS=last and bias is not None, BLOCK=512, num_warps=4, **options(),
    )  # fmt: skip
    return to


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, chunks: int, dgrad_chunks: int, out_dtype: torch.dtype | None
) -> Tensor:
    """y [M, N] = x [M, K] weight [N, K]^T + bias [N], in `out_dtype` or x's; the backward uses `dgrad_chunks`."""
    y = torch.empty(x.shape[0], weight.shape[0], dtype=out_dtype or x.dtype, device=x.device)
    return gemm(x, weight.t(), y, bias=bias, chunks=chunks)


def linear_dgrad(dy: Tensor, weight: Tensor, chunks: int) -> Tensor:
    """dx [M, K] = dy [M, N] weight [N, K] in dy's dtype; a long N in one chunk is added in chunks of DGRAD_CHUNK."""
    dx = torch.empty(dy.shape[0], weight.shape[1], dtype=dy.dtype, device=dy.device)
    if chunks == 1 and weight.shape[0] > DGRAD_WHOLE:
        return ascending(dy, weight, dx, DGRAD_CHUNK)
    return gemm(dy, weight, dx, chunks=chunks)
