"""embedding on GPUs: the forward copies rows; the gradient sums each id's occurrences in a fixed order, no atomics.

Contract: orders.py, `embedding`. Tokens are sorted stably by id; the program that holds an id's first entry in the
sorted list owns its row. For frequent ids, window_sums_kernel first computes the sums of all windows in parallel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract.orders import EMBEDDING_WINDOW
from rlkernel.kernels.triton.common import (
    IS_HIP,
    after_previous,
    cdiv,
    negative_zeros,
    next_power_of_2,
    on_device,
    options,
    pdl,
)

PLACES, UNROLL, WINDOWS = 4, 16, 4
"""Entries of the sorted list per program, loads in flight, and windows per program of window_sums_kernel."""
GATHER_ROWS, GATHER_BYTES = 2, 2048
"""Forward: rows per program and bytes of a row per program; shorter rows get more rows."""
HOT = 4
"""An id is hot (frequent) if it covers two adjacent multiples of HOT * windows in the sorted list."""


# ---- kernels ------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["T", "V"], debug=True)
def embedding_kernel(
    ids,  # [T] int64
    weight,  # [V, C]
    out,  # [T, C]
    T,
    V,
    C,
    weight_row,
    weight_col,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token_id = tl.load(ids + row, mask=row < T, other=0)
    known = (token_id >= 0) & (token_id < V)
    tl.device_assert(known, "rlkernel embedding: an id lies outside the vocabulary")
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (known & (row < T))[:, None] & (column < C)[None, :]
    x = tl.load(weight + token_id[:, None] * weight_row + column.to(tl.int64)[None, :] * weight_col, mask=inside)
    tl.store(out + row[:, None] * C + column[None, :], x, mask=inside)


@triton.jit
def first_place(ids, source, T, token_id, token, PROBES: tl.constexpr):
    """Number of entries of the sorted list before (token_id, token)."""
    low, span = 0, T
    while span > 0:
        step = tl.cdiv(span, PROBES)
        probe = low + (tl.arange(0, PROBES) + 1) * step - 1
        on = probe < low + span
        found = tl.load(ids + probe, mask=on, other=0x7FFFFFFF)
        smaller = (found < token_id) | ((found == token_id) & (tl.load(source + probe, mask=on, other=0) < token))
        low += tl.sum((on & smaller).to(tl.int32), axis=0) * step
        span = tl.minimum(step - 1, T - low)
    return low


@triton.jit
def add_run(
    total, ids, source, dy, place, T, token_id, last_window, column, inside, dy_row, dy_col,
    WINDOW: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """total + the window sums, ascending, of the occurrences of token_id from `place` up to last_window."""
    window = -1
    partial = negative_zeros(total.shape)
    more = True
    while more:
        at = place + tl.arange(0, UNROLL)
        same = tl.load(ids + at, mask=at < T, other=-1) == token_id
        same = same & (tl.load(source + at, mask=at < T, other=0) // WINDOW <= last_window)
        count = tl.sum(same.to(tl.int32), axis=0)
        tokens = ()
        rows = ()
        for i in tl.static_range(UNROLL):  # issues all loads before the first addition
            token = tl.load(source + place + i, mask=place + i < T, other=0)
            row = dy + token.to(tl.int64) * dy_row + column.to(tl.int64) * dy_col
            tokens = tokens + (token,)
            rows = rows + (tl.load(row, mask=inside & (i < count), other=negative_zeros(total.shape)).to(tl.float32),)
        for i in tl.static_range(UNROLL):
            here = (tokens[i] // WINDOW).to(tl.int32)
            closes = (i < count) & (here != window)
            total = tl.where(closes, total + partial, total)
            partial = tl.where(closes, rows[i], partial + rows[i])
            window = tl.where(i < count, here, window)
        place += UNROLL
        more = count == UNROLL
    return total + partial


@triton.jit(do_not_specialize=["T", "ALL_WINDOWS", "STRIDE"])
def window_sums_kernel(
    ids,  # [T], ascending
    source,  # [T]: packed position of each
    dy,  # [T, C]
    sums,  # out [T / STRIDE, ALL_WINDOWS, C] fp32
    T,
    C,
    ALL_WINDOWS,
    STRIDE,
    dy_row,
    dy_col,
    WINDOW: tl.constexpr,
    WINDOWS: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Window sums of the hot ids; an id's slot is that of the first multiple of STRIDE that it covers."""
    after_previous(PDL)
    slot = tl.program_id(0)
    place = slot * STRIDE
    token_id = tl.load(ids + place)
    before = tl.load(ids + place - STRIDE, mask=slot > 0, other=-1)
    after = tl.load(ids + place + STRIDE, mask=place + STRIDE < T, other=-1)
    if (token_id != before) & (token_id == after):
        column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        inside = column < C
        first = tl.program_id(1) * WINDOWS
        for window in range(first, min(first + WINDOWS, ALL_WINDOWS)):
            start = first_place(ids, source, T, token_id, window * WINDOW, 256)
            total = negative_zeros((BLOCK,))
            total = add_run(
                total, ids, source, dy, start, T, token_id, window, column, inside, dy_row, dy_col, WINDOW, UNROLL
            )
            tl.store(sums + (tl.cast(slot, tl.int64) * ALL_WINDOWS + window) * C + column, total, mask=inside)


