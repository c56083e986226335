"""policy_loss in Triton, first pass: one look at the tokens for sums, statistics and gradients of each segment.

What bounds it on fp32 vectors is instructions as much as memory: a token costs about 50, most of them on the pipe of
comparisons and selections, so the loop has no masks where all tokens of a step exist, and counts share one word.
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
# One token in the word of counts: counted, and cut or capped.
_ONE_LOW, _ONE_HIGH, _ONE_DUAL, _ONE_CAPPED = (tl.constexpr((1 << 6 * i) + (i < 4)) for i in range(1, 5))
LANES = 128
REGISTERS = 96  # a thread of token_kernel, where two steps load ahead
SOME = tl.constexpr(2)  # for FULL: all tokens of a step exist, or none


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
    """The smaller one; NaN if one of them is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def counted_at(mask, start, t, inside, HAS_MASK: tl.constexpr):
    """Which of the tokens start + t count."""
    on = inside
    if HAS_MASK:
        on = tl.load(mask + start + t, mask=inside, other=0) != 0
    return on


@triton.jit
def counted_between(mask, begin, end, SEGMENT: tl.constexpr, LANES: tl.constexpr):
    """Number of counted tokens in [begin, end): whole words of four of them, and the bytes around."""
    first, last = tl.cdiv(begin, 4), tl.maximum(end // 4, tl.cdiv(begin, 4))
    words = mask.to(tl.pointer_type(tl.int32))
    n = tl.zeros((LANES,), tl.int32)
    for word in range(first, last, SEGMENT // 4):
        for i in tl.static_range(SEGMENT // 4 // LANES):
            w = word + i * LANES + tl.arange(0, LANES)
            four = tl.load(words + w, mask=w < last, other=0)
            # A byte's top bit is set where the byte is not 0; a product then adds the four.
            some = ((((four & 0x7F7F7F7F) + 0x7F7F7F7F) | four) >> 7) & 0x01010101
            n += (some * 0x01010101) >> 24
    edge = tl.arange(0, 8)
    t = tl.where(edge < 4, begin + edge, last * 4 + edge - 4)
    on = (t < end) & ((edge >= 4) | (t < first * 4))
    ends = tl.load(mask + t, mask=on, other=0) != 0
    return tl.sum(n, axis=0) + tl.sum(ends.to(tl.int32), axis=0)


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
        place = place_of(row, segment, begin, B, SEGMENT)
        tl.store(counts + place, tl.sum(n, axis=0))
        if SEQUENCE_RATIO:
            tl.store(log_ratios + place, fold(total))


@triton.jit
def given(at, inside, FULL: tl.constexpr):
    """Values at `at`, 0 where not inside; FULL: all are, or with SOME where not inside anything."""
    if FULL == SOME:
        x = tl.load(at, mask=inside)
    elif FULL:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=inside, other=0)
    return x


@triton.jit
def put(at, x, inside, FULL: tl.constexpr):
    """Stores x at `at` where inside; FULL: everywhere."""
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
    """What LANES tokens from `first` on hold [LANES each], 0 from `stop` on; FULL: all exist. Absent inputs are 0."""
    lane = tl.arange(0, LANES)
    inside = (tl.zeros((LANES,), tl.int32) if FULL == SOME else lane) < stop - first
    zero = tl.zeros((LANES,), tl.float32)
    flag = inside.to(tl.uint8)
    a, ref, h, rollout = zero, zero, zero, zero
    if HAS_MASK:
        flag = given(mask + first + lane, inside, FULL)
    new = given(logp + first + lane, inside, FULL)
    old = given(old_logp + first + lane, inside, FULL)
    if PER_TOKEN:
        a = given(advantages + first + lane, inside, FULL)
    if HAS_REF:
        ref = given(ref_logp + first + lane, inside, FULL)
    if HAS_ENTROPY:
        h = given(entropy + first + lane, inside, FULL)
    if HAS_ROLLOUT:
        rollout = given(rollout_logp + first + lane, inside, FULL)
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
    """The sums [LANES] with LANES more tokens, from `first` on; stores their gradients. FULL: all exist."""
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
    if SEQUENCE_RATIO:  # elsewhere a token that does not count has ratio 1, which nothing cuts
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
            put(dentropy + first + lane, tl.where(on, -entropy_coef * weight, 0.0), inside, FULL)
    if THROUGH_MEAN:
        s_slope += tl.where(on, slope, 0.0)
        if HAS_KL:
            put(dlogp + first + lane, gradient, inside, FULL)
    else:
        put(dlogp + first + lane, tl.where(on, gradient * weight, 0.0), inside, FULL)
    counted_ratio = tl.where(on, ratio, 0.0)
    s_loss += tl.where(on, loss, 0.0)
    s_ratio += counted_ratio
    s_k1 -= log_ratio
    s_k3 += phi(log_ratio, power)
    hits += hit
    ratio_min = lower(ratio_min, tl.where(on, ratio, float("inf")))
    ratio_max = higher(ratio_max, counted_ratio)  # no ratio is negative
    return s_loss, s_ratio, s_k1, s_k3, s_kl, s_entropy, s_tis, s_drift, s_slope, hits, ratio_min, ratio_max, drift_max


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
    AHEAD: tl.constexpr,
):
    """Sums of the segments PER_ROW apart of one sequence, and the gradients of their tokens.

    Through a sequence's ratio the gradient of a clipped token needs the whole sequence: dlogp is then the gradient of
    the KL alone, and spread_kernel finishes it.
    """
    row = tl.program_id(0) // PER_ROW
    begin, end = bounds(cu_seqlens, row, True, T)
    segments = tl.maximum(tl.cdiv(end - begin, SEGMENT), 1)  # an empty sequence has one of zeros
    zero = tl.zeros((LANES,), tl.float32)
    for segment in range(tl.program_id(0) % PER_ROW, segments, PER_ROW):
        start = begin + segment * SEGMENT
        stop = tl.minimum(start + SEGMENT, end)
        batches = start + (stop - start) // (AHEAD * LANES) * (AHEAD * LANES)
        batch = ()
        for i in tl.static_range(AHEAD):
            batch = batch + tokens_at(  # type: ignore[assignment]
                logp, old_logp, advantages, mask, ref_logp, entropy, rollout_logp, start + i * LANES, batches,
                SOME if AHEAD > 1 else False,
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
        # What cuts a ratio; infinite where the advantage's sign lets it be.
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
        # Five counts a word, six bits each: a lane has at most SEGMENT / LANES tokens.
        hits = tl.zeros((LANES,), tl.int32)
        ratio_min, ratio_max, drift_max = zero + float("inf"), zero, zero + float("-inf")
        for first in range(start, batches, AHEAD * LANES):
            # The next tokens are on their way while these are summed. A single step loads the last ones twice, which
            # needs fewer registers than loading none.
            following = first + AHEAD * LANES
            if AHEAD == 1:
                following = tl.minimum(following, batches - LANES)
            ahead = ()
            for i in tl.static_range(AHEAD):
                ahead = ahead + tokens_at(  # type: ignore[assignment]
                    logp, old_logp, advantages, mask, ref_logp, entropy, rollout_logp, following + i * LANES,
                    batches, SOME if AHEAD > 1 else True, PER_TOKEN, HAS_MASK, HAS_REF, HAS_ENTROPY, HAS_ROLLOUT, LANES,
                )  # fmt: skip
            for i in tl.static_range(AHEAD):
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
            batch = ahead
        for first in range(batches, stop, LANES):
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
        for i in tl.static_range(_COUNTS):
            tl.store(counts + i * places + place, tl.sum((hits >> (6 * i)) & 63, axis=0))
        to = extremes + place
        nothing = tl.sum(hits & 63, axis=0) == 0
        tl.store(to, tl.where(nothing, float("-inf"), -tl.reduce(ratio_min, 0, lower)))
        tl.store(to + places, tl.where(nothing, float("-inf"), tl.reduce(ratio_max, 0, higher)))
        tl.store(to + 2 * places, tl.where(nothing, float("-inf"), tl.reduce(drift_max, 0, higher)))


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
            on = counted_at(mask, 0, t, t < end, HAS_MASK)
            g = mean
            if HAS_KL:
                g = tl.fma(tl.zeros((LANES,), tl.float32) + kl_coef, tl.load(dlogp + t, mask=on, other=0.0), mean)
            tl.store(dlogp + t, tl.where(on, g * weight, 0.0), mask=t < end)


# ---- launchers -------------------------------------------------------------------------------------------------------


def ahead(more: bool) -> dict[str, int]:
    """Launch options of token_kernel: the steps of LANES tokens that load while as many are summed, and registers.

    Two steps of logp and old_logp fit beside the sums in `REGISTERS`, which leaves 21 programs a multiprocessor; with
    `more` vectors one step does.
    """
    if more or IS_HIP:
        return {"AHEAD": 1}
    return {"AHEAD": 2, "maxnreg": REGISTERS}
