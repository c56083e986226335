"""policy_loss on GPUs, first pass: sums, statistics and gradients of each segment, in one pass over the tokens.

An absent input (mask, ref_logp, entropy, rollout_logp) or option (dual, tis_cap) is None, which Triton compiles out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel.kernels.policy_loss import CLIPPED, KL_TYPES, REINFORCE
from rlkernel.kernels.triton.common import LOG2E, exp2
from rlkernel.kernels.triton.policy_loss_batch import (
    CAPPED,
    DRIFT,
    DUAL,
    ENTROPY,
    HIGH,
    K1,
    K3,
    KL,
    LOSS,
    LOW,
    NOT_YET,
    RATIO,
    SLOPE,
    TENSOR,
    TIS,
    TOKENS,
    bounds,
    fold,
    higher,
)

_CLIPPED, _REINFORCE = tl.constexpr(CLIPPED), tl.constexpr(REINFORCE)
_NOT_YET, _TENSOR = tl.constexpr(NOT_YET), tl.constexpr(TENSOR)
_K1, _K2 = (tl.constexpr(KL_TYPES.index(name)) for name in ("k1", "k2"))
LANES = 128


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
def counted_at(mask, t, end):
    """Whether the tokens t count: they lie before `end`, and the mask, if there is one, holds them."""
    on = t < end
    if mask is not None:
        on = tl.load(mask + t, mask=on, other=0) != 0
    return on


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


@triton.jit
def gradient_weight(share, normalizer, divisor, SEQUENCE_MEAN: tl.constexpr, DIVIDE_BY: tl.constexpr):
    """Factor of a token's gradient: 1 / (its sequence's tokens, if averaged) / (the denominator, if already known)."""
    weight = 1.0
    if SEQUENCE_MEAN:
        weight = tl.math.div_rn(weight, share)
    if DIVIDE_BY == _TENSOR:
        weight = tl.math.div_rn(weight, tl.load(normalizer))
    elif DIVIDE_BY != _NOT_YET:
        weight = tl.math.div_rn(weight, divisor)
    return weight


@triton.jit(do_not_specialize=["T", "B", "PER_ROW"])
def count_kernel(
    logp,  # [T] fp32
    old_logp,  # [T] fp32
    cu_seqlens,  # [B + 1] int32
    mask,  # [T] uint8 or None
    log_ratios,  # out [slots]: sums of logp - old_logp; None if not needed
    counts,  # out [slots] int32
    T,
    B,
    PER_ROW,
    SEGMENT: tl.constexpr,
    LANES: tl.constexpr,
):
    """Counted tokens of each segment and its sum of log-ratios, which token_kernel needs of the whole sequence."""
    row = tl.program_id(0) // PER_ROW
    begin, end = bounds(cu_seqlens, row, True, T)
    segments = tl.maximum(tl.cdiv(end - begin, SEGMENT), 1)  # an empty sequence has one of zeros
    for segment in range(tl.program_id(0) % PER_ROW, segments, PER_ROW):
        total = tl.zeros((LANES,), tl.float32)
        n = tl.zeros((LANES,), tl.int32)
        start = begin + segment * SEGMENT
        for first in range(start, min(start + SEGMENT, end), LANES):
            t = first + tl.arange(0, LANES)
            on = counted_at(mask, t, end)
            n += on.to(tl.int32)
            if log_ratios is not None:
                total += tl.load(logp + t, mask=on, other=0.0) - tl.load(old_logp + t, mask=on, other=0.0)
        slot = slot_of(row, segment, begin, B, SEGMENT)
        tl.store(counts + slot, tl.sum(n, axis=0))
        if log_ratios is not None:
            tl.store(log_ratios + slot, fold(total))


@triton.jit
def clipped(on, ratio, a, low, high, dual, FORM: tl.constexpr):
    """Which counted tokens the lower, upper and dual bound clip, and the ratio after clipping.

    CLIPPED clips a ratio only where that lowers the surrogate, which depends on the sign of the advantage a; CISPO
    clips every ratio.
    """
    cut_low = on & (ratio < low)
    cut_high = on & (ratio > high)
    cut_dual = tl.zeros(on.shape, tl.int1)
    used = ratio
    if FORM == _CLIPPED:
        cut_low = cut_low & (a < 0.0)
        cut_high = cut_high & (a > 0.0)
        if dual is not None:
            cut_dual = on & (ratio > dual) & (a < 0.0)
            used = tl.where(cut_dual, dual, used)
    return cut_low, cut_high, cut_dual, tl.where(cut_low, low, tl.where(cut_high, high, used))


@triton.jit
def kl_estimate(d, KL_TYPE: tl.constexpr):
    """Estimate of KL(policy || reference) from d = logp - ref_logp, and its derivative by logp."""
    if KL_TYPE == _K1:
        kl, derivative = d, tl.full(d.shape, 1.0, tl.float32)
    elif KL_TYPE == _K2:
        kl, derivative = 0.5 * (d * d), d
    else:
        kl = phi(-d, exp2(-d * LOG2E))
        derivative = d - kl
    return kl, derivative


@triton.jit(do_not_specialize=["T", "B", "PER_ROW", "slots"])
def token_kernel(
    logp,  # [T] fp32, as all vectors of tokens
    old_logp,
    advantages,  # [B] or [T]
    cu_seqlens,  # [B + 1] int32
    mask,  # [T] uint8 or None
    ref_logp,  # or None, as the next two
    entropy,
    rollout_logp,
    normalizer,  # [] fp32 or None
    log_ratios,  # [slots], of count_kernel, if SEQUENCE_RATIO
    row_counts,  # [slots] int32, of count_kernel, if SEQUENCE_RATIO or SEQUENCE_MEAN
    dlogp,  # out [T]
    dentropy,  # out [T], or None if the loss has no entropy bonus
    sums,  # out [SUMS, slots]
    counts,  # out [PARTIAL_COUNTS, slots] int32
    extremes,  # out [EXTREMES, slots]: -min ratio, max ratio, max drift
    T,
    B,
    PER_ROW,
    slots,
    low,  # bounds of the ratio
    high,
    dual,  # or None
    kl_coef,  # None if the KL is not part of the loss
    entropy_coef,
    tis_cap,  # or None
    divisor,
    FORM: tl.constexpr,
    KL_TYPE: tl.constexpr,
    SEQUENCE_RATIO: tl.constexpr,
    SEQUENCE_MEAN: tl.constexpr,
    DIVIDE_BY: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SEGMENT: tl.constexpr,
    LANES: tl.constexpr,
):
    """Sums of every PER_ROW-th segment of one sequence, and the gradients of their tokens.

    The gradient through a sequence's ratio needs the whole sequence: dlogp then holds only the gradient of the KL, and
    spread_kernel completes it.
    """
    THROUGH_MEAN: tl.constexpr = SEQUENCE_RATIO and FORM == _CLIPPED
    row = tl.program_id(0) // PER_ROW
    begin, end = bounds(cu_seqlens, row, True, T)
    segments = tl.maximum(tl.cdiv(end - begin, SEGMENT), 1)  # an empty sequence has one of zeros
    zero = tl.zeros((LANES,), tl.float32)
    none = tl.zeros((LANES,), tl.int32)
    share = 1.0
    if SEQUENCE_RATIO or SEQUENCE_MEAN:
        n = sequence_total(row_counts, row, begin, segments, B, SEGMENT)
        share = tl.maximum(n, 1).to(tl.float32)
    if SEQUENCE_RATIO:
        total = sequence_total(log_ratios, row, begin, segments, B, SEGMENT)
        sequence_ratio = exp2(tl.math.div_rn(total, share) * LOG2E)
    weight = gradient_weight(share, normalizer, divisor, SEQUENCE_MEAN, DIVIDE_BY)
    if not PER_TOKEN:
        row_advantage = tl.load(advantages + row)
    for segment in range(tl.program_id(0) % PER_ROW, segments, PER_ROW):
        s_loss, s_ratio, s_k1, s_k3, s_kl, s_entropy = zero, zero, zero, zero, zero, zero
        s_tis, s_drift, s_slope = zero, zero, zero
        n_tokens, n_low, n_high, n_dual, n_capped = none, none, none, none, none
        ratio_min, ratio_max, drift_max = zero + float("inf"), zero + float("-inf"), zero + float("-inf")
        start = begin + segment * SEGMENT
        for first in range(start, tl.minimum(start + SEGMENT, end), LANES):
            t = first + tl.arange(0, LANES)
            inside = t < end
            on = counted_at(mask, t, end)
            new = tl.load(logp + t, mask=on, other=0.0)
            old = tl.load(old_logp + t, mask=on, other=0.0)
            if PER_TOKEN:
                a = tl.load(advantages + t, mask=on, other=0.0)
            else:
                a = row_advantage + zero

            log_ratio = new - old
            power = exp2(log_ratio * LOG2E)
            ratio = sequence_ratio + zero if SEQUENCE_RATIO else power
            n_tokens += on.to(tl.int32)
            s_ratio += tl.where(on, ratio, 0.0)
            s_k1 -= log_ratio
            s_k3 += phi(log_ratio, power)
            ratio_min = lower(ratio_min, tl.where(on, ratio, float("inf")))
            ratio_max = higher(ratio_max, tl.where(on, ratio, float("-inf")))

            slope = -a  # derivative of the loss by the log-ratio
            if FORM != _REINFORCE:
                cut_low, cut_high, cut_dual, used = clipped(on, ratio, a, low, high, dual, FORM)
                n_low += cut_low.to(tl.int32)
                n_high += cut_high.to(tl.int32)
                n_dual += cut_dual.to(tl.int32)
                slope = -(used * a)
            if FORM == _CLIPPED:
                loss = slope
                slope = tl.where(cut_low | cut_high | cut_dual, 0.0, slope)
            else:
                loss = slope * new

            if rollout_logp is not None:
                rollout = tl.load(rollout_logp + t, mask=on, other=0.0)
                drift = tl.abs(new - rollout)
                s_drift += drift
                drift_max = higher(drift_max, tl.where(on, drift, float("-inf")))
                if tis_cap is not None:
                    tis = exp2((old - rollout) * LOG2E)
                    capped = tis > tis_cap
                    tis = tl.where(capped, tis_cap, tis)
                    n_capped += (on & capped).to(tl.int32)
                    s_tis += tl.where(on, tis, 0.0)
                    loss = loss * tis
                    slope = slope * tis
            gradient = slope
            if ref_logp is not None:
                kl, dkl = kl_estimate(new - tl.load(ref_logp + t, mask=on, other=0.0), KL_TYPE)
                s_kl += kl
                if kl_coef is not None:
                    loss = tl.fma(zero + kl_coef, kl, loss)
                    gradient = dkl if THROUGH_MEAN else tl.fma(zero + kl_coef, dkl, gradient)
            if entropy is not None:
                h = tl.load(entropy + t, mask=on, other=0.0)
                s_entropy += h
                if dentropy is not None:
                    loss = tl.fma(zero - entropy_coef, h, loss)
                    tl.store(dentropy + t, tl.where(on, -entropy_coef * weight, 0.0), mask=inside)
            s_loss += tl.where(on, loss, 0.0)
            if THROUGH_MEAN:
                s_slope += tl.where(on, slope, 0.0)
                if kl_coef is not None:
                    tl.store(dlogp + t, gradient, mask=inside)
            else:
                tl.store(dlogp + t, tl.where(on, gradient * weight, 0.0), mask=inside)

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
        to = counts + slot
        tl.store(to + TOKENS * slots, tl.sum(n_tokens, axis=0))
        tl.store(to + LOW * slots, tl.sum(n_low, axis=0))
        tl.store(to + HIGH * slots, tl.sum(n_high, axis=0))
        tl.store(to + DUAL * slots, tl.sum(n_dual, axis=0))
        tl.store(to + CAPPED * slots, tl.sum(n_capped, axis=0))
        to = extremes + slot
        tl.store(to, -tl.reduce(ratio_min, 0, lower))
        tl.store(to + slots, tl.reduce(ratio_max, 0, higher))
        tl.store(to + 2 * slots, tl.reduce(drift_max, 0, higher))


@triton.jit(do_not_specialize=["T", "B", "PER_ROW"])
def spread_kernel(
    cu_seqlens,  # [B + 1] int32
    mask,  # [T] uint8 or None
    normalizer,  # [] fp32 or None
    slopes,  # [slots]
    counts,  # [slots] int32
    dlogp,  # [T] in and out
    T,
    B,
    PER_ROW,
    kl_coef,  # None if the KL is not part of the loss
    divisor,
    SEQUENCE_MEAN: tl.constexpr,
    DIVIDE_BY: tl.constexpr,
    SEGMENT: tl.constexpr,
    LANES: tl.constexpr,
):
    """dlogp = (mean slope of the sequence + kl_coef dlogp) times the sequence's weight, where a token counts."""
    row = tl.program_id(0) // PER_ROW
    begin, end = bounds(cu_seqlens, row, True, T)
    segments = tl.cdiv(end - begin, SEGMENT)
    share = tl.maximum(sequence_total(counts, row, begin, segments, B, SEGMENT), 1).to(tl.float32)
    mean = tl.math.div_rn(sequence_total(slopes, row, begin, segments, B, SEGMENT), share)
    mean += tl.zeros((LANES,), tl.float32)
    weight = gradient_weight(share, normalizer, divisor, SEQUENCE_MEAN, DIVIDE_BY)
    for segment in range(tl.program_id(0) % PER_ROW, segments, PER_ROW):
        start = begin + segment * SEGMENT
        for first in range(start, min(start + SEGMENT, end), LANES):
            t = first + tl.arange(0, LANES)
            on = counted_at(mask, t, end)
            g = mean
            if kl_coef is not None:
                g = tl.fma(tl.zeros((LANES,), tl.float32) + kl_coef, tl.load(dlogp + t, mask=on, other=0.0), mean)
            tl.store(dlogp + t, tl.where(on, g * weight, 0.0), mask=t < end)
