"""attention backward on GPUs: one program per query tile for dq, one per key tile for dk and dv; no atomics.

Contract: orders.py, `attention`. Scores are recomputed from the saved log-sum-exp. dq is one ascending chain over the
keys; dk and dv are one ascending chain over the sequence's packed (position, head of the group) rows. `lse2` is the
log-sum-exp in base 2.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rlkernel.kernels.triton.attention_splits import sequence_bounds
from rlkernel.kernels.triton.common import (
    LOG2E,
    aligned,
    cdiv,
    contiguous_heads,
    exp2,
    family,
    next_power_of_2,
    on_device,
    options,
)
from rlkernel.kernels.triton.matrix import can_use_tma

# ---- kernels -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["T"])
def delta_kernel(
    dout,  # [T, H, D]
    out,  # [T, H, D]
    lse,  # [T, H]
    lse2,  # [HK, T * GROUP]
    delta,  # [HK, T * GROUP]
    T,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """delta = sum over d of dout * out, and lse2 from lse, both in the row order of the other kernels."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK_D)
    inside = row < T * GROUP
    both = inside[:, None] & (column < D)[None, :]
    source = row // GROUP * (HK * GROUP) + head * GROUP + row % GROUP
    at = source[:, None] * D + column[None, :]
    x = tl.load(dout + at, mask=both, other=0.0).to(tl.float32)
    y = tl.load(out + at, mask=both, other=0.0).to(tl.float32)
    to = head.to(tl.int64) * T * GROUP + row
    tl.store(delta + to, tl.sum(x * y, 1), mask=inside)
    tl.store(lse2 + to, tl.load(lse + source, mask=inside, other=0.0) * LOG2E, mask=inside)


