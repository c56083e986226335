"""policy_loss on GPUs, second pass: adds the sums, extremes and counts of the sequences' segments over the batch.

Order: lane j of LANES adds the sequences j, j + LANES, ..., each the sum of its segments, ascending; lanes are folded
in halves. One program per statistic.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract.orders import SEGMENT
from rlkernel.kernels.triton.common import after_previous, next_power_of_2, options, pdl

SUMS, PARTIAL_COUNTS, EXTREMES = 9, 5, 3
LOSS, RATIO, K1, K3, KL, ENTROPY, TIS, DRIFT, SLOPE = (tl.constexpr(i) for i in range(SUMS))
TOKENS, LOW, HIGH, DUAL, CAPPED = (tl.constexpr(i) for i in range(PARTIAL_COUNTS))
NOT_YET, NUMBER, TENSOR = 0, 1, 2
"""DIVIDE_BY, the divisor of the gradient: not known before the tokens are counted, a number, a tensor."""
_NOT_YET, _TENSOR = tl.constexpr(NOT_YET), tl.constexpr(TENSOR)


def how_divided(
    normalizer: Tensor | None, divisor: float | None, by_tokens: bool, masked: bool, tokens: int, batch: int
) -> tuple[int, float | None]:
    """DIVIDE_BY of a call, and the number if it is NUMBER."""
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
    """Maximum that propagates NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def bounds(cu_seqlens, row, on, T):
    """First token and end of a sequence, clamped to the buffer because a GPU cannot reject a wrong cu_seqlens."""
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + row, mask=on, other=0), 0), T)
    return begin, tl.maximum(tl.minimum(tl.load(cu_seqlens + row + 1, mask=on, other=0), T), begin)


@triton.jit
def segments_of(cu_seqlens, rows, T, B, SEGMENT: tl.constexpr):
    """Number of segments of each sequence, 0 past B, and the slot to which a later segment's index is added."""
    begin, end = bounds(cu_seqlens, rows, rows < B, T)
    return tl.cdiv(end - begin, SEGMENT), B + begin // SEGMENT


@triton.jit
def sequence_sums(partials, rows, segments, later, B):
    """Sums over the segments of each sequence, ascending. partials holds fp32 or int32."""
    total = tl.load(partials + rows, mask=rows < B, other=0)
    for segment in range(1, tl.max(segments, axis=0)):
        more = segment < segments
        # adding 0 past a sequence's last segment could change the sign of a zero, so nothing is added there
        total = tl.where(more, total + tl.load(partials + later + segment, mask=more, other=0), total)
    return total


@triton.jit
def batch_total(partials, counts, cu_seqlens, T, B, mean, SEGMENT: tl.constexpr, LANES: tl.constexpr):
    """Lanes of the sum over the sequences of their sums (means if `mean`, for fp32), the number of counted tokens and
    the number of sequences with a counted token."""
    total = tl.zeros((LANES,), partials.dtype.element_ty)
    tokens = tl.zeros((LANES,), tl.int32)
    sequences = tl.zeros((LANES,), tl.int32)
    for first in range(0, B, LANES):
        rows = first + tl.arange(0, LANES)
        segments, later = segments_of(cu_seqlens, rows, T, B, SEGMENT)
        value = sequence_sums(partials, rows, segments, later, B)
        n = sequence_sums(counts, rows, segments, later, B)
        if value.dtype == tl.float32:  # noqa: SIM102 -- a compile-time condition
            if mean:
                value = tl.math.div_rn(value, tl.maximum(n, 1).to(tl.float32))
        total += value
        tokens += n
        sequences += (n > 0).to(tl.int32)
    return total, tl.sum(tokens, axis=0), tl.sum(sequences, axis=0)


@triton.jit
def batch_top(part, cu_seqlens, T, B, SEGMENT: tl.constexpr, LANES: tl.constexpr):
    """Largest value of all segments; a segment without counted tokens holds -inf."""
    top = tl.full((LANES,), float("-inf"), tl.float32)
    for first in range(0, B, LANES):
        rows = first + tl.arange(0, LANES)
        segments, later = segments_of(cu_seqlens, rows, T, B, SEGMENT)
        top = higher(top, tl.load(part + rows, mask=rows < B, other=float("-inf")))
        for segment in range(1, tl.max(segments, axis=0)):
            top = higher(top, tl.load(part + later + segment, mask=segment < segments, other=float("-inf")))
    return tl.reduce(top, 0, higher)


