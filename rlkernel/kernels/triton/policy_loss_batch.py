"""policy_loss in Triton, second pass: sums, extremes and counts of the sequences' segments, added over the batch.

Order: lane j of LANES takes the sequences j, j + LANES, ..., each the sum of its segments, ascending; lanes are folded
in halves. One program a statistic; what bounds it is latency, so the loads of UNROLL sequences a lane run together.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract.orders import SEGMENT
from rlkernel.kernels.triton.common import next_power_of_2, options, pdl

SUMS, PARTIAL_COUNTS, EXTREMES = 9, 5, 3
LOSS, RATIO, K1, K3, KL, ENTROPY, TIS, DRIFT, SLOPE = (tl.constexpr(i) for i in range(SUMS))
TOKENS, LOW, HIGH, DUAL, CAPPED = (tl.constexpr(i) for i in range(PARTIAL_COUNTS))
NOT_YET, NUMBER, TENSOR = 0, 1, 2
"""What the gradient is divided by: nothing before the counted tokens are known, a number, a tensor."""
_NOT_YET, _TENSOR = tl.constexpr(NOT_YET), tl.constexpr(TENSOR)


def how_divided(
    normalizer: Tensor | None, divisor: float | None, by_tokens: bool, masked: bool, tokens: int, batch: int
) -> tuple[int, float | None]:
    """What the gradient is divided by, one of those three, and the number where it is one."""
    if normalizer is not None:
        return TENSOR, divisor
    if divisor is not None:
        return NUMBER, divisor
    return NOT_YET if by_tokens and masked else NUMBER, float(max(1, tokens if by_tokens else batch))


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def fold(x):
    """Sum of x [2^n] in halves."""
    for _ in tl.static_range(16):
        if x.shape[0] > 1:
            x = tl.sum(tl.reshape(x, (2, x.shape[0] // 2)), axis=0)
    return tl.sum(x, axis=0)


@triton.jit
def higher(a, b):
    """The larger one; NaN if one of them is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def bounds(cu_seqlens, row, on, T):
    """First token of a sequence and the one behind its last, inside the buffer whatever cu_seqlens holds."""
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + row, mask=on, other=0), 0), T)
    return begin, tl.maximum(tl.minimum(tl.load(cu_seqlens + row + 1, mask=on, other=0), T), begin)


@triton.jit
def some_rows(cu_seqlens, first, T, B, SEGMENT: tl.constexpr, LANES: tl.constexpr):
    """LANES sequences from `first` on: their numbers, segments (at most 1 past the last), and places of segment 0."""
    rows = first + tl.arange(0, LANES)
    begin, end = bounds(cu_seqlens, rows, rows < B, T)
    return rows, tl.cdiv(end - begin, SEGMENT), B + begin // SEGMENT


@triton.jit
def with_further(total, partials, segments, later, most):
    """`total`, of first segments, and the other segments of the same sequences, ascending."""
    for segment in range(1, most):
        more = segment < segments
        # Not even the sign of a zero may depend on the other sequences: where nothing is left, nothing is added.
        total = tl.where(more, total + tl.load(partials + later + segment, mask=more, other=0), total)
    return total


@triton.jit
def of_sequence(value, n, mean):
    """A sequence's sum or, where `mean`, its sum over its counted tokens; counts as they are."""
    if value.dtype == tl.float32:  # noqa: SIM102 -- known when compiling, the other is not
        if mean:
            value = tl.math.div_rn(value, tl.maximum(n, 1).to(tl.float32))
    return value