@triton.jit
def load_tile(base, stride, row, limit, column, D: tl.constexpr, MASKED: tl.constexpr):
    """Rows [BLOCK, BLOCK_D] of a sequence; rows from `limit` on are 0."""
    at = base + row[:, None].to(tl.int64) * stride + column[None, :]
    if MASKED:
        return tl.load(at, mask=(row < limit)[:, None] & (column < D)[None, :], other=0.0)
    if column.shape[0] != D:
        return tl.load(at, mask=(column < D)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def visible(p, at, position, window, HAS_WINDOW: tl.constexpr):
    """p where the row at `position` sees the key `at`, else 0."""
    seen = at <= position
    if HAS_WINDOW:
        seen = seen & (at > position - window)
    return tl.where(seen, p, 0.0)


@triton.jit
def dq_block(dq, q, dout, lse2, delta, source, first, diagonal, keys, position, window, column, scale_log2e,
             D: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, MASKED: tl.constexpr,
             TMA: tl.constexpr):  # fmt: skip
    """Adds the keys [first, first + BLOCK_N) to dq; `diagonal` and MASKED as in the forward's `add_block`."""
    k_box, v_box, k, v, k_stride, v_stride, corner = source
    at = first + tl.arange(0, BLOCK_N)
    if TMA:
        x = k_box.load([corner[0] + first, corner[1]])
        y = v_box.load([corner[0] + first, corner[1]])
        if MASKED:  # memory past the sequence may hold infinities
            x = tl.where((at < keys)[:, None], x, 0.0)
            y = tl.where((at < keys)[:, None], y, 0.0)
    else:
        x = load_tile(k, k_stride, at, keys, column, D, MASKED)
        y = load_tile(v, v_stride, at, keys, column, D, MASKED)
    p = exp2(tl.fma(tl.dot(q, tl.trans(x), input_precision="ieee"), scale_log2e, -lse2[:, None]))
    if HAS_WINDOW or diagonal:
        p = visible(p, at[None, :], position[:, None], window, HAS_WINDOW)
    ds = p * (tl.dot(dout, tl.trans(y), input_precision="ieee") - delta[:, None])
    return tl.dot(ds.to(x.dtype), x, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["T", "S", "window"])
def dq_kernel(
    dout,  # [T, H, D]
    q,  # [T, H, D]
    k_box,  # TMA descriptors of k and v as [S, HK * D] if TMA
    v_box,
    k,  # [S, HK, D]
    v,
    lse2,  # [HK, T * GROUP]
    delta,  # [HK, T * GROUP]
    cu_q,  # [B + 1]
    cu_k,  # [B + 1]
    dq,  # [T, H, D]
    T,
    S,
    q_stride,
    k_stride,
    v_stride,
    window,
    scale_log2e,
    scale,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    TMA: tl.constexpr,
    BRANCH: tl.constexpr,  # as in the forward kernel
    CAUSAL: tl.constexpr,
):
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    q_first, queries = sequence_bounds(cu_q, sequence, T)
    k_first, keys = sequence_bounds(cu_k, sequence, S)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest tiles first
    if tile * BLOCK_M >= queries * GROUP:
        return
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    inside = token < queries
    offset = keys - queries
    position = offset + token
    first_position = offset + tile * BLOCK_M // GROUP
    stop = min(keys, offset + (tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1)
    if not CAUSAL:  # every row sees all keys
        position = keys - 1 + 0 * token
        first_position = keys - 1
        stop = keys
    if HAS_WINDOW:
        start = max(0, first_position - window + 1) // BLOCK_N * BLOCK_N
    else:
        start = 0
    unmasked = (first_position + 1) // BLOCK_N * BLOCK_N  # the causal mask hides no key below it
    if BRANCH:
        middle = max(start, min(stop, keys // BLOCK_N * BLOCK_N))
    else:
        middle = max(start, min(stop, unmasked))
    column = tl.arange(0, BLOCK_D)
    both = inside[:, None] & (column < D)[None, :]
    q += tl.cast(q_first, tl.int64) * q_stride + head * (GROUP * D)
    x = tl.load(q + token[:, None].to(tl.int64) * q_stride + (row % GROUP * D)[:, None] + column[None, :], mask=both,
                other=0.0)  # fmt: skip
    at = (tl.cast(q_first, tl.int64) + token) * (HK * GROUP) + head * GROUP + row % GROUP
    dy = tl.load(dout + (at * D)[:, None] + column[None, :], mask=both, other=0.0)
    from_row = (head.to(tl.int64) * T + q_first) * GROUP + row
    t = tl.load(lse2 + from_row, mask=inside, other=0.0)
    d = tl.load(delta + from_row, mask=inside, other=0.0)
    k += tl.cast(k_first, tl.int64) * k_stride + head * D
    v += tl.cast(k_first, tl.int64) * v_stride + head * D
    source = (k_box, v_box, k, v, k_stride, v_stride, (k_first, head * D))
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for first in tl.range(start, middle, BLOCK_N):
        total = dq_block(total, x, dy, t, d, source, first, BRANCH and first >= unmasked, keys, position, window,
                         column, scale_log2e, D, BLOCK_N, HAS_WINDOW, False, TMA)  # fmt: skip
    if BRANCH:
        if middle < stop:  # the sequence's last, partial block
            total = dq_block(total, x, dy, t, d, source, middle, True, keys, position, window, column, scale_log2e, D,
                             BLOCK_N, HAS_WINDOW, True, TMA)  # fmt: skip
    else:
        for first in tl.range(middle, stop, BLOCK_N):
            total = dq_block(total, x, dy, t, d, source, first, True, keys, position, window, column, scale_log2e, D,
                             BLOCK_N, HAS_WINDOW, True, TMA)  # fmt: skip
    tl.store(dq + (at * D)[:, None] + column[None, :], (total * scale).to(dq.dtype.element_ty), mask=both)


@triton.jit
def dkv_block(dk, dv, k, v, source, first, diagonal, rows, offset, at, window, column, scale_log2e, HK: tl.constexpr,
              GROUP: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr,
              MASKED: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Adds the rows [first, first + BLOCK_N) to dk and dv; MASKED: some rows lie past the sequence's end."""
    q_box, dout_box, q, dout, lse2, delta, q_stride, corner = source
    row = first + tl.arange(0, BLOCK_N)
    token = row // GROUP
    inside = row < rows
    if TMA:
        x = q_box.load([corner[0] + first // GROUP, corner[1], 0, 0]).reshape(BLOCK_N, D)
        dy = dout_box.load([corner[0] + first // GROUP, corner[1], 0, 0]).reshape(BLOCK_N, D)
        if MASKED:  # memory past the sequence may hold infinities
            x = tl.where(inside[:, None], x, 0.0)
            dy = tl.where(inside[:, None], dy, 0.0)
    else:
        q_at = token.to(tl.int64) * q_stride + row % GROUP * D
        to = (token.to(tl.int64) * (HK * GROUP) + row % GROUP) * D
        if MASKED or column.shape[0] != D:
            both = inside[:, None] & (column < D)[None, :]
            x = tl.load(q + q_at[:, None] + column[None, :], mask=both, other=0.0)
            dy = tl.load(dout + to[:, None] + column[None, :], mask=both, other=0.0)
        else:
            x = tl.load(q + q_at[:, None] + column[None, :])
            dy = tl.load(dout + to[:, None] + column[None, :])
    if MASKED:
        t = tl.load(lse2 + row, mask=inside, other=float("inf"))  # a row past the end has probability 0
    else:
        t = tl.load(lse2 + row)
    p = exp2(tl.fma(tl.dot(k, tl.trans(x), input_precision="ieee"), scale_log2e, -t[None, :]))
    if HAS_WINDOW or diagonal:
        p = visible(p, at[:, None], (offset + token)[None, :], window, HAS_WINDOW)
    dv = tl.dot(p.to(dy.dtype), dy, dv, input_precision="ieee")
    if MASKED:
        d = tl.load(delta + row, mask=inside, other=0.0)
    else:
        d = tl.load(delta + row)
    ds = p * (tl.dot(v, tl.trans(dy), input_precision="ieee") - d[None, :])
    dk = tl.dot(ds.to(x.dtype), x, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["T", "S", "window"])
def dkv_kernel(
    q_box,  # TMA descriptors of q and dout as [T, HK, GROUP, D] if TMA
    dout_box,
    dout,  # [T, H, D]
    q,  # [T, H, D]
    k,  # [S, HK, D]
    v,
    lse2,  # [HK, T * GROUP]
    delta,  # [HK, T * GROUP]
    cu_q,  # [B + 1]
    cu_k,  # [B + 1]
    dk,  # [S, HK, D]
    dv,
    T,
    S,
    q_stride,
    k_stride,
    v_stride,
    window,
    scale_log2e,
    scale,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    TMA: tl.constexpr,
    BRANCH: tl.constexpr,  # as in the forward kernel
    CAUSAL: tl.constexpr,
):
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    q_first = tl.load(cu_q + sequence)
    q_last = tl.load(cu_q + sequence + 1)
    queries = q_last - q_first
    k_first, keys = sequence_bounds(cu_k, sequence, S)
    begin = tl.program_id(0) * BLOCK_M
    # Skips a sequence outside q, because clamping would keep two more registers live through the loops.
    if (begin >= keys) | (q_first < 0) | (q_last < 0) | (q_last > T):
        return
    offset = keys - queries
    if not CAUSAL:  # places the rows after all keys, so that the mask hides none
        offset = keys
    rows = queries * GROUP
    at = begin + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    k += tl.cast(k_first, tl.int64) * k_stride + head * D
    v += tl.cast(k_first, tl.int64) * v_stride + head * D
    x = load_tile(k, k_stride, at, keys, column, D, True)
    y = load_tile(v, v_stride, at, keys, column, D, True)
    q += tl.cast(q_first, tl.int64) * q_stride + head * (GROUP * D)
    dout += (tl.cast(q_first, tl.int64) * (HK * GROUP) + head * GROUP) * D
    from_row = (head.to(tl.int64) * T + q_first) * GROUP
    lse2 += from_row
    delta += from_row
    # Row tiles start at multiples of BLOCK_N from the sequence's first query, so that the groups of 16 rows that one
    # instruction adds do not depend on the key tile.
    start = max(0, begin - offset) * GROUP // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        stop = min(rows, (begin + BLOCK_M - 1 + window - offset) * GROUP)
    else:
        stop = rows
    total_k = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total_v = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    source = (q_box, dout_box, q, dout, lse2, delta, q_stride, (q_first, head))
    middle = max(0, begin + BLOCK_M - 1 - offset) * GROUP  # from this row on the causal mask hides no key of the tile
    if BRANCH:
        full = max(start, min(stop, rows // BLOCK_N * BLOCK_N))
        for first in tl.range(start, full, BLOCK_N):
            total_k, total_v = dkv_block(total_k, total_v, x, y, source, first, first < middle, rows, offset, at,
                                         window, column, scale_log2e, HK, GROUP, D, BLOCK_N, HAS_WINDOW, False,
                                         TMA)  # fmt: skip
        if full < stop:  # the sequence's last, partial block
            total_k, total_v = dkv_block(total_k, total_v, x, y, source, full, True, rows, offset, at, window, column,
                                         scale_log2e, HK, GROUP, D, BLOCK_N, HAS_WINDOW, True, TMA)  # fmt: skip
    else:
        middle = max(start, min(stop, tl.cdiv(middle, BLOCK_N) * BLOCK_N))
        for first in tl.range(start, middle, BLOCK_N):
            total_k, total_v = dkv_block(total_k, total_v, x, y, source, first, True, rows, offset, at, window, column,
                                         scale_log2e, HK, GROUP, D, BLOCK_N, HAS_WINDOW, True, TMA)  # fmt: skip
        for first in tl.range(middle, stop, BLOCK_N):
            total_k, total_v = dkv_block(total_k, total_v, x, y, source, first, False, rows, offset, at, window, column,
                                         scale_log2e, HK, GROUP, D, BLOCK_N, HAS_WINDOW, True, TMA)  # fmt: skip
    both = (at < keys)[:, None] & (column < D)[None, :]
    to = ((tl.cast(k_first, tl.int64) + at) * (HK * D) + head * D)[:, None] + column[None, :]
    tl.store(dk + to, (total_k * scale).to(dk.dtype.element_ty), mask=both)
    tl.store(dv + to, total_v.to(dv.dtype.element_ty), mask=both)


# ---- tiles and launcher --------------------------------------------------------------------------

MAX_SEQUENCES = 65535  # CUDA's limit of a grid's z dimension
MAX_PROGRAMS = (1 << 31) - 1  # Triton computes the size of a grid as an int


def branches(family: str, q: Tensor) -> bool:
    """BRANCH of the kernels: 16-bit on Hopper. With the FMA products of fp32, a branch between two products makes the
    compiler spill hundreds of registers."""
    return family == "hopper" and q.element_size() == 2


def check_grid(batch: int, programs: int, **lengths: int) -> None:
    """Raises ValueError if a grid cannot hold `batch` sequences of `programs` programs each, because the launcher would
    silently run nothing."""
    if batch > MAX_SEQUENCES:
        raise ValueError(
            f"attention: cu_seqlens_q has {batch} sequences; a GPU takes at most {MAX_SEQUENCES} per call, "
            "split the batch"
        )
    if batch * programs > MAX_PROGRAMS:
        raise ValueError(
            f"attention: {batch} sequences with {', '.join(f'{k}={n}' for k, n in lengths.items())} need "
            f"{batch * programs} programs; a GPU takes at most {MAX_PROGRAMS} per call, pass the longest sequence's "
            "length or split the batch"
        )


def descriptors(x: Tensor, y: Tensor, rows: int, group: int | None = None) -> tuple[Any, Any]:
    """TMA descriptors of x and y [n, heads, D] for boxes of `rows` rows of one head.

    With `group`, rows are the (position, head) pairs of a group of heads, and a box has the shape
    [rows // group, 1, group, D]. Returns (None, None) if TMA cannot load the tensors, and on GPUs other than Hopper,
    where TMA has not been measured.
    """
    n, heads, d = x.shape
    fits = d == next_power_of_2(d, 16) and rows % (group or 1) == 0
    if family(x) != "hopper" or not fits or not can_use_tma(x.flatten(1), y.flatten(1)):
        return None, None
    if group is None:
        shape, strides, box = [n, heads * d], [1], [rows, d]
    else:
        shape, strides, box = [n, heads // group, group, d], [group * d, d, 1], [rows // group, 1, group, d]
    first, second = (TensorDescriptor(t, shape, [t.stride(0), *strides], box) for t in (x, y))
    return first, second


def backward_tiles(d: int, element_size: int, family: str) -> tuple[dict[str, int], dict[str, int]]:
    """Launch configurations of (dq, dkv): a program owns BLOCK_M rows or keys and loops over BLOCK_N at a time.

    They change no bit, because every product is a chain.
    """
    dq, dkv = (128, 64, 8, 2), (128, 64, 8, 2)
    if element_size == 4:
        dq = dkv = (16, 16, 4, 1)
    elif family == "amd":
        dq, dkv = (64, 32, 4, 2), (64, 32, 4, 1)
    elif d > 128:
        dq, dkv = (64, 64, 8, 1), (64, 32, 8, 1)
    elif family == "hopper":  # two dkv programs per SM: the products of one overlap the exponentials of the other
        dq, dkv = (128, 64, 8, 3), (64, 64, 4, 2)
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    return dict(zip(names, dq, strict=True)), dict(zip(names, dkv, strict=True))


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window: int | None,
    causal: bool = True,
    tiles: tuple[dict[str, int], dict[str, int]] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dout, out = aligned(dout), aligned(out)
    q, k, v = contiguous_heads(q), contiguous_heads(k), contiguous_heads(v)
    cu_q, cu_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    (t, h, d), hk = q.shape, k.shape[1]
    group, batch = h // hk, cu_q.shape[0] - 1
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if k.shape[0] == 0:
        return dq.zero_(), dk, dv  # without keys the output is 0
    lse2, delta = torch.empty(2, hk, t * group, dtype=torch.float32, device=q.device)
    block_d = next_power_of_2(d, 16)
    shape: dict[str, Any] = {"HK": hk, "GROUP": group, "D": d, "BLOCK_D": block_d}
    # clamps the window to the number of keys, because the kernels add it to positions in 32 bits
    numbers = (
        t, k.shape[0], q.stride(0), k.stride(0), v.stride(0), min(window or 0, k.shape[0]), scale * LOG2E.value, scale,
    )  # fmt: skip
    kind = family(q)
    for_dq, for_dkv = tiles or backward_tiles(d, q.element_size(), kind)
    tiles_q = cdiv(max_seqlen_q * group, for_dq["BLOCK_M"])
    tiles_k = cdiv(max_seqlen_k, for_dkv["BLOCK_M"])
    check_grid(batch, max(tiles_q, tiles_k) * hk, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    with on_device(q):
        boxes: Any = (None, None)
        if t > 0:
            delta_kernel[(cdiv(t * group, 32), hk)](
                dout, out, lse, lse2, delta, t, **shape, BLOCK_M=32, num_warps=4, **options()
            )
            boxes = descriptors(k, v, for_dq["BLOCK_N"])
            dq_kernel[(tiles_q, hk, batch)](
                dout, q, *boxes, k, v, lse2, delta, cu_q, cu_k, dq, *numbers, **shape, HAS_WINDOW=window is not None,
                TMA=boxes[0] is not None, BRANCH=branches(kind, q), CAUSAL=causal, **for_dq, **options(matmul=True),
            )  # fmt: skip
            boxes = descriptors(q, dout, for_dkv["BLOCK_N"], group)
        dkv_kernel[(tiles_k, hk, batch)](
            *boxes, dout, q, k, v, lse2, delta, cu_q, cu_k, dk, dv, *numbers, **shape, HAS_WINDOW=window is not None,
            TMA=boxes[0] is not None, BRANCH=branches(kind, q), CAUSAL=causal, **for_dkv, **options(matmul=True),
        )  # fmt: skip
    return dq, dk, dv
