"""policy_loss on GPUs: one pass over the tokens for loss, statistics and gradients, then a small kernel for the batch.

Contract: orders.py, `policy_loss`, with the GPU's order of a sum described below.
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
from rlkernel.kernels.triton.common import after_previous, cdiv, on_device, options, pdl
from rlkernel.kernels.triton.policy_loss_batch import (
    EXTREMES,
    PARTIAL_COUNTS,
    SLOPE,
    SUMS,
    add_over_batch,
    how_divided,
)
from rlkernel.kernels.triton.policy_loss_tokens import LANES, count_kernel, spread_kernel, token_kernel

# Order of a sum on GPUs: a sequence is cut into segments of SEGMENT tokens; lane j of LANES adds the tokens j,
# j + LANES, ... of a segment, ascending; lanes are folded in halves; segments are added ascending. The batch adds its
# sequences the same way, with SEGMENT lanes. A fold adds pairs, so neither layout nor num_warps changes a bit.

PROGRAMS = 2048
"""Programs over which the sequences of a small batch are spread."""


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
    mask = None if mask is None else mask.view(torch.uint8)
    form, averaged, by_tokens = form_code(x.loss_type), sequence_mean(x.loss_type), divides_by_tokens(x.loss_type)
    divide_by, divisor = how_divided(x.normalizer, x.divisor, by_tokens, mask is not None, tokens, batch)
    sequence_ratio = x.sequence_ratio
    kl_coef = x.kl_coef if x.has_kl else None

    dlogp = torch.empty_like(logp)
    dentropy = torch.empty_like(logp) if x.has_bonus else None
    slots = batch + tokens // SEGMENT + 1
    sums, extremes = logp.new_empty(SUMS, slots), logp.new_empty(EXTREMES, slots)
    partial_counts = logp.new_empty(PARTIAL_COUNTS, slots, dtype=torch.int32)
    log_ratios = logp.new_empty(slots) if sequence_ratio else None
    row_counts = logp.new_empty(slots, dtype=torch.int32) if sequence_ratio or averaged else None
    loss, scale, stats = logp.new_empty(()), logp.new_empty(()), logp.new_empty(len(STATS))
    counts = logp.new_empty(len(COUNTS), dtype=torch.int64)

    per_row = max(1, min(cdiv(tokens, SEGMENT), PROGRAMS // max(1, batch)))
    grid = (batch * per_row,)
    cut: dict[str, Any] = {"SEGMENT": SEGMENT, "LANES": LANES, **options()}
    with on_device(logp):
        if grid[0] and row_counts is not None:
            count_kernel[grid](
                logp, old_logp, cu_seqlens, mask, log_ratios, row_counts, tokens, batch, per_row, num_warps=1, **cut
            )  # fmt: skip
        if grid[0]:
            token_kernel[grid](
                logp, old_logp, advantages, cu_seqlens, mask, ref_logp, entropy, rollout_logp, x.normalizer, log_ratios,
                row_counts, dlogp, dentropy, sums, partial_counts, extremes, tokens, batch, per_row, slots,
                1.0 - x.clip_low, 1.0 + x.clip_high, x.clip_dual, kl_coef, x.entropy_coef, x.tis_cap, divisor,
                FORM=form, KL_TYPE=KL_TYPES.index(x.kl_type), SEQUENCE_RATIO=sequence_ratio, SEQUENCE_MEAN=averaged,
                DIVIDE_BY=divide_by, PER_TOKEN=advantages.shape[0] != batch, num_warps=1, **cut,
            )  # fmt: skip
        add_over_batch(
            cu_seqlens, sums, partial_counts, extremes, x.normalizer, loss, scale, stats, counts, tokens, divisor,
            divide_by, averaged, by_tokens,
        )  # fmt: skip
        if grid[0] and sequence_ratio and form == CLIPPED:
            spread_kernel[grid](
                cu_seqlens, mask, x.normalizer, sums[SLOPE.value], partial_counts, dlogp, tokens, batch, per_row,
                kl_coef, divisor, SEQUENCE_MEAN=averaged, DIVIDE_BY=divide_by, num_warps=1, **cut,
            )  # fmt: skip
    return loss, dlogp, logp.new_empty(0) if dentropy is None else dentropy, scale, stats, counts


def policy_loss_scale_(dlogp: Tensor, dentropy: Tensor, scale: Tensor, dloss: Tensor) -> None:
    tokens = dlogp.shape[0]
    if tokens:
        with on_device(dlogp):
            scale_kernel[(min(264, cdiv(tokens, 2048)),)](
                dlogp, dentropy, scale, dloss, tokens, HAS_BONUS=dentropy.numel() > 0, BLOCK=2048, num_warps=8,
                **pdl(dlogp), **options(),
            )  # fmt: skip