@triton.jit
def batch_total(
    partials, counts, cu_seqlens, T, B, mean, SEGMENT: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr
):  # fmt: skip
    """Lanes of the sum over the sequences of their sums (where `mean`: of their means), and their counted tokens.

    partials holds fp32 or int32. Also how many sequences have a counted token, and whether borders fall.
    """
    total = tl.zeros((LANES,), partials.dtype.element_ty)
    tokens = tl.zeros((LANES,), tl.int32)
    sequences = tl.zeros((LANES,), tl.int32)
    longest = tl.zeros((LANES,), tl.int32)
    falls = tl.zeros((LANES,), tl.int32)
    for start in range(0, B, LANES * UNROLL):
        values, ns, sizes = (), (), ()
        for u in tl.static_range(UNROLL):  # all loads are under way before the first addition waits
            rows = start + u * LANES + tl.arange(0, LANES)
            on = rows < B
            left = tl.load(cu_seqlens + rows, mask=on, other=0)
            right = tl.load(cu_seqlens + rows + 1, mask=on, other=0)
            falls = falls | (left > right).to(tl.int32)
            values = values + (tl.load(partials + rows, mask=on, other=0),)
            ns = ns + (tl.load(counts + rows, mask=on, other=0),)
            sizes = sizes + (tl.maximum(tl.minimum(right, T), 0) - tl.minimum(tl.maximum(left, 0), T),)
        for u in tl.static_range(UNROLL):
            total += of_sequence(values[u], ns[u], mean)
            tokens += ns[u]
            sequences += (ns[u] > 0).to(tl.int32)
            longest = tl.maximum(longest, sizes[u])
    most = tl.cdiv(tl.max(longest, axis=0), SEGMENT)
    if most > 1:  # all that was of first segments alone
        total = tl.zeros((LANES,), partials.dtype.element_ty)
        tokens = tl.zeros((LANES,), tl.int32)
        sequences = tl.zeros((LANES,), tl.int32)
        for first in range(0, B, LANES):
            rows, segments, later = some_rows(cu_seqlens, first, T, B, SEGMENT, LANES)
            value = tl.load(partials + rows, mask=rows < B, other=0)
            n = tl.load(counts + rows, mask=rows < B, other=0)
            value = with_further(value, partials, segments, later, most)
            n = with_further(n, counts, segments, later, most)
            total += of_sequence(value, n, mean)
            tokens += n
            sequences += (n > 0).to(tl.int32)
    return total, tl.sum(tokens, axis=0), tl.sum(sequences, axis=0), tl.max(falls, axis=0)


@triton.jit
def batch_top(
    part, counts, cu_seqlens, T, B, SEGMENT: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr
):  # fmt: skip
    """Largest partial value; 0 where no token counts."""
    top = tl.full((LANES,), float("-inf"), tl.float32)
    some = tl.zeros((LANES,), tl.int32)
    longest = tl.zeros((LANES,), tl.int32)
    for start in range(0, B, LANES * UNROLL):
        for u in tl.static_range(UNROLL):
            rows = start + u * LANES + tl.arange(0, LANES)
            begin, end = bounds(cu_seqlens, rows, rows < B, T)
            longest = tl.maximum(longest, end - begin)
            top = higher(top, tl.load(part + rows, mask=rows < B, other=float("-inf")))
            some = some | tl.load(counts + rows, mask=rows < B, other=0)
    most = tl.cdiv(tl.max(longest, axis=0), SEGMENT)
    if most > 1:
        for first in range(0, B, LANES):
            _, segments, later = some_rows(cu_seqlens, first, T, B, SEGMENT, LANES)
            for segment in range(1, most):
                more = segment < segments
                top = higher(top, tl.load(part + later + segment, mask=more, other=float("-inf")))
                some = some | tl.load(counts + later + segment, mask=more, other=0)
    return tl.where(tl.max(some, axis=0) > 0, tl.reduce(top, 0, higher), 0.0)


