"""policy_loss on GPUs, first pass: sums, statistics and gradients of each segment, in one pass over the tokens.

Instructions bound it as much as memory: a token costs about 50, most of them comparisons and selections. So the loop is
unmasked while all tokens of a step exist, and the counts share one word.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel.kernels.policy_loss import CISPO, CLIPPED, REINFORCE
from rlkernel.kernels.triton.common import IS_HIP, LOG2E, exp2
from rlkernel.kernels.triton.policy_loss_batch import (
    DRIFT,
    ENTROPY,
    K1,
    K3,
    KL,
    LOSS,
    NOT_YET,
    PARTIAL_COUNTS,
    RATIO,
    SLOPE,
    TENSOR,
    TIS,
    bounds,
    fold,
    higher,
)

_CLIPPED, _CISPO, _REINFORCE = tl.constexpr(CLIPPED), tl.constexpr(CISPO), tl.constexpr(REINFORCE)
_NOT_YET, _TENSOR = tl.constexpr(NOT_YET), tl.constexpr(TENSOR)
_COUNTS = tl.constexpr(PARTIAL_COUNTS)
# what one token adds to the word of counts: counted, and clipped or capped
_ONE_LOW, _ONE_HIGH, _ONE_DUAL, _ONE_CAPPED = (tl.constexpr((1 << 6 * i) + (i < 4)) for i in range(1, 5))
LANES = 128
REGISTERS = 96  # per thread of token_kernel, if it prefetches two steps
ALL_OR_NONE = tl.constexpr(2)  # value of FULL: all tokens of a step exist, or none


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
def lower(a, b):
    """Minimum that propagates NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def counted_at(mask, start, t, inside, HAS_MASK: tl.constexpr):
    """Whether the tokens start + t count."""
    on = inside
    if HAS_MASK:
        on = tl.load(mask + start + t, mask=inside, other=0) != 0
    return on


