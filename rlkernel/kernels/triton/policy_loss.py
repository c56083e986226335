"""policy_loss on GPUs: one pass over the tokens for loss, statistics and gradients, then a small kernel for the batch.

Contract: orders.py, `policy_loss`, with the GPU's order of a sum described below. `policy_loss` is the anchor of the
schedules in `cuda/policy_loss.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract.orders import SEGMENT
from rlkernel.kernels.policy_loss import (
    CLIPPED,
    COUNTS,
    KL_TYPES,
    STATS,
    Outputs,
    PolicyLossInputs,
    divides_by_tokens,
    form_code,
    sequence_mean,
)
from rlkernel.kernels.triton.common import after_previous, aligned, cdiv, on_device, options, pdl
from rlkernel.kernels.triton.policy_loss_batch import (
    EXTREMES,
    PARTIAL_COUNTS,
    SLOPE,
    SUMS,
    add_over_batch,
    how_divided,
)
from rlkernel.kernels.triton.policy_loss_tokens import (
    LANES,
    count_kernel,
    prefetch,
    spread_kernel,
    token_kernel,
)

# Order of a sum on GPUs: a sequence is cut into segments of SEGMENT tokens; lane j of LANES adds the tokens j,
# j + LANES, ... of a segment, ascending; lanes are folded in halves; segments are added ascending. The batch adds its
# sequences the same way, with SEGMENT lanes. A fold adds pairs, so neither layout nor num_warps changes a bit.

PROGRAMS = 2048
"""Programs over which the sequences of a small batch are spread."""
INLINE_COUNT_TOKENS = 8192
"""Average tokens per sequence up to which every program counts its whole sequence; above, count_kernel runs first."""


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["T"])
def scale_kernel(
    dlogp,  # [T] in and out
    dentropy,  # [T] in and out
    scale,  # []
    dloss,  # []
    T,
    HAS_BONUS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiplies the gradients by scale, then by dloss; writes nothing if both are 1."""
    after_previous(PDL)
    s, d = tl.load(scale), tl.load(dloss)
    if (s != 1.0) | (d != 1.0):
        for first in range(tl.program_id(0) * BLOCK, T, tl.num_programs(0) * BLOCK):
            t = first + tl.arange(0, BLOCK)
            tl.store(dlogp + t, (tl.load(dlogp + t, mask=t < T) * s) * d, mask=t < T)
            if HAS_BONUS:
                tl.store(dentropy + t, (tl.load(dentropy + t, mask=t < T) * s) * d, mask=t < T)


# ---- launchers -------------------------------------------------------------------------------------------------------


def policy_loss(x: PolicyLossInputs) -> Outputs:
    vectors = (None if v is None else v.contiguous() for v in x[:8])
    logp, old_logp, advantages, cu_seqlens, mask, ref_logp, entropy, rollout_logp = vectors
    tokens, batch = logp.shape[0], cu_seqlens.shape[0] - 1
    mask = None if mask is None else aligned(mask.view(torch.uint8))  # the kernel counts it in 32-bit words
    form, averaged, by_tokens = form_code(x.loss_type), sequence_mean(x.loss_type), divides_by_tokens(x.loss_type)
    divide_by, divisor = how_divided(x.normalizer, x.divisor, by_tokens, mask is not None, tokens, batch)
    sequence_ratio, per_token = x.sequence_ratio, advantages.shape[0] != batch
    through_mean = sequence_ratio and form == CLIPPED
    has_counts = sequence_ratio or (mask is not None and averaged and tokens > INLINE_COUNT_TOKENS * batch)

    dlogp = torch.empty_like(logp)
    dentropy = torch.empty_like(logp) if x.has_bonus else logp.new_empty(0)
    slots = batch + tokens // SEGMENT + 1
    sums, extremes = logp.new_empty(SUMS, slots), logp.new_empty(EXTREMES, slots)
    partial_counts = logp.new_empty(PARTIAL_COUNTS, slots, dtype=torch.int32)
    log_ratios = logp.new_empty(slots) if sequence_ratio else None
    row_counts = logp.new_empty(slots, dtype=torch.int32) if has_counts else None
    loss, scale, stats = logp.new_empty(()), logp.new_empty(()), logp.new_empty(len(STATS))
    counts = logp.new_empty(len(COUNTS), dtype=torch.int64)

    per_row = max(1, min(cdiv(tokens, SEGMENT), PROGRAMS // max(1, batch)))
    grid = (batch * per_row,)
    cut: dict[str, Any] = {"SEGMENT": SEGMENT, "LANES": LANES, **options()}
    has_ref, has_entropy, has_rollout = (v is not None for v in (ref_logp, entropy, rollout_logp))
    with on_device(logp):
        if grid[0] and has_counts:
            count_kernel[grid](
                logp, old_logp, cu_seqlens, mask, log_ratios, row_counts, tokens, batch, per_row,
                SEQUENCE_RATIO=sequence_ratio, HAS_MASK=mask is not None, num_warps=1, **cut,
            )  # fmt: skip
        if grid[0]:
            token_kernel[grid](
                logp, old_logp, advantages, cu_seqlens, mask, ref_logp, entropy, rollout_logp, x.normalizer, log_ratios,
                row_counts, dlogp, dentropy, sums, partial_counts, extremes, tokens, batch, per_row, slots,
                1.0 - x.clip_low, 1.0 + x.clip_high, float("inf") if x.clip_dual is None else x.clip_dual, x.kl_coef,
                x.entropy_coef, x.tis_cap or 0.0, divisor, FORM=form, KL_TYPE=KL_TYPES.index(x.kl_type),
                SEQUENCE_RATIO=sequence_ratio, SEQUENCE_MEAN=averaged, DIVIDE_BY=divide_by, PER_TOKEN=per_token,
                HAS_MASK=mask is not None, HAS_COUNTS=has_counts, HAS_DUAL=x.clip_dual is not None, HAS_REF=has_ref,
                HAS_KL=x.has_kl, HAS_ENTROPY=has_entropy, HAS_BONUS=x.has_bonus, HAS_ROLLOUT=has_rollout,
                HAS_TIS=x.tis_cap is not None, **prefetch(has_ref or has_entropy or has_rollout or per_token),
                num_warps=1, **cut,
            )  # fmt: skip
        add_over_batch(
            cu_seqlens, sums, partial_counts, extremes, x.normalizer, loss, scale, stats, counts, tokens, divisor,
            divide_by, averaged, by_tokens,
        )  # fmt: skip
        if grid[0] and through_mean:
            spread_kernel[grid](
                cu_seqlens, mask, x.normalizer, sums[SLOPE.value], partial_counts, dlogp, tokens, batch, per_row,
                x.kl_coef, divisor, SEQUENCE_MEAN=averaged, DIVIDE_BY=divide_by, HAS_MASK=mask is not None,
                HAS_KL=x.has_kl, num_warps=1, **cut,
            )  # fmt: skip
    return loss, dlogp, dentropy, scale, stats, counts


def policy_loss_scale_(dlogp: Tensor, dentropy: Tensor, scale: Tensor, dloss: Tensor) -> None:
    tokens = dlogp.shape[0]
    if tokens:
        with on_device(dlogp):
            scale_kernel[(min(264, cdiv(tokens, 2048)),)](
                dlogp, dentropy, scale, dloss, tokens, HAS_BONUS=dentropy.numel() > 0, BLOCK=2048, num_warps=8,
                **pdl(dlogp), **options(),
            )  # fmt: skip