@triton.jit(do_not_specialize=["T", "B", "places"])
def batch_kernel(
    cu_seqlens,  # [B + 1] int32
    sums,  # [SUMS, places]
    counts,  # [PARTIAL_COUNTS, places] int32
    extremes,  # [EXTREMES, places]
    normalizer,  # [] fp32
    loss,  # out []
    scale,  # out []: what the gradients are multiplied by in the backward pass
    stats,  # out [14]
    totals,  # out [6] int64
    T,
    B,
    places,
    divisor,
    DIVIDE_BY: tl.constexpr,
    SEQUENCE_MEAN: tl.constexpr,
    BY_TOKENS: tl.constexpr,
    SEGMENT: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program each: 0 to 6 means, 7 the loss, 8 to 10 extremes, 11 to 14 clipped and capped tokens."""
    what = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if what < 8:
        part = sums + tl.where(what == 7, LOSS, what + RATIO) * places
        mean = (what == 7) & SEQUENCE_MEAN
        lanes, n, _, falls = batch_total(part, counts, cu_seqlens, T, B, mean, SEGMENT, LANES, UNROLL)
        total = fold(lanes)
        if what < 7:
            tl.store(stats + what, tl.math.div_rn(total, tl.maximum(n, 1).to(tl.float32)))
        else:
            denominator = (tl.maximum(n, 1) if BY_TOKENS else tl.maximum(B, 1)).to(tl.float32)
            if DIVIDE_BY == _TENSOR:
                denominator = tl.where(n > 0, tl.load(normalizer), denominator)
            elif DIVIDE_BY != _NOT_YET:
                denominator = tl.where(n > 0, divisor, denominator)
            # A GPU cannot raise: borders that do not fit make the loss and every gradient NaN.
            broken = (tl.load(cu_seqlens) != 0) | (tl.load(cu_seqlens + B) != T) | (falls > 0)
            tl.store(loss, tl.where(broken, float("nan"), tl.math.div_rn(total, denominator)))
            factor = 1.0
            if DIVIDE_BY == _NOT_YET:
                factor = tl.math.div_rn(factor, denominator)
            tl.store(scale, tl.where(broken, float("nan"), factor))
    elif what < 11:
        value = batch_top(extremes + (what - 8) * places, counts, cu_seqlens, T, B, SEGMENT, LANES, UNROLL)
        tl.store(stats + what - 1, tl.where(what == 8, -value, value))
    else:
        part = counts + (what - 11 + LOW) * places
        lanes, n, sequences, _ = batch_total(part, counts, cu_seqlens, T, B, False, SEGMENT, LANES, UNROLL)
        total = tl.sum(lanes, axis=0)
        tl.store(totals + what - 9, total.to(tl.int64))
        tl.store(stats + what - 1, tl.math.div_rn(total.to(tl.float32), tl.maximum(n, 1).to(tl.float32)))
        if what == 11:
            tl.store(totals, n.to(tl.int64))
            tl.store(totals + 1, sequences.to(tl.int64))


# ---- launchers -------------------------------------------------------------------------------------------------------


def add_over_batch(
    cu_seqlens: Tensor, sums: Tensor, counts: Tensor, extremes: Tensor, normalizer: Tensor | None,
    loss: Tensor, scale: Tensor, stats: Tensor, totals: Tensor, tokens: int, divisor: float | None,
    divide_by: int, sequence_mean: bool, by_tokens: bool,
) -> None:  # fmt: skip
    """Loss, scale, statistics and counts of the batch, from what each segment of each sequence holds."""
    batch = cu_seqlens.shape[0] - 1
    lanes = min(SEGMENT, next_power_of_2(batch))
    batch_kernel[(15,)](
        cu_seqlens, sums, counts, extremes, normalizer, loss, scale, stats, totals, tokens, batch, sums.shape[1],
        divisor, DIVIDE_BY=divide_by, SEQUENCE_MEAN=sequence_mean, BY_TOKENS=by_tokens, SEGMENT=SEGMENT, LANES=lanes,
        UNROLL=1 if batch <= lanes else UNROLL,
        num_warps=max(1, lanes // 32), **pdl(loss), **options(),
    )  # fmt: skip


UNROLL = 8
"""Sequences a lane whose loads are under way at once."""