@triton.jit
def counted_between(mask, begin, end, SEGMENT: tl.constexpr, LANES: tl.constexpr):
    """Number of counted tokens in [begin, end): by words of four bytes, and single bytes at both ends."""
    first, last = tl.cdiv(begin, 4), tl.maximum(end // 4, tl.cdiv(begin, 4))
    words = mask.to(tl.pointer_type(tl.int32))
    n = tl.zeros((LANES,), tl.int32)
    for word in range(first, last, SEGMENT // 4):
        for i in tl.static_range(SEGMENT // 4 // LANES):
            w = word + i * LANES + tl.arange(0, LANES)
            four = tl.load(words + w, mask=w < last, other=0)
            # sets a byte's top bit if the byte is not 0; a multiplication then adds the four
            nonzero = ((((four & 0x7F7F7F7F) + 0x7F7F7F7F) | four) >> 7) & 0x01010101
            n += (nonzero * 0x01010101) >> 24
    edge = tl.arange(0, 8)
    t = tl.where(edge < 4, begin + edge, last * 4 + edge - 4)
    on = (t < end) & ((edge >= 4) | (t < first * 4))
    ends = tl.load(mask + t, mask=on, other=0) != 0
    return tl.sum(n, axis=0) + tl.sum(ends.to(tl.int32), axis=0)


@triton.jit
def slot_of(row, segment, begin, B, SEGMENT: tl.constexpr):
    """Slot of a segment's partial sums: first segments at [0, B), the others from B on, without collisions."""
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
    log_ratios,  # out [slots]: sums of logp - old_logp
    counts,  # out [slots] int32
    T,
    B,
    PER_ROW,
    SEQUENCE_RATIO: tl.constexpr,
    HAS_MASK: tl.constexpr,
    SEGMENT: tl.constexpr,
    LANES: tl.constexpr,
):
    """Counted tokens of each segment and its sum of log-ratios, which token_kernel needs of the whole sequence."""
    row = tl.program_id(0) // PER_ROW
    begin, end = bounds(cu_seqlens, row, True, T)
    lane = tl.arange(0, LANES)
    segments = tl.maximum(tl.cdiv(end - begin, SEGMENT), 1)  # an empty sequence has one of zeros
    for segment in range(tl.program_id(0) % PER_ROW, segments, PER_ROW):
        total = tl.zeros((LANES,), tl.float32)
        n = tl.zeros((LANES,), tl.int32)
        start = begin + segment * SEGMENT
        for first in range(start, min(start + SEGMENT, end), LANES):
            t = first + lane
            on = counted_at(mask, 0, t, t < end, HAS_MASK)
            n += on.to(tl.int32)
            if SEQUENCE_RATIO:
                total += tl.load(logp + t, mask=on, other=0.0) - tl.load(old_logp + t, mask=on, other=0.0)
        slot = slot_of(row, segment, begin, B, SEGMENT)
        tl.store(counts + slot, tl.sum(n, axis=0))
        if SEQUENCE_RATIO:
            tl.store(log_ratios + slot, fold(total))


@triton.jit
def load(at, inside, FULL: tl.constexpr):
    """Values at `at`, 0 where not inside. FULL: all are inside; ALL_OR_NONE: all or none, then undefined."""
    if FULL == ALL_OR_NONE:
        x = tl.load(at, mask=inside)
    elif FULL:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=inside, other=0)
    return x


@triton.jit
def store(at, x, inside, FULL: tl.constexpr):
    """Stores x at `at` where inside, or everywhere if FULL."""
    if FULL:
        tl.store(at, x)
    else:
        tl.store(at, x, mask=inside)


@triton.jit
def tokens_at(
    logp, old_logp, advantages, mask, ref_logp, entropy, rollout_logp, first, stop,
    FULL: tl.constexpr, PER_TOKEN: tl.constexpr, HAS_MASK: tl.constexpr, HAS_REF: tl.constexpr,
    HAS_ENTROPY: tl.constexpr, HAS_ROLLOUT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Inputs [LANES] of the LANES tokens from `first` on, 0 from `stop` on; FULL as in `load`. Absent inputs are 0."""
    lane = tl.arange(0, LANES)
    inside = (tl.zeros((LANES,), tl.int32) if FULL == ALL_OR_NONE else lane) < stop - first
    zero = tl.zeros((LANES,), tl.float32)
    flag = inside.to(tl.uint8)
    a, ref, h, rollout = zero, zero, zero, zero
    if HAS_MASK:
        flag = load(mask + first + lane, inside, FULL)
    new = load(logp + first + lane, inside, FULL)
    old = load(old_logp + first + lane, inside, FULL)
    if PER_TOKEN:
        a = load(advantages + first + lane, inside, FULL)
    if HAS_REF:
        ref = load(ref_logp + first + lane, inside, FULL)
    if HAS_ENTROPY:
        h = load(entropy + first + lane, inside, FULL)
    if HAS_ROLLOUT:
        rollout = load(rollout_logp + first + lane, inside, FULL)
    return flag, new, old, a, ref, h, rollout


@triton.jit
def add_tokens(
    flag, new, old, a, ref, h, rollout, dlogp, dentropy,
    first, stop, row_advantage, shared_ratio, weight, low, high, dual, row_low, row_high, row_dual, kl_coef,
    entropy_coef, tis_cap,
    s_loss, s_ratio, s_k1, s_k3, s_kl, s_entropy, s_tis, s_drift, s_slope, hits, ratio_min, ratio_max, drift_max,
    FULL: tl.constexpr, FORM: tl.constexpr, KL_TYPE: tl.constexpr, SEQUENCE_RATIO: tl.constexpr,
    PER_TOKEN: tl.constexpr, HAS_MASK: tl.constexpr, HAS_DUAL: tl.constexpr, HAS_REF: tl.constexpr,
    HAS_KL: tl.constexpr, HAS_ENTROPY: tl.constexpr, HAS_BONUS: tl.constexpr, HAS_ROLLOUT: tl.constexpr,
    HAS_TIS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Adds the LANES tokens from `first` on to the sums [LANES] and stores their gradients. FULL: all exist."""
    THROUGH_MEAN: tl.constexpr = SEQUENCE_RATIO and FORM == _CLIPPED
    lane = tl.arange(0, LANES)
    zero = tl.zeros((LANES,), tl.float32)
    inside = lane < stop - first
    on = flag != 0 if HAS_MASK else inside
    lp = tl.where(on, new, 0.0)
    before = tl.where(on, old, 0.0)
    log_ratio = tl.where(on, new - old, 0.0)
    power = exp2(log_ratio * LOG2E)
    ratio = shared_ratio + zero if SEQUENCE_RATIO else power
    if PER_TOKEN:
        a = tl.where(on, a, 0.0)
    else:
        a = row_advantage + zero
    cut_low = ratio < row_low
    cut_high = ratio > row_high
    cut_dual = ratio > row_dual
    if SEQUENCE_RATIO:  # a token's own ratio is 1 if it does not count, which no bound clips
        cut_low = on & cut_low
        cut_high = on & cut_high
        cut_dual = on & cut_dual
    if FORM == _CLIPPED and PER_TOKEN:
        cut_low = cut_low & (a < 0.0)
        cut_high = cut_high & (a > 0.0)
        cut_dual = cut_dual & (a < 0.0)
    if FORM == _CLIPPED:
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
    hit = on.to(tl.int32)
    if FORM != _REINFORCE:
        hit = tl.where(cut_low, _ONE_LOW, tl.where(cut_high, _ONE_HIGH, hit))
    if FORM == _CLIPPED and HAS_DUAL:
        hit = tl.where(cut_dual, _ONE_DUAL, hit)
    if HAS_ROLLOUT:
        rollout = tl.where(on, rollout, 0.0)
        drift = tl.abs(lp - rollout)
        s_drift += drift
        drift_max = higher(drift_max, drift)
        if HAS_TIS:
            tis = exp2((before - rollout) * LOG2E)
            capped = tis > tis_cap
            tis = tl.where(capped, tis_cap, tis)
            loss = loss * tis
            slope = slope * tis
            hit += tl.where(on & capped, _ONE_CAPPED, 0)
            s_tis += tl.where(on, tis, 0.0)
    gradient = slope
    if HAS_REF:
        d = lp - tl.where(on, ref, 0.0)
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
        h = tl.where(on, h, 0.0)
        s_entropy += h
        if HAS_BONUS:
            loss = tl.fma(zero - entropy_coef, h, loss)
            store(dentropy + first + lane, tl.where(on, -entropy_coef * weight, 0.0), inside, FULL)
    if THROUGH_MEAN:
        s_slope += tl.where(on, slope, 0.0)
        if HAS_KL:
            store(dlogp + first + lane, gradient, inside, FULL)
    else:
        store(dlogp + first + lane, tl.where(on, gradient * weight, 0.0), inside, FULL)
    counted_ratio = tl.where(on, ratio, 0.0)
    s_loss += tl.where(on, loss, 0.0)
    s_ratio += counted_ratio
    s_k1 -= log_ratio
    s_k3 += phi(log_ratio, power)
    hits += hit
    ratio_min = lower(ratio_min, tl.where(on, ratio, float("inf")))
    ratio_max = higher(ratio_max, counted_ratio)  # no ratio is negative
    return s_loss, s_ratio, s_k1, s_k3, s_kl, s_entropy, s_tis, s_drift, s_slope, hits, ratio_min, ratio_max, drift_max


@triton.jit(do_not_specialize=["T", "B", "PER_ROW", "slots"])
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
    log_ratios,  # [slots], of count_kernel
    row_counts,  # [slots] int32, of count_kernel
    dlogp,  # out [T]
    dentropy,  # out [T]
    sums,  # out [SUMS, slots]
    counts,  # out [PARTIAL_COUNTS, slots] int32
    extremes,  # out [3, slots]: -min ratio, max ratio, max drift
    T,
    B,
    PER_ROW,
    slots,
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
    PREFETCH: tl.constexpr,
):
    """Sums of every PER_ROW-th segment of one sequence, and the gradients of their tokens.

    The gradient through a sequence's ratio needs the whole sequence: dlogp then holds only the gradient of the KL, and
    spread_kernel completes it.
    """
    row = tl.program_id(0) // PER_ROW
    begin, end = bounds(cu_seqlens, row, True, T)
    segments = tl.maximum(tl.cdiv(end - begin, SEGMENT), 1)  # an empty sequence has one of zeros
    zero = tl.zeros((LANES,), tl.float32)
    for segment in range(tl.program_id(0) % PER_ROW, segments, PER_ROW):
        start = begin + segment * SEGMENT
        stop = tl.minimum(start + SEGMENT, end)
        prefetched = start + (stop - start) // (PREFETCH * LANES) * (PREFETCH * LANES)
        batch = ()
        for i in tl.static_range(PREFETCH):
            batch = batch + tokens_at(  # type: ignore[assignment]
                logp, old_logp, advantages, mask, ref_logp, entropy, rollout_logp, start + i * LANES, prefetched,
                ALL_OR_NONE if PREFETCH > 1 else False,
                PER_TOKEN, HAS_MASK, HAS_REF, HAS_ENTROPY, HAS_ROLLOUT, LANES,
            )  # fmt: skip
        shared_ratio = 1.0
        weight = 1.0
        if SEQUENCE_RATIO or SEQUENCE_MEAN:
            if HAS_COUNTS:
                n = sequence_total(row_counts, row, begin, segments, B, SEGMENT)
            elif HAS_MASK:
                n = counted_between(mask, begin, end, SEGMENT, LANES)
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
        row_advantage = 0.0
        # bounds that clip the ratio; infinite if the sign of the advantage rules the bound out
        row_low = low
        row_high = high
        row_dual = dual
        if not PER_TOKEN:
            row_advantage = tl.load(advantages + row)
            if FORM == _CLIPPED:
                row_low = tl.where(row_advantage < 0.0, low, float("-inf"))
                row_high = tl.where(row_advantage > 0.0, high, float("inf"))
                row_dual = tl.where(row_advantage < 0.0, dual, float("inf"))

        s_loss, s_ratio, s_k1, s_k3, s_kl, s_entropy = zero, zero, zero, zero, zero, zero
        s_tis, s_drift, s_slope = zero, zero, zero
        # five counts in a word, six bits each, because a lane has at most SEGMENT / LANES tokens
        hits = tl.zeros((LANES,), tl.int32)
        ratio_min, ratio_max, drift_max = zero + float("inf"), zero, zero + float("-inf")
        for first in range(start, prefetched, PREFETCH * LANES):
            # Prefetches the next tokens while these are summed. PREFETCH = 1 loads the last tokens twice, which needs
            # fewer registers than a masked load.
            following = first + PREFETCH * LANES
            if PREFETCH == 1:
                following = tl.minimum(following, prefetched - LANES)
            following_batch = ()
            for i in tl.static_range(PREFETCH):
                following_batch = following_batch + tokens_at(  # type: ignore[assignment]
                    logp, old_logp, advantages, mask, ref_logp, entropy, rollout_logp, following + i * LANES,
                    prefetched, ALL_OR_NONE if PREFETCH > 1 else True, PER_TOKEN, HAS_MASK, HAS_REF, HAS_ENTROPY,
                    HAS_ROLLOUT, LANES,
                )  # fmt: skip
            for i in tl.static_range(PREFETCH):
                (
                    s_loss, s_ratio, s_k1, s_k3, s_kl, s_entropy, s_tis, s_drift, s_slope, hits, ratio_min, ratio_max,
                    drift_max,
                ) = add_tokens(
                    batch[7 * i], batch[7 * i + 1], batch[7 * i + 2], batch[7 * i + 3], batch[7 * i + 4],
                    batch[7 * i + 5], batch[7 * i + 6], dlogp, dentropy, first + i * LANES, stop,
                    row_advantage, shared_ratio, weight, low, high, dual, row_low, row_high, row_dual, kl_coef,
                    entropy_coef, tis_cap, s_loss, s_ratio, s_k1, s_k3, s_kl, s_entropy, s_tis, s_drift, s_slope, hits,
                    ratio_min, ratio_max, drift_max, True, FORM, KL_TYPE, SEQUENCE_RATIO, PER_TOKEN, HAS_MASK,
                    HAS_DUAL, HAS_REF, HAS_KL, HAS_ENTROPY, HAS_BONUS, HAS_ROLLOUT, HAS_TIS, LANES,
                )  # fmt: skip
            batch = following_batch
        for first in range(prefetched, stop, LANES):
            flag, new, old, a, ref, h, rollout = tokens_at(
                logp, old_logp, advantages, mask, ref_logp, entropy, rollout_logp, first, stop, False,
                PER_TOKEN, HAS_MASK, HAS_REF, HAS_ENTROPY, HAS_ROLLOUT, LANES,
            )  # fmt: skip
            (
                s_loss, s_ratio, s_k1, s_k3, s_kl, s_entropy, s_tis, s_drift, s_slope, hits, ratio_min, ratio_max,
                drift_max,
            ) = add_tokens(
                flag, new, old, a, ref, h, rollout, dlogp, dentropy, first, stop,
                row_advantage, shared_ratio, weight, low, high, dual, row_low, row_high, row_dual, kl_coef,
                entropy_coef, tis_cap, s_loss, s_ratio, s_k1, s_k3, s_kl, s_entropy, s_tis, s_drift, s_slope, hits,
                ratio_min, ratio_max, drift_max, False, FORM, KL_TYPE, SEQUENCE_RATIO, PER_TOKEN, HAS_MASK,
                HAS_DUAL, HAS_REF, HAS_KL, HAS_ENTROPY, HAS_BONUS, HAS_ROLLOUT, HAS_TIS, LANES,
            )  # fmt: skip

        slot = slot_of(row, segment, begin, B, SEGMENT)
        to = sums + slot
        tl.store(to + LOSS * slots, fold(s_loss))
        tl.store(to + RATIO * slots, fold(s_ratio))
        tl.store(to + K1 * slots, fold(s_k1))
        tl.store(to + K3 * slots, fold(s_k3))
        tl.store(to + KL * slots, fold(s_kl))
        tl.store(to + ENTROPY * slots, fold(s_entropy))
        tl.store(to + TIS * slots, fold(s_tis))
        tl.store(to + DRIFT * slots, fold(s_drift))
        tl.store(to + SLOPE * slots, fold(s_slope))
        for i in tl.static_range(_COUNTS):
            tl.store(counts + i * slots + slot, tl.sum((hits >> (6 * i)) & 63, axis=0))
        to = extremes + slot
        nothing = tl.sum(hits & 63, axis=0) == 0
        tl.store(to, tl.where(nothing, float("-inf"), -tl.reduce(ratio_min, 0, lower)))
        tl.store(to + slots, tl.where(nothing, float("-inf"), tl.reduce(ratio_max, 0, higher)))
        tl.store(to + 2 * slots, tl.where(nothing, float("-inf"), tl.reduce(drift_max, 0, higher)))


@triton.jit(do_not_specialize=["T", "B", "PER_ROW"])
def spread_kernel(
    cu_seqlens,  # [B + 1] int32
    mask,  # [T] uint8
    normalizer,  # [] fp32
    slopes,  # [slots]
    counts,  # [slots] int32
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
            on = counted_at(mask, 0, t, t < end, HAS_MASK)
            g = mean
            if HAS_KL:
                g = tl.fma(tl.zeros((LANES,), tl.float32) + kl_coef, tl.load(dlogp + t, mask=on, other=0.0), mean)
            tl.store(dlogp + t, tl.where(on, g * weight, 0.0), mask=t < end)


# ---- launchers -------------------------------------------------------------------------------------------------------


def prefetch(more: bool) -> dict[str, int]:
    """Launch options of token_kernel: prefetched steps of LANES tokens, and registers per thread.

    Two steps of logp and old_logp fit in `REGISTERS` with the sums, which allows 21 programs per SM; with `more`
    vectors only one step fits.
    """
    if more or IS_HIP:
        return {"PREFETCH": 1}
    return {"PREFETCH": 2, "maxnreg": REGISTERS}
