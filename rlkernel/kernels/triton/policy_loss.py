"""policy_loss in Triton: one pass over the tokens for loss, statistics and gradients, a small kernel for the batch.

GPU order of a sum: a sequence is cut into segments of SEGMENT tokens from its first one; lane j of LANES takes tokens
j, j + LANES, ... of a segment, ascending; lanes are folded in halves; segments are added ascending. Sequences are added
the same way, over SEGMENT lanes. A fold adds pairs, so no layout and no number of warps can change a bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract.orders import SEGMENT
from rlkernel.kernels.policy_loss import (
    CISPO,
    CLIPPED,
    COUNTS,
    KL_TYPES,
    REINFORCE,
    STATS,
    divides_by_tokens,
    form_code,
    sequence_mean,
)
from rlkernel.kernels.triton.aot import Variant
from rlkernel.kernels.triton.common import LOG2E, exp2, next_power_of_2, on_device, options

_CLIPPED, _CISPO, _REINFORCE = tl.constexpr(CLIPPED), tl.constexpr(CISPO), tl.constexpr(REINFORCE)
LANES = 128
SUMS, PARTIAL_COUNTS = 9, 5
LOSS, RATIO, K1, K3, KL, ENTROPY, TIS, DRIFT, SLOPE = (tl.constexpr(i) for i in range(SUMS))
TOKENS, LOW, HIGH, DUAL, CAPPED = (tl.constexpr(i) for i in range(PARTIAL_COUNTS))
PROGRAMS = 2048
"""Programs that the sequences of a small batch are spread over."""
COUNT_HERE = 8192
"""Average tokens a sequence up to which every program counts its whole sequence; above, a pass of its own does."""
NOT_YET, NUMBER, TENSOR = 0, 1, 2
"""What the gradient is divided by: nothing before the counted tokens are known, a number, a tensor."""
_NOT_YET, _TENSOR = tl.constexpr(NOT_YET), tl.constexpr(TENSOR)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def fold(x):
    """Sum of x [2^n] in halves."""
    for _ in tl.static_range(16):
        if x.shape[0] > 1:
            x = tl.sum(tl.reshape(x, (2, x.shape[0] // 2)), axis=0)
    return tl.sum(x, axis=0)


@triton.jit
def phi(x, power):
    """e^x - 1 - x without cancellation near 0, with power = e^x."""
    p = tl.fma(x, 2.7557319e-6, 2.4801587e-5)
    p = tl.fma(p, x, 1.9841270e-4)
    p = tl.fma(p, x, 1.3888889e-3)
    p = tl.fma(p, x, 8.3333333e-3)
    p = tl.fma(p, x, 4.1666667e-2)
    p = tl.fma(p, x, 1.6666667e-1)
    p = tl.fma(p, x, 0.5)
    return tl.where(tl.abs(x) <= 0.5, (x * x) * p, (power - 1.0) - x)


@triton.jit
def higher(a, b):
    """The larger one; NaN if one of them is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def bounds(cu_seqlens, row, on, T):
    """First token of a sequence and the one behind its last, inside the buffer whatever cu_seqlens holds."""
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + row, mask=on, other=0), 0), T)
    return begin, tl.minimum(tl.load(cu_seqlens + row + 1, mask=on, other=0), T)


@triton.jit
def counted_at(mask, t, inside, HAS_MASK: tl.constexpr):
    """Which of the tokens t count."""
    on = inside
    if HAS_MASK:
        on = tl.load(mask + t, mask=inside, other=0) != 0
    return on


