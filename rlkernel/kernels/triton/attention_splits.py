"""Split-KV of attention on GPUs: exact division, the merge of two splits, the kernel that merges stored splits.

`lse2` is the log-sum-exp in base 2. cu_seqlens and block tables are clamped here, because a GPU kernel cannot raise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel.contract.orders import ATTENTION_BLOCK
from rlkernel.kernels.triton.common import LN2, after_previous, exp2, log2
from rlkernel.kernels.triton.launch import direct

NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
KEY_BLOCK = tl.constexpr(ATTENTION_BLOCK)


@triton.jit
def divide_exact(x, y):
    """x / y, correctly rounded for |x| >= 2^-100 and y [ROWS] between 2^-1 and 2^60; one reciprocal per row.

    Two Newton steps on the quotient with a correctly rounded reciprocal equal tl.div_rn at a quarter of its cost. The
    remainder of an infinite quotient is NaN; the first approximation is returned then.
    """
    r = tl.div_rn(1.0, y)[:, None]
    y = y[:, None]
    about = x * r
    near = tl.fma(tl.fma(-about, y, x), r, about)
    near = tl.fma(tl.fma(-near, y, x), r, near)
    return tl.where(near == near, near, about)


@triton.jit
def normalised(acc, m, l):
    """(o, lse2) of a split from its running sums; (0, -inf) for a row that saw none of its keys."""
    unseen = l == 0.0
    o = tl.where(unseen[:, None], 0.0, divide_exact(acc, tl.where(unseen, 1.0, l)))
    return o, tl.where(unseen, NEGATIVE_INFINITY, m + log2(l))


@triton.jit
def merge_splits(o, lse2, o_split, lse2_split):
    """Merges a normalised split into the earlier ones; an empty side leaves the other unchanged."""
    high = tl.maximum(lse2, lse2_split)
    w = exp2(lse2 - high)
    w_split = exp2(lse2_split - high)
    total = w + w_split
    both = divide_exact(tl.fma(o, w[:, None], o_split * w_split[:, None]), total)
    first = lse2 == NEGATIVE_INFINITY
    none = lse2_split == NEGATIVE_INFINITY
    o = tl.where(none[:, None], o, tl.where(first[:, None], o_split, both))
    return o, tl.where(none, lse2, tl.where(first, lse2_split, high + log2(total)))


@triton.jit
def first_visible_key(keys, queries, window, HAS_WINDOW: tl.constexpr):
    """First key of the first block that a query of the sequence sees."""
    if HAS_WINDOW:
        return max(0, keys - queries - window + 1) // KEY_BLOCK * KEY_BLOCK
    else:
        return 0


@triton.jit
def sequence_bounds(borders, sequence, TOTAL):
    """First row and number of rows of a sequence, clamped to the buffer; the number may be negative."""
    first = max(min(tl.load(borders + sequence), TOTAL), 0)
    return first, max(min(tl.load(borders + sequence + 1), TOTAL), 0) - first


@triton.jit
def clamp_page(page, PAGES):
    """The page number, clamped to the pages of the cache."""
    return tl.maximum(tl.minimum(page, PAGES - 1), 0)


@direct
@triton.jit(do_not_specialize=["T", "window", "SPLITS"])
def merge_kernel(
    o_parts,  # [splits, T, H, D] fp32
    lse_parts,  # [splits, T, H] base 2
    cu_q,
    lens,
    out,  # [T, H, D]
    lse,  # [T, H] natural log
    T,
    window,
    SPLIT,
    SPLITS,
    H: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    LENGTHS: tl.constexpr,  # `lens` holds keys [B] instead of cumulative keys [B + 1]
    PDL: tl.constexpr,
):
    """Merges the splits of HEADS heads of one query, ascending, with `merge_splits`."""
    after_previous(PDL)
    token = tl.program_id(0)
    sequence = tl.program_id(2)
    q_first, queries = sequence_bounds(cu_q, sequence, T)
    if token >= queries:
        return
    if LENGTHS:
        keys = tl.load(lens + sequence)
    else:
        keys = tl.load(lens + sequence + 1) - tl.load(lens + sequence)
    if first_visible_key(keys, queries, window, HAS_WINDOW) // SPLIT == (keys - 1) // SPLIT:
        return  # the sequence has one split; attention_kernel stored its result
    position = keys - queries + token
    if HAS_WINDOW:
        first = max(0, position - window + 1) // SPLIT
    else:
        first = 0
    column = tl.arange(0, BLOCK_D)
    stop = min(position // SPLIT + 1, SPLITS)
    for head_group in tl.range(tl.program_id(1), tl.cdiv(H, HEADS), tl.num_programs(1)):
        head = head_group * HEADS + tl.arange(0, HEADS)
        inside = (head < H)[:, None] & (column < D)[None, :]
        row = (tl.cast(q_first, tl.int64) + token) * H + head
        at = (row * D)[:, None] + column[None, :]
        o = tl.zeros((HEADS, BLOCK_D), tl.float32)
        lse2 = tl.full((HEADS,), float("-inf"), tl.float32)
        for batch in tl.range(first, stop, 8):
            parts = ()  # issues eight loads before the first merge
            for i in tl.static_range(8):
                begin = tl.cast(batch + i, tl.int64) * T * H
                o_split = tl.load(o_parts + begin * D + at, mask=inside & (batch + i < stop), other=0.0)
                lse2_split = tl.load(lse_parts + begin + row, mask=(head < H) & (batch + i < stop), other=0.0)
                parts = parts + ((o_split, lse2_split),)
            for i in tl.static_range(8):
                if batch + i < stop:
                    o, lse2 = merge_splits(o, lse2, parts[i][0], parts[i][1])
        tl.store(lse + row, lse2 * LN2, mask=head < H)
        tl.store(out + at, o.to(out.dtype.element_ty), mask=inside)
