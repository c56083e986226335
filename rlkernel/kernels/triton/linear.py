"""linear on GPUs: one fp32 tensor-core chain per chunk of K, chunks in a balanced binary tree, any tile shape.

Contract: orders.py, `linear`. The tile, the split over programs and the row's place in it are free, so they are
chosen from (M, N, K) alone for speed. Zero k-groups are the identity of the chain: masked tails change no bit.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rlkernel.contract.orders import DGRAD_CHUNK, DGRAD_WHOLE, K_GROUP, SUM_TOKENS, WGRAD_TOKENS
from rlkernel.kernels.triton.aot import TARGETS, Variant
from rlkernel.kernels.triton.common import IS_HIP, add_partials_, next_power_of_2, on_device, options

# ---- kernels -------------------------------------------------------------------------------------


@triton.jit
def tile_at(index, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Tile coordinates in bands of GROUP tile rows, walked by column: what runs at one time shares operands in L2.

    GROUP = 0: there is one tile row, and no division delays the first load.
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

    With TMA a and b are descriptors of [M,K] and [N,K] (of [K,M], [K,N] where A_BY_K, B_BY_K), `row` and `column` the
    tile's corner; past the matrix the hardware reads zeros. Else they are the addresses of the tile's corner at k = 0,
    and a_at [BM,BK], b_at [BK,BN] the offsets of its elements from there.
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
def tree(
    acc, a, b, first, SPAN, row, column, a_at, b_at, a_k, b_k, a_inside, b_inside, LEVELS: tl.constexpr,
    EVEN: tl.constexpr, TMA: tl.constexpr, A_BY_K: tl.constexpr, B_BY_K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Balanced binary tree over 2^LEVELS chunks of SPAN; with LEVELS = 0 the one chain, continuing acc.

    The loops have run-time form on purpose: unrolled, the compiler moves all additions to the end and spills. Partial
    sums start at -0, the one identity of fp32 addition.
    """
    if LEVELS == 0:
        total = chain(
            acc, a, b, first, SPAN, row, column, a_at, b_at, a_k, b_k, a_inside, b_inside,
            EVEN, TMA, A_BY_K, B_BY_K, BLOCK_K,
        )  # fmt: skip
    else:
        total = tl.full(acc.shape, -0.0, tl.float32)
        for half in tl.range(0, 2):
            total += tree(
                acc, a, b, first + half * (SPAN << (LEVELS - 1)), SPAN, row, column, a_at, b_at, a_k, b_k,
                a_inside, b_inside, LEVELS - 1, EVEN, TMA, A_BY_K, B_BY_K, BLOCK_K,
            )  # fmt: skip
    return total


@triton.jit
def corner_of(pointer, index, stride, BLOCK: tl.constexpr, TMA: tl.constexpr):
    """Address of tile `index` along one dimension; a descriptor stays itself."""
    if TMA:
        corner = pointer
    else:
        corner = pointer + tl.cast(index, tl.int64) * BLOCK * stride
    return corner