@triton.jit
def add_sums(total, sums, slot, ALL_WINDOWS, C, column, inside, UNROLL: tl.constexpr):
    """total + the window sums of a hot id, ascending."""
    for window in range(0, ALL_WINDOWS, UNROLL):
        rows = ()
        for j in tl.static_range(UNROLL):
            at = (tl.cast(slot, tl.int64) * ALL_WINDOWS + window + j) * C + column
            there = inside & (window + j < ALL_WINDOWS)
            rows = rows + (tl.load(sums + at, mask=there, other=negative_zeros(total.shape)),)
        for j in tl.static_range(UNROLL):
            total += rows[j]
    return total


@triton.jit(do_not_specialize=["T", "ALL_WINDOWS", "STRIDE"])
def embedding_wgrad_kernel(
    ids,  # [T], ascending
    source,  # [T]: packed position of each
    dy,  # [T, C]
    sums,  # [T / STRIDE, ALL_WINDOWS, C] fp32
    grad,  # [V, C]
    T,
    C,
    ALL_WINDOWS,
    STRIDE,
    dy_row,
    dy_col,
    grad_row,
    grad_col,
    HAS_SUMS: tl.constexpr,
    WINDOW: tl.constexpr,
    PLACES: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < C
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    on = place < T
    mine = tl.load(ids + place, mask=on, other=-1)
    first = on & (mine != tl.load(ids + place - 1, mask=on & (place > 0), other=-1))
    last = mine != tl.load(ids + place + 1, mask=place + 1 < T, other=-1)

    # most ids occur once; they are handled as one tile, so that all loads of the program are in flight
    once = first & last
    token = tl.load(source + place, mask=once, other=0).to(tl.int64)
    both = once[:, None] & inside[None, :]
    channel = column.to(tl.int64)[None, :]
    to = grad + mine.to(tl.int64)[:, None] * grad_row + channel * grad_col
    row = tl.load(dy + token[:, None] * dy_row + channel * dy_col, mask=both, other=0.0).to(tl.float32)
    total = tl.load(to, mask=both, other=0.0).to(tl.float32)
    tl.store(to, (total + row).to(grad.dtype.element_ty), mask=both)

    if tl.sum((first & ~last).to(tl.int32), axis=0) > 0:
        for i in range(PLACES):
            at = tl.program_id(0) * PLACES + i
            token_id = tl.load(ids + at, mask=at < T, other=-1)
            starts = (at < T) & (token_id != tl.load(ids + at - 1, mask=(at > 0) & (at < T), other=-1))
            if starts & (token_id == tl.load(ids + at + 1, mask=at + 1 < T, other=-1)):
                to_row = grad + token_id.to(tl.int64) * grad_row + column.to(tl.int64) * grad_col
                sum_ = tl.load(to_row, mask=inside, other=0.0).to(tl.float32)
                if HAS_SUMS:
                    slot = tl.cdiv(at, STRIDE)
                    here = tl.load(ids + slot * STRIDE, mask=(slot + 1) * STRIDE < T, other=-1)
                    there = tl.load(ids + (slot + 1) * STRIDE, mask=(slot + 1) * STRIDE < T, other=-1)
                    if (here == token_id) & (there == token_id):
                        sum_ = add_sums(sum_, sums, slot, ALL_WINDOWS, C, column, inside, UNROLL)
                    else:
                        sum_ = add_run(
                            sum_, ids, source, dy, at, T, token_id, T, column, inside, dy_row, dy_col, WINDOW, UNROLL
                        )
                else:
                    sum_ = add_run(
                        sum_, ids, source, dy, at, T, token_id, T, column, inside, dy_row, dy_col, WINDOW, UNROLL
                    )
                tl.store(to_row, sum_.to(grad.dtype.element_ty), mask=inside)


# ---- launchers ----------------------------------------------------------------------------------


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """out [T, C]: rows ids [T] of weight [V, C]. An id outside the vocabulary trips a device-side assertion."""
    if IS_HIP:  # where device assertions are host calls, which use atomics
        return torch.index_select(weight, 0, ids)
    tokens, (vocabulary, c) = ids.shape[0], weight.shape
    out = torch.empty(tokens, c, dtype=weight.dtype, device=weight.device)
    if out.numel() == 0:
        return out
    block = min(GATHER_BYTES // weight.element_size(), next_power_of_2(c, 32))
    rows = GATHER_ROWS * GATHER_BYTES // (block * weight.element_size())
    with on_device(weight):
        embedding_kernel[(cdiv(tokens, rows), cdiv(c, block))](
            ids.contiguous(), weight, out, tokens, vocabulary, c, weight.stride(0), weight.stride(1),
            ROWS=rows, BLOCK=block, num_warps=1, sanitize_overflow=False, **pdl(out), **options(),
        )  # fmt: skip
    return out


def embedding_wgrad_(grad: Tensor, dy: Tensor, ids: Tensor) -> None:
    """grad [V, C] += dy [T, C] by ids [T] int64; sums are fp32 and rounded once to grad's dtype."""
    tokens, c = dy.shape
    if dy.numel() == 0:
        return
    windows = cdiv(tokens, EMBEDDING_WINDOW)
    stride = HOT * windows
    slots = cdiv(tokens, stride)
    few = windows <= WINDOWS  # then the owner of an id sums its windows itself
    block = min(512 if few else 1024, next_power_of_2(c, 32))
    blocks = cdiv(c, block)
    meta = {"WINDOW": EMBEDDING_WINDOW, "UNROLL": UNROLL, "BLOCK": block, **pdl(dy), **options()}
    with on_device(dy):
        ascending, source = torch.sort(ids.to(torch.int32), stable=True)
        source = source.to(torch.int32)
        sums = None
        if not few:
            sums = torch.empty(slots, windows, c, dtype=torch.float32, device=dy.device)
            window_sums_kernel[(slots, cdiv(windows, WINDOWS), blocks)](
                ascending, source, dy, sums, tokens, c, windows, stride, dy.stride(0), dy.stride(1),
                WINDOWS=WINDOWS, num_warps=max(1, block // 128), **meta,
            )  # fmt: skip
        embedding_wgrad_kernel[(cdiv(tokens, PLACES), blocks)](
            ascending, source, dy, sums, grad, tokens, c, windows, stride, dy.stride(0), dy.stride(1),
            grad.stride(0), grad.stride(1), HAS_SUMS=sums is not None, PLACES=PLACES,
            num_warps=max(1, block * PLACES // (512 if few else 1024)), **meta,
        )  # fmt: skip


def embedding_wgrad(dy: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    """The weight gradient [vocabulary, C] in dy's dtype."""
    grad = torch.zeros(vocabulary, dy.shape[1], dtype=dy.dtype, device=dy.device)
    embedding_wgrad_(grad, dy, ids)
    return grad
