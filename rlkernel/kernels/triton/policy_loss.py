"""policy_loss in Triton: one program a sequence, one for the batch, one a sequence to scale the gradients.

GPU order of a sum: lane j takes the tokens j, j + SEGMENT, ... of its sequence, ascending; lanes are folded in halves.
Sequences are added the same way. The fold adds pairs, so no layout and no number of warps can change a bit.
"""

from __future__ import annotations

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
from rlkernel.kernels.triton.common import LOG2E, aligned, exp2, on_device, options

_CLIPPED, _CISPO, _REINFORCE = tl.constexpr(CLIPPED), tl.constexpr(CISPO), tl.constexpr(REINFORCE)
SUMS = 9  # loss, ratio, k1, k3, kl, entropy, tis, drift, slope
LEVELS = SEGMENT.bit_length() - 1
WARPS = 4  # 8 would leave 128 registers a thread, and the nine running sums spill


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def fold(x, LEVELS: tl.constexpr):
    """Sum of x [2^LEVELS] in halves."""
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (2, 1 << (LEVELS - 1 - level))), axis=0)
    return tl.sum(x, axis=0)


@triton.jit
def phi(x):
    """e^x - 1 - x without cancellation near 0."""
    p = tl.fma(x, 2.7557319e-6, 2.4801587e-5)
    p = tl.fma(p, x, 1.9841270e-4)
    p = tl.fma(p, x, 1.3888889e-3)
    p = tl.fma(p, x, 8.3333333e-3)
    p = tl.fma(p, x, 4.1666667e-2)
    p = tl.fma(p, x, 1.6666667e-1)
    p = tl.fma(p, x, 0.5)
    return tl.where(tl.abs(x) <= 0.5, (x * x) * p, (exp2(x * LOG2E) - 1.0) - x)


@triton.jit
def extreme(x, on, SIGN: tl.constexpr):
    """Largest SIGN * x where on, NaN if one of them is; -inf where nothing is on."""
    top = tl.max(tl.where(on, SIGN * x, float("-inf")), axis=0)
    bad = tl.max((on & (x != x)).to(tl.int32), axis=0)
    return tl.where(bad > 0, float("nan"), top)


@triton.jit
def worse(a, b):
    """The larger one; NaN if one of them is."""
    return tl.where((b > a) | (b != b), b, a)


@triton.jit
def span(cu_seqlens, row, T):
    """First token of a sequence and the one behind its last, inside the buffer whatever cu_seqlens holds."""
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + row), 0), T)
    return begin, tl.minimum(tl.load(cu_seqlens + row + 1), T)


@triton.jit
def counted_at(mask, t, inside, HAS_MASK: tl.constexpr):
    """Which of the tokens t count."""
    on = inside
    if HAS_MASK:
        on = inside & (tl.load(mask + t, mask=inside, other=0) != 0)
    return on


