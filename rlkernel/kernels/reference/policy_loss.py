"""Reference of policy_loss: elementwise terms of each token, then sums per sequence and over the batch.

A sequence is cut into segments of SEGMENT tokens; `row_sum` adds inside a segment and segments are added ascending. The
batch adds its sequences the same way. All arithmetic is fp32; masked tokens are replaced by zeros first.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from rlkernel.contract.orders import SEGMENT
from rlkernel.kernels.cu_seqlens import check_cu_seqlens
from rlkernel.kernels.policy_loss import (
    CISPO,
    CLIPPED,
    PHI_COEFFICIENTS,
    Outputs,
    PolicyLossInputs,
    divides_by_tokens,
    form_code,
    sequence_mean,
)
from rlkernel.kernels.reference.arith import exp, fma, horner, row_sum


def phi(x: Tensor) -> Tensor:
    """e^x - 1 - x in fp32, without cancellation near 0, where it is never negative."""
    return torch.where(x.abs() <= 0.5, (x * x) * horner(PHI_COEFFICIENTS, x), (exp(x) - 1.0) - x)


def segment_sum(rows: Tensor) -> Tensor:
    """Sum over the last dimension: `row_sum` inside segments of SEGMENT elements, segments ascending."""
    total = torch.zeros(rows.shape[:-1])
    for start in range(0, rows.shape[-1], SEGMENT):
        total = total + row_sum(rows[..., start : start + SEGMENT])
    return total


def policy_loss(x: PolicyLossInputs) -> Outputs:
    tokens = x.logp.shape[0]
    normalizer = x.normalizer if x.divisor is None else torch.tensor(x.divisor)
    borders = check_cu_seqlens("policy_loss", x.cu_seqlens, tokens)
    batch = len(borders) - 1
    lengths = torch.tensor([b - a for a, b in pairwise(borders)], dtype=torch.int64)
    owner = torch.repeat_interleave(torch.arange(batch), lengths)
    place = torch.arange(tokens) - torch.tensor(borders[:-1], dtype=torch.int64)[owner]
    width = int(lengths.max()) if batch else 0
    counted = torch.ones(tokens, dtype=torch.bool) if x.mask is None else x.mask
    zero = torch.zeros(tokens)

    def clean(v: Tensor) -> Tensor:
        return torch.where(counted, v, zero)

    def per_sequence(v: Tensor) -> Tensor:
        rows = torch.zeros(batch, width)
        rows[owner, place] = clean(v)
        return segment_sum(rows)

    def count(flags: Tensor) -> Tensor:
        return torch.zeros(batch, dtype=torch.int64).index_add_(0, owner, (flags & counted).to(torch.int64))

    n = count(counted)
    share = n.clamp(min=1).float()
    logp, old = clean(x.logp), clean(x.old_logp)
    a = clean(x.advantages if x.advantages.shape[0] == tokens and tokens != batch else x.advantages[owner])

    log_ratio = logp - old
    ratio = exp((per_sequence(log_ratio) / share)[owner] if x.sequence_ratio else log_ratio)
    low, high = torch.tensor(1.0 - x.clip_low), torch.tensor(1.0 + x.clip_high)
    form = form_code(x.loss_type)
    never = torch.zeros(tokens, dtype=torch.bool)
    cut_low = cut_high = cut_dual = never
    if form == CLIPPED:
        cut_low, cut_high = (a < 0) & (ratio < low), (a > 0) & (ratio > high)
        if x.clip_dual is not None:
            cut_dual = (a < 0) & (ratio > torch.tensor(x.clip_dual))
            ratio_used = torch.where(cut_dual, torch.tensor(x.clip_dual), ratio)
        else:
            ratio_used = ratio
        ratio_used = torch.where(cut_low, low, torch.where(cut_high, high, ratio_used))
        loss = -(ratio_used * a)
        slope = torch.where(cut_low | cut_high | cut_dual, zero, loss)  # d loss / d log-ratio
    elif form == CISPO:
        cut_low, cut_high = ratio < low, ratio > high
        slope = -(torch.where(cut_low, low, torch.where(cut_high, high, ratio)) * a)
        loss = slope * logp
    else:
        slope = -a
        loss = slope * logp

    tis, tis_cut, drift = zero, never, zero
    if x.rollout_logp is not None:
        rollout = clean(x.rollout_logp)
        drift = (logp - rollout).abs()
        if x.tis_cap is not None:
            tis = exp(old - rollout)
            tis_cut = tis > torch.tensor(x.tis_cap)
            tis = torch.where(tis_cut, torch.tensor(x.tis_cap), tis)
            loss, slope = loss * tis, slope * tis

    kl = dkl = zero
    if x.ref_logp is not None:
        d = logp - clean(x.ref_logp)
        if x.kl_type == "k1":
            kl, dkl = d, torch.ones(tokens)
        elif x.kl_type == "k2":
            kl, dkl = 0.5 * (d * d), d
        else:
            kl = phi(-d)
            dkl = d - kl
        if x.has_kl:
            loss = fma(torch.tensor(x.kl_coef), kl, loss)
    entropy = clean(x.entropy) if x.entropy is not None else zero
    if x.has_bonus:
        loss = fma(torch.tensor(-x.entropy_coef), entropy, loss)

    gradient = slope
    if x.sequence_ratio and form == CLIPPED:
        gradient = (per_sequence(slope) / share)[owner]
    if x.has_kl:
        gradient = fma(torch.tensor(x.kl_coef), dkl, gradient)

    total = int(n.sum())
    one = torch.ones(())
    if normalizer is not None and total > 0:
        denominator = normalizer
    else:
        denominator = torch.tensor(float(max(1, total if divides_by_tokens(x.loss_type) else batch)))
    averaged = sequence_mean(x.loss_type)
    sums = per_sequence(loss)
    value = segment_sum(sums / share if averaged else sums) / denominator
    weight = ((one / share if averaged else one.expand(batch)) / denominator)[owner]
    dlogp = clean(gradient * weight)
    dentropy = clean(torch.tensor(-x.entropy_coef) * weight) if x.has_bonus else torch.zeros(0)

    means = [segment_sum(per_sequence(v)) for v in (ratio, -log_ratio, phi(log_ratio), kl, entropy, tis, drift)]
    stats = [m / max(1, total) for m in means]
    if total:
        stats += [ratio[counted].min(), ratio[counted].max(), drift[counted].max()]
    else:
        stats += [torch.zeros(())] * 3
    counts = [torch.tensor(total), (n > 0).sum(), *(count(c).sum() for c in (cut_low, cut_high, cut_dual, tis_cut))]
    stats += [c.float() / max(1, total) for c in counts[2:]]
    return value, dlogp, dentropy, torch.ones(()), torch.stack(stats), torch.stack(counts)


def policy_loss_scale_(dlogp: Tensor, dentropy: Tensor, scale: Tensor, dloss: Tensor) -> None:
    for gradient in (dlogp, dentropy):
        gradient.mul_(scale).mul_(dloss)