@triton.jit(do_not_specialize=["M"])
def gemm_kernel(
    a,  # [M, K]
    b,  # [K, N]
    bias,  # [N]
    start,  # [M, N] fp32: what the chains continue
    out,  # [splits, M, N]
    M,
    N,
    SPAN,  # k per chunk
    a_row,
    a_k,
    b_k,
    b_col,
    LEVELS: tl.constexpr,  # 2^LEVELS chunks a program
    HAS_BIAS: tl.constexpr,
    HAS_START: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    B_BY_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
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
    """`tree` over stored partial sums that lie SIZE elements apart."""
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


@triton.jit(do_not_specialize=["M", "K"])
def ascending_kernel(
    a,  # [M, K]
    b,  # [K, N]
    start,  # [M, N] fp32, strides of out
    out,  # [splits, M, N]
    M,
    N,
    K,
    SPAN,  # k per chunk; no constant, so that the loop inside a chunk stays a loop
    SHARE,  # k per program(1): all of K, or SPAN
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
    """One tile, owned by this program: chunks of SPAN, each a chain from 0, added ascending onto start.

    Without start the sum begins at -0, the one identity of fp32 addition: the first chunk as it is.
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
        total = tl.full((BLOCK_M, BLOCK_N), -0.0, tl.float32)
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
    """out [SIZE] = start + partials [COUNT, SIZE], ascending, one rounding: the second pass of `ascending_kernel`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    if HAS_START:
        total = tl.load(start + at, mask=inside, other=0.0)
    else:
        total = tl.full((BLOCK,), -0.0, tl.float32)
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


# ---- tiles ---------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """A schedule of the matrix kernels; every one gives the same bits.

    `m`, `n`, `k`: block sizes; `split`: programs that share one output tile, each with chunks / split chunks; `tma`:
    whether the copy engine fetches operands where it can.
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
    """Bytes of shared memory that a block may have on the tensor's GPU."""
    if IS_HIP or not t.is_cuda:  # the CPU is the interpreter's
        return 65536
    return _shared_limit(t.device.index)


def fit(tile: Tile, span: int, element_size: int, limit: int) -> Tile:
    """The tile with as many stages and k as the shared memory and the chunk's length allow."""
    k = min(tile.k, next_power_of_2(span, K_GROUP))
    stages = min(tile.stages, 2) if IS_HIP else tile.stages
    buffers = max(1, stages - 1) if IS_HIP else stages
    while (tile.m + tile.n) * k * element_size * buffers > limit and buffers > 1:
        stages, buffers = stages - 1, buffers - 1
    while (tile.m + tile.n) * k * element_size * buffers > limit and k > K_GROUP:
        k //= 2
    return tile._replace(k=k, stages=stages)


def forward_tile(m: int, n: int, element_size: int, chunks: int, limit: int) -> Tile:
    """Schedule of an [m, n] product of `chunks` chunks: few rows want many programs, many rows want large tiles.

    Each level of the tree keeps one more tile in registers. GPUs before Hopper, told by `limit` (bytes of shared
    memory), also pass their operands through registers and take the smaller tile sooner.
    """
    if element_size == 4:
        tile = Tile(16, 64, 16, 4, 3) if m <= 16 else Tile(64, 64, 16, 8, 3)
    elif m <= 32:
        rows = 16 if m <= 16 else 32
        # A decode step reads the weight once: what counts is that enough programs read at one time.
        tile = Tile(rows, 32 if chunks == 1 and n < 128 * 64 else 64, 128 if rows == 16 else 64, 4, 4)
    elif m <= 64:
        tile = Tile(64, 64, 128, 4, 4)
    elif m <= 128:
        tile = Tile(128, 64, 64, 4, 4)
    elif chunks == 1 and limit > 200_000 and triton.cdiv(m, 128) * triton.cdiv(n, 256) >= 128:
        tile = Tile(128, 256, 64, 8, 3)
    elif chunks <= 2 or (chunks <= 4 and limit > 200_000):
        tile = Tile(128, 128, 64, 8, 3)
    else:
        tile = Tile(128, 64, 64, 8, 3)
    programs = triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n)
    split = max(1, chunks // 8)  # a program keeps at most 8 chunks: three pending tiles
    while split < chunks and programs * split < 128:
        split *= 2
    return tile._replace(split=split)


def ascending_tile(m: int, n: int, element_size: int, chunks: int) -> Tile:
    """Schedule of an [m, n] product whose chunks are added ascending; `split` is 1 or `chunks`."""
    if element_size == 4:
        tile = Tile(64, 64, 16, 8, 3)
    elif m <= 16:
        tile = Tile(16, 64, 128, 4, 4)
    elif triton.cdiv(m, 128) * triton.cdiv(n, 128) >= 128:
        tile = Tile(128, 128, 64, 8, 3)
    else:
        tile = Tile(64, 64, 64, 4, 4)
    few = triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n) < 128
    return tile._replace(split=chunks if few else 1)


@functools.cache
def _has_copy_engine(device: int) -> bool:
    return not IS_HIP and torch.cuda.get_device_capability(device) >= (9, 0)


def can_fetch(*matrices: Tensor) -> bool:
    """Whether the tensor memory accelerator reads these matrices: Hopper or later, 16-bit, dense aligned rows."""
    return all(
        t.element_size() == 2 and t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.stride(0) >= t.shape[1] > 0
        and t.data_ptr() % 16 == 0 and (not t.is_cuda or _has_copy_engine(t.device.index))
        for t in matrices
    )  # fmt: skip


# ---- launchers -----------------------------------------------------------------------------------


def strided(t: Tensor) -> Tensor:
    """The matrix itself where one of its dimensions is dense, else a contiguous copy.

    Strides stay below 2^23: offsets inside a tile are 32-bit, those of its corner 64-bit.
    """
    return t if 1 in t.stride() and max(t.stride()) < 1 << 23 else t.contiguous()


def descriptor(t: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """What the copy engine needs to fetch boxes of [rows, columns] out of a matrix."""
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, columns])


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
    """out = a b (+ bias): the contract's chain and tree, in fp32 until the one rounding to out's dtype.

    Args:
        a, b: strided matrices of one dtype.
        start: values that the chain continues in place of 0; needs chunks = 1.
        chunks: P, divides K.
        tile: a schedule for tests and tuning; default by shape.
    """
    (m, k), n = a.shape, b.shape[1]
    if out.numel() == 0:
        return out
    a, b = strided(a), strided(b)
    bias = None if bias is None else bias.contiguous()
    span = k // chunks
    limit = shared_limit(a)
    tile = fit(tile or forward_tile(m, n, a.element_size(), chunks, limit), span, a.element_size(), limit)
    levels = (chunks // tile.split).bit_length() - 1
    by_k = b.stride(1) == 1  # rows of k; else the transpose of a matrix [N, K] with dense rows
    even = span % tile.k == 0
    tma = tile.tma and (even or chunks == 1) and can_fetch(a, b if by_k else b.t())
    with on_device(a):
        target = out if tile.split == 1 else torch.empty(tile.split, m, n, dtype=torch.float32, device=a.device)
        operands = (a, b)
        if tma:
            box = (tile.k, tile.n) if by_k else (tile.n, tile.k)
            operands = (descriptor(a, tile.m, tile.k), descriptor(b if by_k else b.t(), *box))
        gemm_kernel[(triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n), tile.split)](
            *operands, bias, start, target, m, n, span, a.stride(0), a.stride(1), b.stride(0), b.stride(1),
            LEVELS=levels, HAS_BIAS=bias is not None and tile.split == 1, HAS_START=start is not None,
            EVEN=even, TMA=tma, B_BY_K=by_k, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP=8 * (m > tile.m),
            num_warps=tile.warps, num_stages=tile.stages, **options(matmul=True),
        )  # fmt: skip
        while target is not out:
            target = fold_partials(target, bias, out)
    return out