@triton.jit
def invalid(cu_seqlens, T, B, LANES: tl.constexpr):
    """Whether cu_seqlens does not ascend from 0 to T."""
    decreasing = tl.zeros((LANES,), tl.int32)
    for first in range(0, B, LANES):
        rows = first + tl.arange(0, LANES)
        left = tl.load(cu_seqlens + rows, mask=rows < B, other=0)
        right = tl.load(cu_seqlens + rows + 1, mask=rows < B, other=0)
        decreasing = decreasing | (left > right).to(tl.int32)
    return (tl.load(cu_seqlens) != 0) | (tl.load(cu_seqlens + B) != T) | (tl.max(decreasing, axis=0) > 0)


@triton.jit(do_not_specialize=["T", "B", "slots"])
def batch_kernel(
    cu_seqlens,  # [B + 1] int32
    sums,  # [SUMS, slots]
    counts,  # [PARTIAL_COUNTS, slots] int32
    extremes,  # [EXTREMES, slots]
    normalizer,  # [] fp32
    loss,  # out []
    scale,  # out []: factor of the gradients in the backward pass
    stats,  # out [14]
    totals,  # out [6] int64
    T,
    B,
    slots,
    divisor,
    DIVIDE_BY: tl.constexpr,
    SEQUENCE_MEAN: tl.constexpr,
    BY_TOKENS: tl.constexpr,
    SEGMENT: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs 0 to 6: means, 7: the loss, 8 to 10: extremes, 11 to 14: clipped and capped tokens."""
    after_previous(PDL)
    what = tl.program_id(0)
    if what < 8:
        part = sums + tl.where(what == 7, LOSS, what + RATIO) * slots
        mean = (what == 7) & SEQUENCE_MEAN
        lanes, n, _ = batch_total(part, counts, cu_seqlens, T, B, mean, SEGMENT, LANES)
        total = fold(lanes)
        if what < 7:
            tl.store(stats + what, tl.math.div_rn(total, tl.maximum(n, 1).to(tl.float32)))
        else:
            denominator = (tl.maximum(n, 1) if BY_TOKENS else tl.maximum(B, 1)).to(tl.float32)
            if DIVIDE_BY == _TENSOR:
                denominator = tl.where(n > 0, tl.load(normalizer), denominator)
            elif DIVIDE_BY != _NOT_YET:
                denominator = tl.where(n > 0, divisor, denominator)
            # a GPU cannot raise, so a wrong cu_seqlens makes the loss and every gradient NaN
            broken = invalid(cu_seqlens, T, B, LANES)
            tl.store(loss, tl.where(broken, float("nan"), tl.math.div_rn(total, denominator)))
            factor = 1.0
            if DIVIDE_BY == _NOT_YET:
                factor = tl.math.div_rn(factor, denominator)
            tl.store(scale, tl.where(broken, float("nan"), factor))
    elif what < 11:
        value = batch_top(extremes + (what - 8) * slots, cu_seqlens, T, B, SEGMENT, LANES)
        _, n, _ = batch_total(counts, counts, cu_seqlens, T, B, False, SEGMENT, LANES)
        tl.store(stats + what - 1, tl.where(n > 0, tl.where(what == 8, -value, value), 0.0))
    else:
        part = counts + (what - 11 + LOW) * slots
        lanes, n, sequences = batch_total(part, counts, cu_seqlens, T, B, False, SEGMENT, LANES)
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
    """Writes loss, scale, statistics and counts of the batch from the partial sums of the segments."""
    batch = cu_seqlens.shape[0] - 1
    lanes = min(SEGMENT, next_power_of_2(batch))
    batch_kernel[(15,)](
        cu_seqlens, sums, counts, extremes, normalizer, loss, scale, stats, totals, tokens, batch, sums.shape[1],
        divisor, DIVIDE_BY=divide_by, SEQUENCE_MEAN=sequence_mean, BY_TOKENS=by_tokens, SEGMENT=SEGMENT, LANES=lanes,
        num_warps=max(1, lanes // 32), **pdl(loss), **options(),
    )  # fmt: skip