@triton.jit(do_not_specialize=["T", "B"])
def sequence_kernel(
    logp,  # [T] fp32, as all vectors of tokens
    old_logp,
    advantages,  # [B] or [T]
    cu_seqlens,  # [B + 1] int32
    mask,  # [T] uint8
    ref_logp,
    entropy,
    rollout_logp,
    dlogp,  # out [T]: gradient before scaling
    sums,  # out [SUMS, B]
    counts,  # out [6, B] int32
    extremes,  # out [3, B]: -min ratio, max ratio, max drift
    T,
    B,
    low,
    high,
    dual,
    kl_coef,
    entropy_coef,
    tis_cap,
    FORM: tl.constexpr,
    KL_TYPE: tl.constexpr,
    SEQUENCE_RATIO: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_REF: tl.constexpr,
    HAS_KL: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_ROLLOUT: tl.constexpr,
    HAS_TIS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
):
    row = tl.program_id(0)
    begin, end = span(cu_seqlens, row, T)
    lane = tl.arange(0, BLOCK)
    zero = tl.zeros((BLOCK,), tl.float32)
    none = tl.zeros((BLOCK,), tl.int32)

    shared_ratio = 1.0
    if SEQUENCE_RATIO:
        total, n = zero, none
        for start in range(begin, end, BLOCK):
            t = start + lane
            on = counted_at(mask, t, t < end, HAS_MASK)
            total += tl.load(logp + t, mask=on, other=0.0) - tl.load(old_logp + t, mask=on, other=0.0)
            n += on.to(tl.int32)
        share = tl.maximum(tl.sum(n, axis=0), 1).to(tl.float32)
        shared_ratio = exp2(tl.math.div_rn(fold(total, LEVELS), share) * LOG2E)

    s_loss, s_ratio, s_k1, s_k3, s_kl, s_entropy, s_tis, s_drift, s_slope = (
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
    )
    n_on, n_low, n_high, n_dual, n_tis = none, none, none, none, none
    negated_min = float("-inf")
    ratio_max = float("-inf")
    drift_max = float("-inf")
    for start in range(begin, end, BLOCK):
        t = start + lane
        on = counted_at(mask, t, t < end, HAS_MASK)
        lp = tl.load(logp + t, mask=on, other=0.0)
        old = tl.load(old_logp + t, mask=on, other=0.0)
        if PER_TOKEN:
            a = tl.load(advantages + t, mask=on, other=0.0)
        else:
            a = tl.load(advantages + row) + zero
        log_ratio = lp - old
        if SEQUENCE_RATIO:
            ratio = shared_ratio + zero
        else:
            ratio = exp2(log_ratio * LOG2E)
        cut_low = on & (ratio < low)
        cut_high = on & (ratio > high)
        cut_dual = on & (ratio > dual)
        if FORM == _CLIPPED:
            cut_low = cut_low & (a < 0.0)
            cut_high = cut_high & (a > 0.0)
            cut_dual = cut_dual & (a < 0.0)
            used = tl.where(cut_low, low, tl.where(cut_high, high, tl.where(cut_dual, dual, ratio)))
            loss = -(used * a)
            slope = tl.where(cut_low | cut_high | cut_dual, 0.0, loss)
        elif FORM == _CISPO:
            slope = -(tl.where(cut_low, low, tl.where(cut_high, high, ratio)) * a)
            loss = slope * lp
        else:
            slope = -a
            loss = slope * lp
        drift = zero
        if HAS_ROLLOUT:
            rollout = tl.load(rollout_logp + t, mask=on, other=0.0)
            drift = tl.abs(lp - rollout)
            if HAS_TIS:
                tis = exp2((old - rollout) * LOG2E)
                cut = tis > tis_cap
                tis = tl.where(cut, tis_cap, tis)
                loss = loss * tis
                slope = slope * tis
                n_tis += (on & cut).to(tl.int32)
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
                kl = phi(-d)
                dkl = d - kl
            s_kl += tl.where(on, kl, 0.0)
            if HAS_KL:
                loss = tl.fma(zero + kl_coef, kl, loss)
                if SEQUENCE_RATIO and FORM == _CLIPPED:
                    gradient = dkl  # the policy's part needs the whole sequence: scale_kernel adds it
                else:
                    gradient = tl.fma(zero + kl_coef, dkl, gradient)
        if HAS_ENTROPY:
            h = tl.load(entropy + t, mask=on, other=0.0)
            loss = tl.fma(zero - entropy_coef, h, loss)
            s_entropy += h
        tl.store(dlogp + t, tl.where(on, gradient, 0.0), mask=t < end)
        s_loss += tl.where(on, loss, 0.0)
        s_slope += tl.where(on, slope, 0.0)
        s_ratio += tl.where(on, ratio, 0.0)
        s_k1 += tl.where(on, -log_ratio, 0.0)
        s_k3 += tl.where(on, phi(log_ratio), 0.0)
        s_drift += tl.where(on, drift, 0.0)
        n_on += on.to(tl.int32)
        if FORM != _REINFORCE:
            n_low += cut_low.to(tl.int32)
            n_high += cut_high.to(tl.int32)
        if FORM == _CLIPPED:
            n_dual += cut_dual.to(tl.int32)
        negated_min = worse(negated_min, extreme(ratio, on, -1.0))
        ratio_max = worse(ratio_max, extreme(ratio, on, 1.0))
        drift_max = worse(drift_max, extreme(drift, on, 1.0))

    tl.store(sums + row, fold(s_loss, LEVELS))
    tl.store(sums + B + row, fold(s_ratio, LEVELS))
    tl.store(sums + 2 * B + row, fold(s_k1, LEVELS))
    tl.store(sums + 3 * B + row, fold(s_k3, LEVELS))
    tl.store(sums + 4 * B + row, fold(s_kl, LEVELS))
    tl.store(sums + 5 * B + row, fold(s_entropy, LEVELS))
    tl.store(sums + 6 * B + row, fold(s_tis, LEVELS))
    tl.store(sums + 7 * B + row, fold(s_drift, LEVELS))
    tl.store(sums + 8 * B + row, fold(s_slope, LEVELS))
    total = tl.sum(n_on, axis=0)
    tl.store(counts + row, total)
    tl.store(counts + B + row, (total > 0).to(tl.int32))
    tl.store(counts + 2 * B + row, tl.sum(n_low, axis=0))
    tl.store(counts + 3 * B + row, tl.sum(n_high, axis=0))
    tl.store(counts + 4 * B + row, tl.sum(n_dual, axis=0))
    tl.store(counts + 5 * B + row, tl.sum(n_tis, axis=0))
    tl.store(extremes + row, negated_min)
    tl.store(extremes + B + row, ratio_max)
    tl.store(extremes + 2 * B + row, drift_max)