def fold_partials(partials: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """One pass over partials [2^n, M, N]: eight neighbours become one, the last pass ends in `out`."""
    count, size = partials.shape[0], out.numel()
    leaves = min(8, count)
    last = leaves == count
    to = out if last else torch.empty(count // leaves, *out.shape, dtype=torch.float32, device=out.device)
    fold_kernel[(triton.cdiv(size, 512), count // leaves)](
        partials, bias, to, size, out.shape[1],
        LEVELS=leaves.bit_length() - 1, HAS_BIAS=last and bias is not None, BLOCK=512, num_warps=4, **options(),
    )  # fmt: skip
    return to


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, chunks: int, dgrad_chunks: int, out_dtype: torch.dtype | None
) -> Tensor:
    y = torch.empty(x.shape[0], weight.shape[0], dtype=out_dtype or x.dtype, device=x.device)
    return gemm(x, weight.t(), y, bias=bias, chunks=chunks)


def ascending(
    a: Tensor,  # [M, K]
    b: Tensor,  # [K, N]
    out: Tensor,  # [M, N]
    span: int,
    *,
    start: Tensor | None = None,  # [M, N] fp32, strides of out, may be `out`
    tile: Tile | None = None,
) -> Tensor:
    """out = start + chains over `span` of K each, ascending, in fp32 until the one rounding to out's dtype.

    Without start the first chain is taken as it is. K is at least 1.
    """
    (m, k), n, size = a.shape, b.shape[1], a.element_size()
    if out.numel() == 0:
        return out
    a, b = strided(a), strided(b)
    chunks = triton.cdiv(k, span)
    tile = fit(tile or ascending_tile(m, n, size, chunks), min(span, k), size, shared_limit(a))
    if not out.is_contiguous():
        tile = tile._replace(split=1)
    a_by_k, b_by_k = a.stride(1) != 1, b.stride(1) == 1
    stored = (a.t() if a_by_k else a, b if b_by_k else b.t())
    tma = tile.tma and (span % tile.k == 0 or chunks == 1) and can_fetch(*stored)
    with on_device(a):
        target = out if tile.split == 1 else torch.empty(tile.split, m, n, dtype=torch.float32, device=a.device)
        operands = (a, b)
        if tma:
            operands = (
                descriptor(stored[0], *((tile.k, tile.m) if a_by_k else (tile.m, tile.k))),
                descriptor(stored[1], *((tile.k, tile.n) if b_by_k else (tile.n, tile.k))),
            )
        ascending_kernel[(triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n), tile.split)](
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
    """out [M, N] = start + partials [count, M, N] fp32, ascending, one rounding; all contiguous."""
    size = out.numel()
    ascend_kernel[(triton.cdiv(size, 256),)](
        partials, start, out, partials.shape[0], size, HAS_START=start is not None, BLOCK=256, num_warps=4, **options(),
    )  # fmt: skip


def linear_dgrad(dy: Tensor, weight: Tensor, chunks: int) -> Tensor:
    dx = torch.empty(dy.shape[0], weight.shape[1], dtype=dy.dtype, device=dy.device)
    if chunks == 1 and weight.shape[0] > DGRAD_WHOLE:
        return ascending(dy, weight, dx, DGRAD_CHUNK)
    return gemm(dy, weight, dx, chunks=chunks)


def add_dgrad_(running: Tensor, dy: Tensor, weight: Tensor, fresh: bool) -> None:
    ascending(dy, weight, running, weight.shape[0], start=None if fresh else running)


def wgrad_(grad: Tensor, dy: Tensor, x: Tensor, fresh: bool, tokens: int = WGRAD_TOKENS) -> None:
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
    tokens, n = dy.shape
    if dy.numel() == 0:
        return
    segments = triton.cdiv(tokens, SUM_TOKENS)
    partials = torch.empty(segments, n, dtype=torch.float32, device=dy.device)
    with on_device(dy):
        bias_grad_kernel[(triton.cdiv(n, 128), segments)](
            dy, partials, tokens, n, dy.stride(0), dy.stride(1),
            TOKENS=SUM_TOKENS, BLOCK=128, num_warps=4, **options(),
        )  # fmt: skip
        add_partials_(grad, partials)


# ---- ahead of time -------------------------------------------------------------------------------


def _gemm_variant(
    name: str, kind: str, tile: Tile, chunks: int = 1, bias: bool = False, main: bool = True, tma: bool = False
) -> Variant:
    types: dict[str, Any] = {
        "a": f"*{kind}:16", "b": f"*{kind}:16", "out": f"*{kind}:16", "M": "i32", "N": "i32:16", "SPAN": "i32:16",
        "a_row": "i32:16", "b_col": "i32:16",
    }  # fmt: skip
    constants: dict[str, Any] = {
        "a_k": 1, "b_k": 1, "start": None, "LEVELS": chunks.bit_length() - 1, "HAS_BIAS": bias, "HAS_START": False,
        "EVEN": True, "TMA": tma, "B_BY_K": False,
        "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP": 8 * (tile.m > 64),
    }  # fmt: skip
    (types if bias else constants)["bias"] = f"*{kind}:16" if bias else None
    if tma:
        types |= {"a": f"tensordesc<{kind}[{tile.m},{tile.k}]>", "b": f"tensordesc<{kind}[{tile.n},{tile.k}]>"}
    targets = tuple(t for t in TARGETS if t in ("sm_90", "sm_100") or not tma)
    return Variant(name, gemm_kernel, types, constants, tile.warps, tile.stages, True, main, targets)


def _dgrad_variant(name: str, kind: str, tile: Tile, tma: bool) -> Variant:
    plain = _gemm_variant(name, kind, tile, tma=tma)
    types = {**plain.types, "b_k": "i32:16", "start": "*fp32:16"}
    constants = {n: v for n, v in plain.constants.items() if n not in types}
    constants |= {"b_col": 1, "HAS_START": True, "B_BY_K": True}
    del types["b_col"]
    if tma:
        types["b"] = f"tensordesc<{kind}[{tile.k},{tile.n}]>"
    return replace(plain, types=types, constants=constants)


def _ascending_variant(name: str, kind: str, tile: Tile, tma: bool, wgrad: bool) -> Variant:
    """The weight gradient onto fp32, or the input gradient of a head."""
    types = {
        "a": f"*{kind}:16", "b": f"*{kind}:16", "start": "*fp32:16", "out": "*fp32:16" if wgrad else f"*{kind}:16",
        "M": "i32", "N": "i32:16", "K": "i32", "SPAN": "i32:16", "SHARE": "i32", "b_k": "i32:16", "out_row": "i32:16",
        "a_k" if wgrad else "a_row": "i32:16",
    }  # fmt: skip
    constants: dict[str, Any] = {
        "a_row" if wgrad else "a_k": 1, "b_col": 1, "out_col": 1, "EVEN": not wgrad, "TMA": tma, "HAS_START": wgrad,
        "A_BY_K": wgrad, "B_BY_K": True, "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP": 8,
    }  # fmt: skip
    if not wgrad:
        del types["start"]
        constants["start"] = None
    if tma:
        a = (tile.k, tile.m) if wgrad else (tile.m, tile.k)
        types |= {"a": f"tensordesc<{kind}[{a[0]},{a[1]}]>", "b": f"tensordesc<{kind}[{tile.k},{tile.n}]>"}
    targets = tuple(t for t in TARGETS if t in ("sm_90", "sm_100") or not tma)
    return Variant(name, ascending_kernel, types, constants, tile.warps, tile.stages, True, wgrad or tma, targets)


_SQUARE = Tile(128, 128, 64, 8, 3)
AOT: tuple[Variant, ...] = (
    _gemm_variant("linear m16", "bf16", Tile(16, 64, 128, 4, 4)),
    _gemm_variant("linear m16 tma", "bf16", Tile(16, 64, 128, 4, 4), tma=True),
    _gemm_variant("linear m16 n32", "bf16", Tile(16, 32, 128, 4, 12)),
    _gemm_variant("linear m64 n128 tma", "bf16", Tile(64, 128, 64, 4, 9), tma=True),
    _gemm_variant("linear m128 tree8", "bf16", Tile(128, 64, 64, 8, 3), chunks=8, bias=True),
    _gemm_variant("linear m128 tree4 tma", "bf16", _SQUARE, chunks=4, tma=True),
    _gemm_variant("linear m128 n256 tma", "bf16", Tile(128, 256, 64, 8, 3), tma=True),
    _gemm_variant("linear m128 fp16", "fp16", _SQUARE),
    _gemm_variant("linear fp32", "fp32", Tile(64, 64, 16, 8, 3), main=False),
    _dgrad_variant("linear_dgrad", "bf16", _SQUARE, tma=False),
    _dgrad_variant("linear_dgrad tma", "bf16", _SQUARE, tma=True),
    _dgrad_variant("linear_dgrad m16 n16 tma", "bf16", Tile(16, 16, 512, 1, 4), tma=True),
    _ascending_variant("linear_wgrad", "bf16", _SQUARE, tma=False, wgrad=True),
    _ascending_variant("linear_wgrad tma", "bf16", _SQUARE, tma=True, wgrad=True),
    _ascending_variant("linear_dgrad head", "bf16", _SQUARE, tma=False, wgrad=False),
    _ascending_variant("linear_dgrad head tma", "bf16", _SQUARE, tma=True, wgrad=False),
    Variant(
        "ascend", ascend_kernel, {"partials": "*fp32:16", "out": "*bf16:16", "COUNT": "i32", "SIZE": "i32:16"},
        {"start": None, "HAS_START": False, "BLOCK": 256},
    ),
    Variant(
        "fold", fold_kernel,
        {"partials": "*fp32:16", "bias": "*bf16:16", "out": "*bf16:16", "SIZE": "i32:16", "N": "i32:16"},
        {"LEVELS": 3, "HAS_BIAS": True, "BLOCK": 512},
    ),
    Variant(
        "bias_grad", bias_grad_kernel,
        {"dy": "*bf16:16", "partials": "*fp32:16", "T": "i32", "N": "i32:16", "dy_row": "i32:16"},
        {"dy_col": 1, "TOKENS": SUM_TOKENS, "BLOCK": 128},
    ),
)  # fmt: skip
