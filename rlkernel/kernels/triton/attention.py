"""attention forward on GPUs: packed and paged keys, prefill and decode share one inner loop and so have the same bits.

Contract: orders.py, `attention`. Rows of a tile are (position, head of the group) pairs; blocks of 64 keys and splits
start at absolute positions. `prefill` is the anchor of the long-prefill schedules on Hopper (`cuda/attention.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract.orders import ATTENTION_SPLIT
from rlkernel.kernels.triton.attention_backward import branches, check_grid, descriptors
from rlkernel.kernels.triton.attention_pages import contiguous_slots, gather_pages
from rlkernel.kernels.triton.attention_splits import (
    KEY_BLOCK,
    NEGATIVE_INFINITY,
    clamp_page,
    first_visible_key,
    merge_kernel,
    merge_splits,
    normalised,
    sequence_bounds,
)
from rlkernel.kernels.triton.attention_tiles import Tile, forward_tile
from rlkernel.kernels.triton.common import (
    LN2,
    LOG2E,
    after_previous,
    cdiv,
    contiguous_heads,
    exp2,
    family,
    next_power_of_2,
    on_device,
    options,
    pdl,
)
from rlkernel.kernels.triton.launch import direct

Prefill = Callable[..., None]  # `prefill` or a certified schedule

ONE_SPLIT = tl.constexpr(0)  # no sequence is longer than a split
MERGE = tl.constexpr(1)  # each program loops over all splits and merges them in registers
PARTIAL = tl.constexpr(2)  # split-KV: programs compute one or more splits each, `merge_kernel` merges them


# ---- kernels -------------------------------------------------------------------------------------


@triton.jit
def slot_of(table, at, keys, PAGE: tl.constexpr):
    """Slot of key `at`, or a slot of page 0 past the sequence's end. `table` is (block table, number of pages)."""
    page = clamp_page(tl.load(table[0] + at // PAGE, mask=at < keys, other=0), table[1])
    return page.to(tl.int64) * PAGE + at % PAGE


@triton.jit
def slots_of(table, first, keys, PAGE: tl.constexpr):
    """Slots of the keys first, first + 16, first + 32 and first + 48, if pages hold a multiple of 16 keys."""
    if PAGE > 0 and PAGE % 16 == 0:
        slots = (
            slot_of(table, first, keys, PAGE),
            slot_of(table, first + 16, keys, PAGE),
            slot_of(table, first + 32, keys, PAGE),
            slot_of(table, first + 48, keys, PAGE),
        )
    else:
        slots = (0, 0, 0, 0)
    return slots


@triton.jit
def load_keys(box, base, stride, corner, table, slots, first, keys, column, D: tl.constexpr, PAGE: tl.constexpr,
              MASKED: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Rows [KEY_BLOCK, BLOCK_D] of the keys or values at [first, first + KEY_BLOCK).

    MASKED: keys past the sequence's end are 0, except with TMA, which loads the memory that follows. `corner` is the
    sequence's first element in the tensor of the descriptor `box`.
    """
    if TMA:
        return box.load([corner[0] + first, corner[1]])
    j = tl.arange(0, KEY_BLOCK)
    if PAGE == 0:
        rows = base + tl.cast(first, tl.int64) * stride + (j * stride)[:, None]
    elif PAGE % 16 == 0:
        # four base addresses instead of one per row; which one a register needs is known at compile time
        low = tl.where(j < 16, base + slots[0] * stride, base + slots[1] * stride)
        high = tl.where(j < 48, base + slots[2] * stride, base + slots[3] * stride)
        rows = (tl.where(j < 32, low, high) + j % 16 * stride)[:, None]
    else:
        rows = base + (slot_of(table, first + j, keys, PAGE) * stride)[:, None]
    if MASKED:
        return tl.load(rows + column[None, :], mask=(first + j < keys)[:, None] & (column < D)[None, :], other=0.0)
    if column.shape[0] != D:
        return tl.load(rows + column[None, :], mask=(column < D)[None, :], other=0.0)
    return tl.load(rows + column[None, :])


@triton.jit
def mask_scores(raw, first, position, window, HAS_WINDOW: tl.constexpr):
    """Scores of the keys [first, first + KEY_BLOCK), -inf where the causal mask or the window hides the key."""
    at = first + tl.arange(0, KEY_BLOCK)
    seen = at[None, :] <= position[:, None]
    if HAS_WINDOW:
        seen = seen & (at[None, :] > (position - window)[:, None])
    return tl.where(seen, raw, NEGATIVE_INFINITY)


@triton.jit
def add_block(acc, m, l, q, source, slots, first, diagonal, keys, position, window, column, scale_log2e,
              D: tl.constexpr, HAS_WINDOW: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr,
              TMA: tl.constexpr):  # fmt: skip
    """Adds KEY_BLOCK keys to the running (acc, m, l): the contract's online softmax, which always rescales.

    `diagonal`: the causal mask hides some of the keys. MASKED: some keys lie past the sequence's end.
    A block that is hidden from a row leaves the row unchanged, because its factor is exp2(0) = 1 and its sum 0.
    """
    k_box, v_box, k, v, k_stride, v_stride, corner, table = source
    # both loads precede the first product, so that the TMA loads share one mbarrier
    x = load_keys(k_box, k, k_stride, corner, table, slots, first, keys, column, D, PAGE, MASKED, TMA)
    y = load_keys(v_box, v, v_stride, corner, table, slots, first, keys, column, D, PAGE, MASKED, TMA)
    if MASKED and TMA:  # memory past the sequence may hold infinities, and 0 * inf is NaN
        y = tl.where((first + tl.arange(0, KEY_BLOCK) < keys)[:, None], y, 0.0)
    raw = tl.dot(q, tl.trans(x), input_precision="ieee")
    if HAS_WINDOW or diagonal:
        raw = mask_scores(raw, first, position, window, HAS_WINDOW)
    new_max = tl.maximum(m, tl.max(raw, 1) * scale_log2e)
    base = tl.where(new_max == NEGATIVE_INFINITY, 0.0, new_max)
    p = exp2(tl.fma(raw, scale_log2e, -base[:, None]))
    factor = exp2(m - base)
    l = tl.fma(l, factor, tl.sum(p, 1))
    acc = tl.dot(p.to(y.dtype), y, acc * factor[:, None], input_precision="ieee")
    return acc, new_max, l


@triton.jit
def attend_blocks(acc, m, l, q, source, first, last, unmasked, keys, position, window, column, scale_log2e,
                  D: tl.constexpr, HAS_WINDOW: tl.constexpr, PAGE: tl.constexpr, TMA: tl.constexpr,
                  BRANCH: tl.constexpr):  # fmt: skip
    """Adds the keys [first, last) to the running (acc, m, l); the causal mask hides no key below `unmasked`."""
    if BRANCH:  # one loop, because a second loop would refill the software pipeline
        middle = max(first, min(last, keys // KEY_BLOCK * KEY_BLOCK))
    else:
        middle = max(first, min(last, unmasked))
    slots = slots_of(source[7], first, keys, PAGE)
    for at in tl.range(first, middle, KEY_BLOCK):
        current = slots
        slots = slots_of(source[7], at + KEY_BLOCK, keys, PAGE)  # prefetched one block ahead
        acc, m, l = add_block(acc, m, l, q, source, current, at, BRANCH and at >= unmasked, keys, position, window,
                              column, scale_log2e, D, HAS_WINDOW, PAGE, False, TMA)  # fmt: skip
    if BRANCH:
        if middle < last:  # the sequence's last, partial block
            acc, m, l = add_block(acc, m, l, q, source, slots, middle, True, keys, position, window, column,
                                  scale_log2e, D, HAS_WINDOW, PAGE, True, TMA)  # fmt: skip
    else:
        for at in tl.range(middle, last, KEY_BLOCK):
            slots = slots_of(source[7], at, keys, PAGE)
            acc, m, l = add_block(acc, m, l, q, source, slots, at, True, keys, position, window, column, scale_log2e,
                                  D, HAS_WINDOW, PAGE, True, TMA)  # fmt: skip
    return acc, m, l


@triton.jit
def attend_split(q, source, first, last, unmasked, keys, position, window, column, scale_log2e, D: tl.constexpr,
                 HAS_WINDOW: tl.constexpr, PAGE: tl.constexpr, TMA: tl.constexpr,
                 BRANCH: tl.constexpr):  # fmt: skip
    """(o, log2-sum-exp) of the keys [first, last), normalised; the causal mask hides no key below `unmasked`.

    A row that sees none of the keys gets 0 and -inf.
    """
    m = tl.full((q.shape[0],), float("-inf"), tl.float32)
    l = tl.zeros((q.shape[0],), tl.float32)
    acc = tl.zeros(q.shape, tl.float32)
    acc, m, l = attend_blocks(acc, m, l, q, source, first, last, unmasked, keys, position, window, column, scale_log2e,
                              D, HAS_WINDOW, PAGE, TMA, BRANCH)  # fmt: skip
    return normalised(acc, m, l)


@direct
@triton.jit(do_not_specialize=["T", "COLUMNS", "MOST", "PAGES", "window", "SPLITS"])
def attention_kernel(
    q,  # [T, H, D]
    k_box,  # TMA descriptors of k and v as [S, HK * D] if TMA
    v_box,
    k,  # [S, HK, D], or pages [pages, PAGE, HK, D] with a stride of KV_HEAD elements between heads
    v,
    table,  # [B, COLUMNS] pages of each sequence; with HAS_CAPACITY sequences start at multiples of COLUMNS keys
    cu_q,  # [B + 1]
    lens,  # cumulative keys [B + 1]; keys [B] with pages or HAS_CAPACITY
    out,  # [T, H, D], or [splits, T, H, D] fp32
    lse,  # [T, H] natural log, or [splits, T, H] base 2
    final_out,  # [T, H, D] and [T, H] natural log of sequences inside one split, if `out` and `lse` hold splits
    final_lse,
    T,
    q_stride,
    k_stride,
    v_stride,
    COLUMNS,
    MOST,  # keys that a row of the table can hold, or number of packed keys
    PAGES,  # of the cache
    window,
    SPLIT,
    SPLITS,  # split buffers of the launch; too few if `max_seqlen_k` is too small
    scale_log2e,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    KV_HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MODE: tl.constexpr,
    PERSISTENT: tl.constexpr,  # PARTIAL: a program loops over several splits
    HAS_WINDOW: tl.constexpr,
    PAGE: tl.constexpr,  # keys per page, 0 where keys are packed
    TMA: tl.constexpr,
    BRANCH: tl.constexpr,  # Hopper, 16-bit: the main loop includes the diagonal blocks and branches to mask them. On
    # other GPUs that branch would hide the second product from the compiler, which then spreads a row over warps.
    HAS_CAPACITY: tl.constexpr,
    CAUSAL: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    q_first, queries = sequence_bounds(cu_q, sequence, T)
    if PAGE > 0:
        keys = min(tl.load(lens + sequence), MOST)
        k_first = 0
        k_step: tl.constexpr = HK * KV_HEAD  # slots are contiguous
        v_step: tl.constexpr = HK * KV_HEAD
        table += tl.cast(sequence, tl.int64) * COLUMNS
    else:
        if HAS_CAPACITY:
            k_first = sequence * COLUMNS
            keys = min(tl.load(lens + sequence), COLUMNS)
        else:
            k_first, keys = sequence_bounds(lens, sequence, MOST)
        k_step = k_stride
        v_step = v_stride
    single_split = MODE != PARTIAL
    if MODE == PARTIAL:
        tile = 0
        single_split = first_visible_key(keys, queries, window, HAS_WINDOW) // SPLIT == (keys - 1) // SPLIT
        if not PERSISTENT:
            single_split = single_split | (SPLITS == 1)  # the launcher allocates no split buffers
    else:
        tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest tiles first
    if tile * BLOCK_M >= queries * GROUP:
        return
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    inside = token < queries
    offset = keys - queries
    position = offset + token
    first_position = offset + tile * BLOCK_M // GROUP
    stop = min(keys, offset + (tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1)  # the tile sees keys in [start, stop)
    if not CAUSAL:  # every row sees all keys
        position = keys - 1 + 0 * token
        first_position = keys - 1
        stop = keys
    if PERSISTENT:
        stop = min(stop, SPLITS * SPLIT)
    if HAS_WINDOW:
        start = max(0, first_position - window + 1) // KEY_BLOCK * KEY_BLOCK
    else:
        start = 0
    unmasked = (first_position + 1) // KEY_BLOCK * KEY_BLOCK  # the causal mask hides no key below it
    column = tl.arange(0, BLOCK_D)
    q += tl.cast(q_first, tl.int64) * q_stride + head * (GROUP * D)
    at = token[:, None].to(tl.int64) * q_stride + (row % GROUP * D)[:, None] + column[None, :]
    x = tl.load(q + at, mask=inside[:, None] & (column < D)[None, :], other=0.0)
    k += tl.cast(k_first, tl.int64) * k_step + head * KV_HEAD
    v += tl.cast(k_first, tl.int64) * v_step + head * KV_HEAD
    source = (k_box, v_box, k, v, k_step, v_step, (k_first, head * D), (table, PAGES))
    if MODE == MERGE:
        o = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        lse2 = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        for begin in tl.range(start // SPLIT * SPLIT, stop, SPLIT):
            o_split, lse2_split = attend_split(
                x, source, max(begin, start), min(begin + SPLIT, stop), unmasked, keys, position, window, column,
                scale_log2e, D, HAS_WINDOW, PAGE, TMA, BRANCH,
            )  # fmt: skip
            o, lse2 = merge_splits(o, lse2, o_split, lse2_split)
    elif not PERSISTENT:
        if MODE == PARTIAL:
            split = tl.program_id(0)
            start = max(start, split * SPLIT)
            stop = min(stop, split * SPLIT + SPLIT)
            if start >= stop:
                return
            out += tl.cast(split, tl.int64) * T * (HK * GROUP * D)
            lse += tl.cast(split, tl.int64) * T * (HK * GROUP)
        o, lse2 = attend_split(x, source, start, stop, unmasked, keys, position, window, column, scale_log2e, D,
                              HAS_WINDOW, PAGE, TMA, BRANCH)  # fmt: skip
    to = (tl.cast(q_first, tl.int64) + token) * (HK * GROUP) + head * GROUP + row % GROUP
    at = (to * D)[:, None] + column[None, :]
    stored = inside[:, None] & (column < D)[None, :]
    if PERSISTENT:
        for split in tl.range(tl.program_id(0), tl.cdiv(stop, SPLIT), tl.num_programs(0)):
            first, last = max(start, split * SPLIT), min(stop, split * SPLIT + SPLIT)
            if first < last:
                o, lse2 = attend_split(x, source, first, last, unmasked, keys, position, window, column, scale_log2e, D,
                                      HAS_WINDOW, PAGE, TMA, BRANCH)  # fmt: skip
                if single_split:
                    tl.store(final_lse + to, lse2 * LN2, mask=inside)
                    tl.store(final_out + at, o.to(final_out.dtype.element_ty), mask=stored)
                else:
                    part = tl.cast(split, tl.int64) * T * (HK * GROUP)
                    tl.store(lse + part + to, lse2, mask=inside)
                    tl.store(out + part * D + at, o.to(out.dtype.element_ty), mask=stored)
    elif single_split:
        tl.store(final_lse + to, lse2 * LN2, mask=inside)
        tl.store(final_out + at, o.to(final_out.dtype.element_ty), mask=stored)
    else:
        tl.store(lse + to, lse2, mask=inside)
        tl.store(out + at, o.to(out.dtype.element_ty), mask=stored)


# ---- limits --------------------------------------------------------------------------------------

GATHER_QUERIES, GATHER_KEYS = 512, 4096  # least sizes for which pages are copied to contiguous keys for TMA
SCRATCH_BYTES = 1 << 29  # most temporary memory of a call; see `scratch_bytes`
LONG_PREFILL_ROWS = 1024  # the long-prefill schedules need at least this many rows in the longest sequence
INT32 = (1 << 31) - 1
MERGE_GRID = 1024  # most programs of a merge (at least one per query), because most decode steps merge nothing
PARTIAL_GRID = 4096  # most programs of a decode step (at least two per sequence and KV head): idle ones cost time


# ---- launchers -----------------------------------------------------------------------------------


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    cu_q: Tensor,
    lens: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window: int | None,
    split: int,
    tile: Tile | None,
    kv_head: int | None = None,
    out: Tensor | None = None,
    capacity: int = 0,
    lse: Tensor | None = None,
    long: Prefill | None = None,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """out [T, H, D] and natural-log lse [T, H] fp32; `out` and `lse` are written in place if given.

    Args:
        table: pages of each sequence. If None, keys are dense: cumulative, or, if `capacity` is not 0, starting at
            multiples of `capacity` keys.
        tile: for tests and tuning; changes no bit.
        long: replaces attention_kernel for long prefill over keys that TMA can load.
    """
    q = contiguous_heads(q)
    (t, h, d), hk = q.shape, k.shape[-2]
    group, batch = h // hk, cu_q.shape[0] - 1
    if out is None:
        out = torch.empty(t, h, d, dtype=q.dtype, device=q.device)
    if lse is None:
        lse = torch.empty(t, h, dtype=torch.float32, device=q.device)
    if t == 0:
        return out, lse
    kind = family(q)
    chosen = tile is None
    tile = tile or forward_tile(max_q * group, d, q.element_size(), kind)
    tiles, splits = cdiv(max_q * group, tile.rows), cdiv(max_k, split)
    check_grid(batch, tiles * hk, max_seqlen_q=max_q)
    # one tile per sequence, as in decode: PARTIAL also for one split, because it needs fewer registers
    in_parts = causal and tiles == 1 and (splits > 1 or table is not None)  # `merge_kernel` is causal
    if in_parts and splits > 1 and parts_bytes(t, h, d, splits) > SCRATCH_BYTES:  # such a batch fills the GPU anyway
        in_parts = False
    mode = PARTIAL.value if in_parts else ONE_SPLIT.value if splits <= 1 else MERGE.value
    split_programs = min(splits, max(2, PARTIAL_GRID // (batch * hk)))
    boxes = descriptors(k, v, KEY_BLOCK.value) if table is None and tile.tma and len(k) else (None, None)
    many = chosen and causal and window is None and mode != PARTIAL.value and max_q * group >= LONG_PREFILL_ROWS
    if long is not None and many and boxes[0] is not None:
        long(q, k, v, cu_q, lens, max_q, max_k, scale, split, capacity, out, lse)
        return out, lse
    o_parts, lse_parts = out, lse
    if mode == PARTIAL.value:
        parts = splits if splits > 1 else 0
        o_parts = torch.empty(parts, t, h, d, dtype=torch.float32, device=q.device)
        lse_parts = torch.empty(parts, t, h, dtype=torch.float32, device=q.device)
    block_d = next_power_of_2(d, 16)
    pages = 0 if table is None else k.shape[0]
    most = k.shape[0] if table is None else min(table.shape[1] * k.shape[1], INT32) if pages else 0
    with on_device(q):
        attention_kernel[(split_programs if mode == PARTIAL.value else tiles, hk, batch)](
            q, *boxes, k, v, table, cu_q, lens, o_parts, lse_parts, out, lse, t, q.stride(0), k.stride(-3),
            v.stride(-3), capacity if table is None else table.stride(0), most, pages, window or 0, split, splits,
            scale * LOG2E.value,
            HK=hk, GROUP=group, D=d, KV_HEAD=kv_head or d, BLOCK_D=block_d, BLOCK_M=tile.rows, MODE=mode,
            PERSISTENT=mode == PARTIAL.value and splits > split_programs,
            HAS_WINDOW=window is not None, PAGE=0 if table is None else k.shape[1], TMA=boxes[0] is not None,
            BRANCH=branches(kind, q), HAS_CAPACITY=capacity > 0, CAUSAL=causal,
            **(pdl(q) if mode == PARTIAL.value else {"PDL": False}),
            num_warps=tile.warps, num_stages=tile.stages, **options(matmul=True),
        )  # fmt: skip
        if mode == PARTIAL.value and splits > 1:
            heads = min(next_power_of_2(h), max(1, 128 // block_d))
            programs = min(cdiv(h, heads), max(1, MERGE_GRID // max(1, max_q * batch)))
            merge_kernel[(max_q, programs, batch)](
                o_parts, lse_parts, cu_q, lens, out, lse, t, window or 0, split, splits,
                H=h, D=d, HEADS=heads, BLOCK_D=block_d, HAS_WINDOW=window is not None,
                LENGTHS=table is not None or capacity > 0, num_warps=1, **pdl(q), **options(),
            )  # fmt: skip
    return out, lse


def prefill(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, lens: Tensor, max_q: int, max_k: int, scale: float, split: int,
    capacity: int, out: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    """Writes `out` and `lse` for dense keys; the anchor of the long-prefill schedules."""
    _forward(q, k, v, None, cu_q, lens, max_q, max_k, scale, None, split, None, None, out, capacity, lse)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window: int | None,
    split: int,
    causal: bool = True,
    tile: Tile | None = None,
    long: Prefill | None = None,
) -> tuple[Tensor, Tensor]:
    k, v = contiguous_heads(k), contiguous_heads(v)
    cu_q, cu_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    return _forward(
        q, k, v, None, cu_q, cu_k, max_seqlen_q, max_seqlen_k, scale, window, split, tile, long=long, causal=causal
    )


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window: int | None,
    split: int,
    tile: Tile | None = None,
    out: Tensor | None = None,
    long: Prefill | None = None,
) -> tuple[Tensor, Tensor]:
    k, v, kv_head = contiguous_slots(k_cache, v_cache)
    cu_q, lens = cu_seqlens_q.contiguous(), seq_lens_k.contiguous()
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    capacity = capacity_for(max_seqlen_k)
    gather = window is None and max_seqlen_q >= GATHER_QUERIES and max_seqlen_k >= GATHER_KEYS
    if gather and lens.shape[0] * row_bytes(capacity, k) <= SCRATCH_BYTES and can_tma_load_keys(q):
        k, v = gather_pages(k, v, table, lens, capacity, kv_head)
        return _forward(
            q, k, v, None, cu_q, lens, max_seqlen_q, max_seqlen_k, scale, window, split, tile, None, out, capacity,
            long=long,
        )  # fmt: skip
    return _forward(
        q, k, v, table, cu_q, lens, max_seqlen_q, max_seqlen_k, scale, window, split, tile, kv_head, out
    )  # fmt: skip


def capacity_for(keys: int) -> int:
    """Keys that `gather_pages` reserves per sequence: `keys` rounded up to blocks."""
    return cdiv(keys, KEY_BLOCK.value) * KEY_BLOCK.value


def row_bytes(capacity: int, k: Tensor) -> int:
    """Bytes of `capacity` keys and values in the shape and dtype of k [.., HK, D]."""
    return 2 * capacity * k.shape[-2] * k.shape[-1] * k.element_size()


def parts_bytes(t: int, h: int, d: int, splits: int) -> int:
    """Bytes of the partial results of all splits of t queries."""
    return 4 * splits * t * h * (d + 1)


def scratch_bytes(q: Tensor, k: Tensor, tokens: int, sequences: int, longest: int) -> int:
    """Most temporary memory in bytes of a call with q [.., H, D] and k [.., HK, D]; see `ops.attention`."""
    (h, d), hk = q.shape[-2:], k.shape[-2]
    each, gathered = row_bytes(capacity_for(longest), k), 0
    if tokens >= GATHER_QUERIES and longest >= GATHER_KEYS and can_tma_load_keys(q):
        gathered = each * min(sequences, SCRATCH_BYTES // each)
    splits, parts = cdiv(longest, ATTENTION_SPLIT), 0
    if splits > 1:
        rows = max(forward_tile(n, d, q.element_size(), family(q)).rows for n in (1, 1 << 20))
        parts = parts_bytes(min(tokens, sequences * max(1, rows * hk // h)), h, d, splits)
    return max(gathered, min(parts, SCRATCH_BYTES))


def can_tma_load_keys(q: Tensor) -> bool:
    """Whether TMA loads contiguous keys of q's dtype and head size."""
    d = q.shape[-1]
    return family(q) == "hopper" and q.element_size() == 2 and d == next_power_of_2(d, 16)