@triton.jit(do_not_specialize=["T", "B"])
def batch_kernel(
    cu_seqlens,  # [B + 1] int32
    sums,  # [SUMS, B]
    counts,  # [6, B] int32
    extremes,  # [3, B]
    normalizer,  # [] fp32
    loss,  # out [2]: loss, denominator
    stats,  # out [10]
    totals,  # out [6] int64
    T,
    B,
    HAS_NORMALIZER: tl.constexpr,
    SEQUENCE_MEAN: tl.constexpr,
    BY_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    for k in tl.static_range(6):
        n = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, B, BLOCK):
            row = start + lane
            n += tl.load(counts + k * B + row, mask=row < B, other=0).to(tl.int64)
        tl.store(totals + k, tl.sum(n, axis=0))
        if k == 0:
            tokens = tl.sum(n, axis=0)
    if BY_TOKENS:
        denominator = tl.maximum(tokens, 1).to(tl.float32)
    else:
        denominator = tl.maximum(B, 1).to(tl.float32)
    if HAS_NORMALIZER:
        denominator = tl.where(tokens > 0, tl.load(normalizer), denominator)
    broken = (tl.load(cu_seqlens) != 0) | (tl.load(cu_seqlens + B) != T)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, B, BLOCK):
        row = start + lane
        value = tl.load(sums + row, mask=row < B, other=0.0)
        if SEQUENCE_MEAN:
            members = tl.load(counts + row, mask=row < B, other=1)
            value = tl.math.div_rn(value, tl.maximum(members, 1).to(tl.float32))
        total += value
        first = tl.load(cu_seqlens + row, mask=row < B, other=0)
        last = tl.load(cu_seqlens + row + 1, mask=row < B, other=0)
        broken = broken | (tl.max((first > last).to(tl.int32), axis=0) > 0)
    # A GPU cannot raise: borders that do not fit make the loss and every gradient NaN.
    denominator = tl.where(broken, float("nan"), denominator)
    tl.store(loss, tl.math.div_rn(fold(total, LEVELS), denominator))
    tl.store(loss + 1, denominator)
    share = tl.maximum(tokens, 1).to(tl.float32)
    for k in tl.static_range(7):
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, B, BLOCK):
            row = start + lane
            total += tl.load(sums + (k + 1) * B + row, mask=row < B, other=0.0)
        tl.store(stats + k, tl.math.div_rn(fold(total, LEVELS), share))
    for k in tl.static_range(3):
        top = float("-inf")
        for start in range(0, B, BLOCK):
            row = start + lane
            x = tl.load(extremes + k * B + row, mask=row < B, other=float("-inf"))
            top = worse(top, extreme(x, row < B, 1.0))
        if k == 0:
            top = -top
        tl.store(stats + 7 + k, tl.where(tokens > 0, top, 0.0))