@triton.jit
def place_of(row, segment, begin, B, SEGMENT: tl.constexpr):
    """Where the partial sum of a segment lies: first segments at [0, B), others behind; never two at one place."""
    return tl.where(segment == 0, row, B + begin // SEGMENT + segment)


@triton.jit
def sequence_total(partials, row, begin, segments, B, SEGMENT: tl.constexpr):
    """Sum over the segments of one sequence, ascending."""
    total = tl.load(partials + row)
    for segment in range(1, segments):
        total += tl.load(partials + B + begin // SEGMENT + segment)
    return total


@triton.jit(do_not_specialize=["T", "B", "PER_ROW"])
def count_kernel(
    logp,  # [T]
    old_logp,  # [T]
    cu_seqlens,  # [B + 1] int32
    mask,  # [T] uint8
    log_ratios,  # out [places]: sums of logp - old_logp
    counts,  # out [places] int32
    T,
    B,
    PER_ROW,
    SEQUENCE_RATIO: tl.constexpr,
    HAS_MASK: tl.constexpr,
    SEGMENT: tl.constexpr,
    LANES: tl.constexpr,
):
    """What a pass of its own must find first: counted tokens of each segment, and its sum of log-ratios."""
    row = tl.program_id(0) // PER_ROW
    begin, end = bounds(cu_seqlens, row, True, T)
    lane = tl.arange(0, LANES)
    for segment in range(tl.program_id(0) % PER_ROW, tl.cdiv(end - begin, SEGMENT), PER_ROW):
        total = tl.zeros((LANES,), tl.float32)
        n = tl.zeros((LANES,), tl.int32)
        start = begin + segment * SEGMENT
        for first in range(start, min(start + SEGMENT, end), LANES):
            t = first + lane
            on = counted_at(mask, t, t < end, HAS_MASK)
            n += on.to(tl.int32)
            if SEQUENCE_RATIO:
                total += tl.load(logp + t, mask=on, other=0.0) - tl.load(old_logp + t, mask=on, other=0.0)
        place = place_of(row, segment, begin, B, SEGMENT)
        tl.store(counts + place, tl.sum(n, axis=0))
        if SEQUENCE_RATIO:
            tl.store(log_ratios + place, fold(total))


@triton.jit(do_not_specialize=["T", "B", "PER_ROW", "places"])
def token_kernel(
    logp,  # [T] fp32, as all vectors of tokens
    old_logp,
    advantages,  # [B] or [T]
    cu_seqlens,  # [B + 1] int32
    mask,  # [T] uint8
    ref_logp,
    entropy,
    rollout_logp,
    normalizer,  # [] fp32
    log_ratios,  # [places], of count_kernel
    row_counts,  # [places] int32, of count_kernel
    dlogp,  # out [T]
    dentropy,  # out [T]
    sums,  # out [SUMS, places]
    counts,  # out [PARTIAL_COUNTS, places] int32
    extremes,  # out [3, places]: -min ratio, max ratio, max drift
    T,
    B,
    PER_ROW,
    places,
    low,
    high,
    dual,
    kl_coef,
    entropy_coef,
    tis_cap,
    divisor,
    FORM: tl.constexpr,
    KL_TYPE: tl.constexpr,
    SEQUENCE_RATIO: tl.constexpr,
    SEQUENCE_MEAN: tl.constexpr,
    DIVIDE_BY: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_DUAL: tl.constexpr,
    HAS_REF: tl.constexpr,
    HAS_KL: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_BONUS: tl.constexpr,
    HAS_ROLLOUT: tl.constexpr,
    HAS_TIS: tl.constexpr,
    SEGMENT: tl.constexpr,
    LANES: tl.constexpr,
):
    """Sums of the segments PER_ROW apart of one sequence, and the gradients of their tokens.

    Through a sequence's ratio the gradient of a clipped token needs the whole sequence: dlogp is then the gradient of
    the KL alone, and spread_kernel finishes it.
    """
    row = tl.program_id(0) // PER_ROW
    begin, end = bounds(cu_seqlens, row, True, T)
    segments = tl.cdiv(end - begin, SEGMENT)
    lane = tl.arange(0, LANES)
    PARTS: tl.constexpr = SEGMENT // LANES
    THROUGH_MEAN: tl.constexpr = SEQUENCE_RATIO and FORM == _CLIPPED
    zero = tl.zeros((LANES,), tl.float32)
    none = tl.zeros((LANES,), tl.int32)
    for segment in range(tl.program_id(0) % PER_ROW, segments, PER_ROW):
        start = begin + segment * SEGMENT
        # All loads of the segment are under way before the first of them is waited for.
        flags, new, old = (), (), ()
        for i in tl.static_range(PARTS):
            t = start + i * LANES + lane
            flags = flags + (counted_at(mask, t, t < end, HAS_MASK),)
            new = new + (tl.load(logp + t, mask=t < end, other=0.0),)
            old = old + (tl.load(old_logp + t, mask=t < end, other=0.0),)

        shared_ratio = 1.0
        weight = 1.0
        if SEQUENCE_RATIO or SEQUENCE_MEAN:
            if HAS_COUNTS:
                n = sequence_total(row_counts, row, begin, segments, B, SEGMENT)
            elif HAS_MASK:
                here = none
                if segments == 1:
                    for i in tl.static_range(PARTS):
                        here += flags[i].to(tl.int32)
                else:
                    for first in range(begin, end, LANES * PARTS):
                        for i in tl.static_range(PARTS):
                            t = first + i * LANES + lane
                            here += counted_at(mask, t, t < end, True).to(tl.int32)
                n = tl.sum(here, axis=0)
            else:
                n = end - begin
            share = tl.maximum(n, 1).to(tl.float32)
            if SEQUENCE_RATIO:
                total = sequence_total(log_ratios, row, begin, segments, B, SEGMENT)
                shared_ratio = exp2(tl.math.div_rn(total, share) * LOG2E)
            if SEQUENCE_MEAN:
                weight = tl.math.div_rn(weight, share)
        if DIVIDE_BY == _TENSOR:
            weight = tl.math.div_rn(weight, tl.load(normalizer))
        elif DIVIDE_BY != _NOT_YET:
            weight = tl.math.div_rn(weight, divisor)

        s_loss, s_ratio, s_k1, s_k3, s_kl, s_entropy = zero, zero, zero, zero, zero, zero
        s_tis, s_drift, s_slope = zero, zero, zero
        n_on_low, n_high_dual, n_capped = none, none, none  # two counts a word: at most SEGMENT each
        negated_min = zero + float("-inf")
        ratio_max = zero + float("-inf")
        drift_max = zero + float("-inf")
        for i in tl.static_range(PARTS):
            t = start + i * LANES + lane
            on = flags[i]
            lp = tl.where(on, new[i], 0.0)
            before = tl.where(on, old[i], 0.0)
            log_ratio = lp - before
            power = exp2(log_ratio * LOG2E)
            ratio = shared_ratio + zero if SEQUENCE_RATIO else power
            if PER_TOKEN:
                a = tl.load(advantages + t, mask=on, other=0.0)
            else:
                a = tl.load(advantages + row) + zero
            cut_low = on & (ratio < low)
            cut_high = on & (ratio > high)
            cut_dual = on & (ratio > dual)
            if FORM == _CLIPPED:
                cut_low = cut_low & (a < 0.0)
                cut_high = cut_high & (a > 0.0)
                cut_dual = cut_dual & (a < 0.0)
                cut = cut_low | cut_high
                used = ratio
                if HAS_DUAL:
                    cut = cut | cut_dual
                    used = tl.where(cut_dual, dual, used)
                used = tl.where(cut_low, low, tl.where(cut_high, high, used))
                loss = -(used * a)
                slope = tl.where(cut, 0.0, loss)
            elif FORM == _CISPO:
                slope = -(tl.where(cut_low, low, tl.where(cut_high, high, ratio)) * a)
                loss = slope * lp
            else:
                slope = -a
                loss = slope * lp
            if HAS_ROLLOUT:
                rollout = tl.load(rollout_logp + t, mask=on, other=0.0)
                drift = tl.abs(lp - rollout)
                s_drift += drift
                drift_max = higher(drift_max, tl.where(on, drift, float("-inf")))
                if HAS_TIS:
                    tis = exp2((before - rollout) * LOG2E)
                    capped = tis > tis_cap
                    tis = tl.where(capped, tis_cap, tis)
                    loss = loss * tis
                    slope = slope * tis
                    n_capped += (on & capped).to(tl.int32)
                    s_tis += tl.where(on, tis, 0.0)
            gradient = slope
            if HAS_REF:
                d = lp - tl.load(ref_logp + t, mask=on, other=0.0)
                if KL_TYPE == 0:
                    kl = d
                    dkl = zero + 1.0
                elif KL_TYPE == 1:
                    kl = 0.5 * (d * d)
                    dkl = d
                else:
                    kl = phi(-d, exp2(-d * LOG2E))
                    dkl = d - kl
                s_kl += kl
                if HAS_KL:
                    loss = tl.fma(zero + kl_coef, kl, loss)
                    gradient = dkl if THROUGH_MEAN else tl.fma(zero + kl_coef, dkl, gradient)
            if HAS_ENTROPY:
                h = tl.load(entropy + t, mask=on, other=0.0)
                s_entropy += h
                if HAS_BONUS:
                    loss = tl.fma(zero - entropy_coef, h, loss)
                    tl.store(dentropy + t, tl.where(on, -entropy_coef * weight, 0.0), mask=t < end)
            if THROUGH_MEAN:
                s_slope += tl.where(on, slope, 0.0)
                if HAS_KL:
                    tl.store(dlogp + t, gradient, mask=t < end)
            else:
                tl.store(dlogp + t, tl.where(on, gradient * weight, 0.0), mask=t < end)
            s_loss += tl.where(on, loss, 0.0)
            s_ratio += tl.where(on, ratio, 0.0)
            s_k1 -= log_ratio
            s_k3 += phi(log_ratio, power)
            n_on_low += tl.where(on, 1, 0)
            if FORM != _REINFORCE:
                n_on_low += tl.where(cut_low, 65536, 0)
                n_high_dual += tl.where(cut_high, 1, 0)
            if FORM == _CLIPPED and HAS_DUAL:
                n_high_dual += tl.where(cut_dual, 65536, 0)
            negated_min = higher(negated_min, tl.where(on, -ratio, float("-inf")))
            ratio_max = higher(ratio_max, tl.where(on, ratio, float("-inf")))

        place = place_of(row, segment, begin, B, SEGMENT)
        to = sums + place
        tl.store(to + LOSS * places, fold(s_loss))
        tl.store(to + RATIO * places, fold(s_ratio))
        tl.store(to + K1 * places, fold(s_k1))
        tl.store(to + K3 * places, fold(s_k3))
        tl.store(to + KL * places, fold(s_kl))
        tl.store(to + ENTROPY * places, fold(s_entropy))
        tl.store(to + TIS * places, fold(s_tis))
        tl.store(to + DRIFT * places, fold(s_drift))
        tl.store(to + SLOPE * places, fold(s_slope))
        on_low = tl.sum(n_on_low, axis=0)
        high_dual = tl.sum(n_high_dual, axis=0)
        to = counts + place
        tl.store(to + TOKENS * places, on_low & 65535)
        tl.store(to + LOW * places, on_low >> 16)
        tl.store(to + HIGH * places, high_dual & 65535)
        tl.store(to + DUAL * places, high_dual >> 16)
        tl.store(to + CAPPED * places, tl.sum(n_capped, axis=0))
        to = extremes + place
        tl.store(to, tl.reduce(negated_min, 0, higher))
        tl.store(to + places, tl.reduce(ratio_max, 0, higher))
        tl.store(to + 2 * places, tl.reduce(drift_max, 0, higher))


@triton.jit(do_not_specialize=["T", "B", "PER_ROW"])
def spread_kernel(
    cu_seqlens,  # [B + 1] int32
    mask,  # [T] uint8
    normalizer,  # [] fp32
    slopes,  # [places]
    counts,  # [places] int32
    dlogp,  # [T] in and out
    T,
    B,
    PER_ROW,
    kl_coef,
    divisor,
    SEQUENCE_MEAN: tl.constexpr,
    DIVIDE_BY: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_KL: tl.constexpr,
    SEGMENT: tl.constexpr,
    LANES: tl.constexpr,
):
    """dlogp = (mean slope of the sequence + kl_coef dlogp) times the sequence's weight, where a token counts."""
    row = tl.program_id(0) // PER_ROW
    begin, end = bounds(cu_seqlens, row, True, T)
    segments = tl.cdiv(end - begin, SEGMENT)
    lane = tl.arange(0, LANES)
    for segment in range(tl.program_id(0) % PER_ROW, segments, PER_ROW):
        share = tl.maximum(sequence_total(counts, row, begin, segments, B, SEGMENT), 1).to(tl.float32)
        mean = tl.math.div_rn(sequence_total(slopes, row, begin, segments, B, SEGMENT), share)
        mean += tl.zeros((LANES,), tl.float32)
        weight = 1.0
        if SEQUENCE_MEAN:
            weight = tl.math.div_rn(weight, share)
        if DIVIDE_BY == _TENSOR:
            weight = tl.math.div_rn(weight, tl.load(normalizer))
        elif DIVIDE_BY != _NOT_YET:
            weight = tl.math.div_rn(weight, divisor)
        start = begin + segment * SEGMENT
        for first in range(start, min(start + SEGMENT, end), LANES):
            t = first + lane
            on = counted_at(mask, t, t < end, HAS_MASK)
            g = mean
            if HAS_KL:
                g = tl.fma(tl.zeros((LANES,), tl.float32) + kl_coef, tl.load(dlogp + t, mask=on, other=0.0), mean)
            tl.store(dlogp + t, tl.where(on, g * weight, 0.0), mask=t < end)


@triton.jit
def some_rows(cu_seqlens, first, T, B, SEGMENT: tl.constexpr, LANES: tl.constexpr):
    """LANES sequences from `first` on: their numbers, segments (0 past the last sequence), and places of segment 0."""
    rows = first + tl.arange(0, LANES)
    begin, end = bounds(cu_seqlens, rows, rows < B, T)
    return rows, tl.where(rows < B, tl.cdiv(tl.maximum(end - begin, 0), SEGMENT), 0), B + begin // SEGMENT


@triton.jit
def rows_total(partials, rows, segments, later):
    """Sums of the sequences `rows`, each over its segments, ascending."""
    total = tl.load(partials + rows, mask=segments > 0, other=0)
    for segment in range(1, tl.max(segments, axis=0)):
        more = segment < segments
        # Not even the sign of a zero may depend on the other sequences: where nothing is left, nothing is added.
        total = tl.where(more, total + tl.load(partials + later + segment, mask=more, other=0), total)
    return total


@triton.jit
def batch_total(
    partials, counts, cu_seqlens, T, B, MEAN: tl.constexpr, SEGMENT: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Sum over the sequences of their sums (MEAN: of their means), and the number of counted tokens.

    Lane j takes the sequences j, j + LANES, ..., ascending.
    """
    total = tl.zeros((LANES,), tl.float32)
    tokens = tl.zeros((LANES,), tl.int64)
    for first in range(0, B, LANES):
        rows, segments, later = some_rows(cu_seqlens, first, T, B, SEGMENT, LANES)
        value = rows_total(partials, rows, segments, later)
        n = rows_total(counts, rows, segments, later)
        if MEAN:
            value = tl.math.div_rn(value, tl.maximum(n, 1).to(tl.float32))
        total += value
        tokens += n.to(tl.int64)
    return fold(total), tl.sum(tokens, axis=0)


@triton.jit(do_not_specialize=["T", "B", "places"])
def batch_kernel(
    cu_seqlens,  # [B + 1] int32
    sums,  # [SUMS, places]
    counts,  # [PARTIAL_COUNTS, places] int32
    extremes,  # [3, places]
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
):
    """One program each: 0 to 6 means, 7 to 9 extremes, 10 to 13 clipped and capped tokens, 14 the loss, 15 counts."""
    what = tl.program_id(0)
    if what < 7:
        part = sums + (what + RATIO) * places
        total, n = batch_total(part, counts, cu_seqlens, T, B, False, SEGMENT, LANES)
        tl.store(stats + what, tl.math.div_rn(total, tl.maximum(n, 1).to(tl.float32)))
    elif what < 10:
        part = extremes + (what - 7) * places
        top = tl.full((LANES,), float("-inf"), tl.float32)
        some = tl.zeros((LANES,), tl.int32)
        for first in range(0, B, LANES):
            rows, segments, later = some_rows(cu_seqlens, first, T, B, SEGMENT, LANES)
            some = some | rows_total(counts, rows, segments, later)
            top = higher(top, tl.load(part + rows, mask=segments > 0, other=float("-inf")))
            for segment in range(1, tl.max(segments, axis=0)):
                top = higher(top, tl.load(part + later + segment, mask=segment < segments, other=float("-inf")))
        value = tl.reduce(top, 0, higher)
        value = tl.where(what == 7, -value, value)
        tl.store(stats + what, tl.where(tl.max(some, axis=0) > 0, value, 0.0))
    elif what < 14:
        hits = tl.zeros((LANES,), tl.int64)
        tokens = tl.zeros((LANES,), tl.int64)
        part = counts + (what - 10 + LOW) * places
        for first in range(0, B, LANES):
            rows, segments, later = some_rows(cu_seqlens, first, T, B, SEGMENT, LANES)
            hits += rows_total(part, rows, segments, later).to(tl.int64)
            tokens += rows_total(counts, rows, segments, later).to(tl.int64)
        total = tl.sum(hits, axis=0)
        n = tl.sum(tokens, axis=0)
        tl.store(totals + what - 8, total)
        tl.store(stats + what, tl.math.div_rn(total.to(tl.float32), tl.maximum(n, 1).to(tl.float32)))
    elif what == 14:
        total, n = batch_total(sums, counts, cu_seqlens, T, B, SEQUENCE_MEAN, SEGMENT, LANES)
        denominator = (tl.maximum(n, 1) if BY_TOKENS else tl.maximum(B, 1)).to(tl.float32)
        if DIVIDE_BY == _TENSOR:
            denominator = tl.where(n > 0, tl.load(normalizer), denominator)
        elif DIVIDE_BY != _NOT_YET:
            denominator = tl.where(n > 0, divisor, denominator)
        broken = (tl.load(cu_seqlens) != 0) | (tl.load(cu_seqlens + B) != T)
        for first in range(0, B, LANES):
            rows = first + tl.arange(0, LANES)
            left = tl.load(cu_seqlens + rows, mask=rows < B, other=0)
            right = tl.load(cu_seqlens + rows + 1, mask=rows < B, other=0)
            broken = broken | (tl.max((left > right).to(tl.int32), axis=0) > 0)
        # A GPU cannot raise: borders that do not fit make the loss and every gradient NaN.
        tl.store(loss, tl.where(broken, float("nan"), tl.math.div_rn(total, denominator)))
        factor = 1.0
        if DIVIDE_BY == _NOT_YET:
            factor = tl.math.div_rn(factor, denominator)
        tl.store(scale, tl.where(broken, float("nan"), factor))
    else:
        tokens = tl.zeros((LANES,), tl.int64)
        sequences = tl.zeros((LANES,), tl.int64)
        for first in range(0, B, LANES):
            rows, segments, later = some_rows(cu_seqlens, first, T, B, SEGMENT, LANES)
            n = rows_total(counts, rows, segments, later)
            tokens += n.to(tl.int64)
            sequences += (n > 0).to(tl.int64)
        tl.store(totals, tl.sum(tokens, axis=0))
        tl.store(totals + 1, tl.sum(sequences, axis=0))


@triton.jit(do_not_specialize=["T"])
def scale_kernel(
    dlogp,  # [T] in and out
    dentropy,  # [T] in and out
    scale,  # []
    dloss,  # []
    T,
    HAS_BONUS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients times scale, then times dloss; nothing is touched where both are 1."""
    s, d = tl.load(scale), tl.load(dloss)
    if (s != 1.0) | (d != 1.0):
        for first in range(tl.program_id(0) * BLOCK, T, tl.num_programs(0) * BLOCK):
            t = first + tl.arange(0, BLOCK)
            tl.store(dlogp + t, (tl.load(dlogp + t, mask=t < T) * s) * d, mask=t < T)
            if HAS_BONUS:
                tl.store(dentropy + t, (tl.load(dentropy + t, mask=t < T) * s) * d, mask=t < T)


# ---- launchers -------------------------------------------------------------------------------------------------------


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor | None,
    ref_logp: Tensor | None,
    entropy: Tensor | None,
    rollout_logp: Tensor | None,
    normalizer: Tensor | None,
    loss_type: str,
    sequence_ratio: bool,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None,
    kl_coef: float,
    kl_type: str,
    entropy_coef: float,
    tis_cap: float | None,
    divisor: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, batch = logp.shape[0], cu_seqlens.shape[0] - 1
    logp, old_logp, advantages, cu_seqlens = (x.contiguous() for x in (logp, old_logp, advantages, cu_seqlens))
    mask = None if mask is None else mask.view(torch.uint8)
    mask, ref_logp, entropy, rollout_logp = (
        None if x is None else x.contiguous() for x in (mask, ref_logp, entropy, rollout_logp)
    )
    form, averaged, by_tokens = form_code(loss_type), sequence_mean(loss_type), divides_by_tokens(loss_type)
    divide_by = TENSOR if normalizer is not None else NUMBER
    if normalizer is None and divisor is None:
        if by_tokens and mask is not None:
            divide_by = NOT_YET
        divisor = float(max(1, tokens if by_tokens else batch))
    has_kl, has_bonus = ref_logp is not None and kl_coef != 0.0, entropy is not None and entropy_coef != 0.0
    through_mean = sequence_ratio and form == CLIPPED
    has_counts = sequence_ratio or (mask is not None and averaged and tokens > COUNT_HERE * batch)

    dlogp = torch.empty_like(logp)
    dentropy = torch.empty_like(logp) if has_bonus else logp.new_empty(0)
    places = batch + tokens // SEGMENT + 1
    sums, extremes = logp.new_empty(SUMS, places), logp.new_empty(3, places)
    partial_counts = logp.new_empty(PARTIAL_COUNTS, places, dtype=torch.int32)
    log_ratios = logp.new_empty(places) if sequence_ratio else None
    row_counts = logp.new_empty(places, dtype=torch.int32) if has_counts else None
    loss, scale, stats = logp.new_empty(()), logp.new_empty(()), logp.new_empty(len(STATS))
    counts = logp.new_empty(len(COUNTS), dtype=torch.int64)

    per_row = min(triton.cdiv(tokens, SEGMENT), max(1, PROGRAMS // max(1, batch)))
    grid = (batch * per_row,)
    cut: dict[str, Any] = {"SEGMENT": SEGMENT, "LANES": LANES, **options()}
    vectors = [x is not None for x in (ref_logp, entropy, rollout_logp)] + [advantages.shape[0] != batch]
    lanes = min(SEGMENT, next_power_of_2(batch))
    with on_device(logp):
        if grid[0] and has_counts:
            count_kernel[grid](
                logp, old_logp, cu_seqlens, mask, log_ratios, row_counts, tokens, batch, per_row,
                SEQUENCE_RATIO=sequence_ratio, HAS_MASK=mask is not None, num_warps=1, **cut,
            )  # fmt: skip
        if grid[0]:
            token_kernel[grid](
                logp, old_logp, advantages, cu_seqlens, mask, ref_logp, entropy, rollout_logp, normalizer, log_ratios,
                row_counts, dlogp, dentropy, sums, partial_counts, extremes, tokens, batch, per_row, places,
                1.0 - clip_low, 1.0 + clip_high, float("inf") if clip_dual is None else clip_dual, kl_coef,
                entropy_coef, tis_cap or 0.0, divisor, FORM=form, KL_TYPE=KL_TYPES.index(kl_type),
                SEQUENCE_RATIO=sequence_ratio, SEQUENCE_MEAN=averaged, DIVIDE_BY=divide_by, PER_TOKEN=vectors[3],
                HAS_MASK=mask is not None,
                HAS_COUNTS=has_counts, HAS_DUAL=clip_dual is not None, HAS_REF=vectors[0], HAS_KL=has_kl,
                HAS_ENTROPY=vectors[1], HAS_BONUS=has_bonus, HAS_ROLLOUT=vectors[2], HAS_TIS=tis_cap is not None,
                num_warps=_warps(sum(vectors)), **cut,
            )  # fmt: skip
        batch_kernel[(16,)](
            cu_seqlens, sums, partial_counts, extremes, normalizer, loss, scale, stats, counts, tokens, batch, places,
            divisor, DIVIDE_BY=divide_by, SEQUENCE_MEAN=averaged, BY_TOKENS=by_tokens, SEGMENT=SEGMENT, LANES=lanes,
            num_warps=max(1, lanes // 128), **options(),
        )  # fmt: skip
        if grid[0] and through_mean:
            spread_kernel[grid](
                cu_seqlens, mask, normalizer, sums[SLOPE.value], partial_counts, dlogp, tokens, batch, per_row,
                kl_coef, divisor, SEQUENCE_MEAN=averaged, DIVIDE_BY=divide_by, HAS_MASK=mask is not None,
                HAS_KL=has_kl, num_warps=1, **cut,
            )  # fmt: skip
    return loss, dlogp, dentropy, scale, stats, counts


def _warps(vectors: int) -> int:
    """Few warps a program make its sums cheap; more keep the registers of further inputs from spilling."""
    return (1, 2, 2, 4, 4)[vectors]


def policy_loss_scale_(dlogp: Tensor, dentropy: Tensor, scale: Tensor, dloss: Tensor) -> None:
    tokens = dlogp.shape[0]
    if tokens:
        with on_device(dlogp):
            scale_kernel[(min(1024, triton.cdiv(tokens, 1024)),)](
                dlogp, dentropy, scale, dloss, tokens, HAS_BONUS=dentropy.numel() > 0, BLOCK=1024, **options()
            )


# ---- ahead of time ---------------------------------------------------------------------------------------------------

_CUT = {"SEGMENT": SEGMENT, "LANES": LANES}
_SIZES = {"cu_seqlens": "*i32:16", "T": "i32", "B": "i32"}


def _token_variant(name: str, form: int, sequence_ratio: bool, kl_type: int, extras: bool, main: bool) -> Variant:
    given, absent = ["logp", "old_logp", "advantages", "normalizer", "dlogp", "sums", "extremes"], []
    (given if sequence_ratio else absent).append("log_ratios")
    (given if extras else absent).extend(("ref_logp", "entropy", "rollout_logp", "dentropy"))
    types = {**dict.fromkeys(given, "*fp32:16"), **_SIZES, "mask": "*u8:16", "counts": "*i32:16"}
    types |= {"places": "i32", "PER_ROW": "i32"}
    types |= dict.fromkeys(("low", "high", "dual", "kl_coef", "entropy_coef", "tis_cap", "divisor"), "fp32")
    constants: dict[str, Any] = {
        "FORM": form, "KL_TYPE": kl_type, "SEQUENCE_RATIO": sequence_ratio, "SEQUENCE_MEAN": True, "DIVIDE_BY": TENSOR,
        "PER_TOKEN": False, "HAS_MASK": True, "HAS_COUNTS": sequence_ratio, "HAS_DUAL": extras, **_CUT,
        **dict.fromkeys(("HAS_REF", "HAS_KL", "HAS_ENTROPY", "HAS_BONUS", "HAS_ROLLOUT", "HAS_TIS"), extras),
    }  # fmt: skip
    (types if sequence_ratio else constants)["row_counts"] = "*i32:16" if sequence_ratio else None
    constants |= dict.fromkeys(absent)
    return Variant(name, token_kernel, types, constants, _warps(3 if extras else 0), main=main)


AOT: tuple[Variant, ...] = (
    _token_variant("policy_loss", CLIPPED, False, 2, extras=False, main=True),
    _token_variant("policy_loss clipped", CLIPPED, False, 2, extras=True, main=True),
    _token_variant("policy_loss gspo", CLIPPED, True, 2, extras=True, main=False),
    _token_variant("policy_loss cispo", CISPO, False, 1, extras=True, main=False),
    Variant(
        "policy_loss count", count_kernel,
        {**_SIZES, **dict.fromkeys(("logp", "old_logp", "log_ratios"), "*fp32:16"), "mask": "*u8:16",
         "counts": "*i32:16", "PER_ROW": "i32"},
        {"SEQUENCE_RATIO": True, "HAS_MASK": True, **_CUT}, num_warps=1,
    ),
    Variant(
        "policy_loss spread", spread_kernel,
        {**_SIZES, **dict.fromkeys(("normalizer", "slopes", "dlogp"), "*fp32:16"), "mask": "*u8:16",
         "counts": "*i32:16", "kl_coef": "fp32", "divisor": "fp32", "PER_ROW": "i32"},
        {"SEQUENCE_MEAN": True, "DIVIDE_BY": TENSOR, "HAS_MASK": True, "HAS_KL": True, **_CUT}, num_warps=1,
    ),
    Variant(
        "policy_loss batch", batch_kernel,
        {**_SIZES, **dict.fromkeys(("sums", "extremes", "normalizer", "loss", "scale", "stats"), "*fp32:16"),
         "counts": "*i32:16", "totals": "*i64:16", "places": "i32", "divisor": "fp32"},
        {"DIVIDE_BY": TENSOR, "SEQUENCE_MEAN": True, "BY_TOKENS": False, "SEGMENT": SEGMENT, "LANES": SEGMENT},
        num_warps=8,
    ),
    Variant(
        "policy_loss scale", scale_kernel,
        {**dict.fromkeys(("dlogp", "dentropy", "scale", "dloss"), "*fp32:16"), "T": "i32"},
        {"HAS_BONUS": True, "BLOCK": 1024},
    ),
)  # fmt: skip