@triton.jit(do_not_specialize=["T", "B"])
def scale_kernel(
    cu_seqlens,  # [B + 1] int32
    mask,  # [T] uint8
    sums,  # [SUMS, B]
    counts,  # [6, B] int32
    loss,  # [2]: loss, denominator
    dlogp,  # [T] in and out
    dentropy,  # out [T]
    T,
    B,
    kl_coef,
    entropy_coef,
    THROUGH_MEAN: tl.constexpr,
    SEQUENCE_MEAN: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_KL: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    begin, end = span(cu_seqlens, row, T)
    lane = tl.arange(0, BLOCK)
    share = tl.maximum(tl.load(counts + row), 1).to(tl.float32)
    weight = 1.0
    if SEQUENCE_MEAN:
        weight = tl.math.div_rn(weight, share)
    weight = tl.math.div_rn(weight, tl.load(loss + 1))
    slope = tl.math.div_rn(tl.load(sums + 8 * B + row), share)
    for start in range(begin, end, BLOCK):
        t = start + lane
        on = counted_at(mask, t, t < end, HAS_MASK)
        g = tl.load(dlogp + t, mask=on, other=0.0)
        if THROUGH_MEAN:
            mean = slope + tl.zeros((BLOCK,), tl.float32)
            if HAS_KL:
                g = tl.fma(tl.zeros((BLOCK,), tl.float32) + kl_coef, g, mean)
            else:
                g = mean
        tl.store(dlogp + t, tl.where(on, g * weight, 0.0), mask=t < end)
        if HAS_ENTROPY:
            tl.store(dentropy + t, tl.where(on, -entropy_coef * weight, 0.0), mask=t < end)


# ---- launcher --------------------------------------------------------------------------------------------------------


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, batch = logp.shape[0], cu_seqlens.shape[0] - 1
    logp, old_logp, advantages, cu_seqlens = (aligned(x) for x in (logp, old_logp, advantages, cu_seqlens))
    mask = None if mask is None else mask.view(torch.uint8)
    mask, ref_logp, entropy, rollout_logp = (
        None if x is None else aligned(x) for x in (mask, ref_logp, entropy, rollout_logp)
    )
    dlogp = torch.empty_like(logp)
    dentropy = logp.new_empty(0) if entropy is None else torch.empty_like(logp)
    sums = logp.new_empty(SUMS, batch)
    extremes = logp.new_empty(3, batch)
    partial_counts = logp.new_empty(len(COUNTS), batch, dtype=torch.int32)
    loss, stats = logp.new_empty(2), logp.new_empty(len(STATS))
    counts = logp.new_empty(len(COUNTS), dtype=torch.int64)
    form, averaged = form_code(loss_type), sequence_mean(loss_type)
    has_kl = ref_logp is not None and kl_coef != 0.0
    low, high, dual = 1.0 - clip_low, 1.0 + clip_high, float("inf") if clip_dual is None else clip_dual
    with on_device(logp):
        if batch:
            sequence_kernel[(batch,)](
                logp, old_logp, advantages, cu_seqlens, mask, ref_logp, entropy, rollout_logp, dlogp, sums,
                partial_counts, extremes, tokens, batch, low, high, dual, kl_coef, entropy_coef, tis_cap or 0.0,
                FORM=form, KL_TYPE=KL_TYPES.index(kl_type), SEQUENCE_RATIO=sequence_ratio,
                PER_TOKEN=advantages.shape[0] != batch, HAS_MASK=mask is not None, HAS_REF=ref_logp is not None,
                HAS_KL=has_kl, HAS_ENTROPY=entropy is not None,
                HAS_ROLLOUT=rollout_logp is not None, HAS_TIS=tis_cap is not None, BLOCK=SEGMENT, LEVELS=LEVELS,
                num_warps=WARPS, **options(),
            )  # fmt: skip
        batch_kernel[(1,)](
            cu_seqlens, sums, partial_counts, extremes, normalizer, loss, stats, counts, tokens, batch,
            HAS_NORMALIZER=normalizer is not None, SEQUENCE_MEAN=averaged, BY_TOKENS=divides_by_tokens(loss_type),
            BLOCK=SEGMENT, LEVELS=LEVELS, num_warps=WARPS, **options(),
        )  # fmt: skip
        if batch:
            scale_kernel[(batch,)](
                cu_seqlens, mask, sums, partial_counts, loss, dlogp, dentropy, tokens, batch, kl_coef, entropy_coef,
                THROUGH_MEAN=sequence_ratio and form == CLIPPED, SEQUENCE_MEAN=averaged, HAS_MASK=mask is not None,
                HAS_KL=has_kl, HAS_ENTROPY=entropy is not None, BLOCK=SEGMENT, num_warps=WARPS, **options(),
            )  # fmt: skip
    return loss[0].clone(), dlogp, dentropy, stats, counts


# ---- ahead of time ---------------------------------------------------------------------------------------------------


def _sequence_variant(name: str, form: int, sequence_ratio: bool, kl_type: int) -> Variant:
    vectors = ("logp", "old_logp", "advantages", "ref_logp", "entropy", "rollout_logp", "dlogp", "sums", "extremes")
    types = dict.fromkeys(vectors, "*fp32:16")
    types |= {"cu_seqlens": "*i32:16", "mask": "*u8:16", "counts": "*i32:16", "T": "i32", "B": "i32"}
    types |= dict.fromkeys(("low", "high", "dual", "kl_coef", "entropy_coef", "tis_cap"), "fp32")
    flags = ("HAS_MASK", "HAS_REF", "HAS_KL", "HAS_ENTROPY", "HAS_ROLLOUT", "HAS_TIS")
    constants = {
        "FORM": form, "KL_TYPE": kl_type, "SEQUENCE_RATIO": sequence_ratio, "PER_TOKEN": False, "BLOCK": SEGMENT,
        "LEVELS": LEVELS, **dict.fromkeys(flags, True),
    }  # fmt: skip
    return Variant(name, sequence_kernel, types, constants, WARPS)


AOT: tuple[Variant, ...] = (
    _sequence_variant("policy_loss clipped", CLIPPED, False, 2),
    _sequence_variant("policy_loss gspo", CLIPPED, True, 2),
    _sequence_variant("policy_loss cispo", CISPO, False, 1),
    Variant(
        "policy_loss batch", batch_kernel,
        {"cu_seqlens": "*i32:16", "sums": "*fp32:16", "counts": "*i32:16", "extremes": "*fp32:16",
         "normalizer": "*fp32:16", "loss": "*fp32:16", "stats": "*fp32:16", "totals": "*i64:16", "T": "i32",
         "B": "i32"},
        {"HAS_NORMALIZER": True, "SEQUENCE_MEAN": True, "BY_TOKENS": False, "BLOCK": SEGMENT, "LEVELS": LEVELS},
        WARPS,
    ),
    Variant(
        "policy_loss scale", scale_kernel,
        {"cu_seqlens": "*i32:16", "mask": "*u8:16", "sums": "*fp32:16", "counts": "*i32:16", "loss": "*fp32:16",
         "dlogp": "*fp32:16", "dentropy": "*fp32:16", "T": "i32", "B": "i32", "kl_coef": "fp32",
         "entropy_coef": "fp32"},
        {"THROUGH_MEAN": True, "SEQUENCE_MEAN": True, "HAS_MASK": True, "HAS_KL": True, "HAS_ENTROPY": True,
         "BLOCK": SEGMENT},
        WARPS,
    ),
)  # fmt: skip
