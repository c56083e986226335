"""policy_loss in Triton: one pass over the tokens for loss, statistics and gradients, a small kernel for the batch.

GPU order of a sum: a sequence is cut into segments of SEGMENT tokens from its first one; lane j of LANES takes tokens
j, j + LANES, ... of a segment, ascending; lanes are folded in halves; segments are added ascending. Sequences are added
the same way, over SEGMENT lanes. A fold adds pairs, so no layout and no number of warps can change a bit.
Hopper has a kernel of its own for many plain tokens, with these bits: `cuda/policy_loss.py`, whose anchor is this.
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
    divides_by_tokens,
    form_code,
    sequence_mean,
)
from rlkernel.kernels.triton.common import aligned, on_device, options, pdl
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
    ahead,
    count_kernel,
    spread_kernel,
    token_kernel,
)

PROGRAMS = 2048
"""Programs that the sequences of a small batch are spread over."""
COUNT_HERE = 8192
"""Average tokens a sequence up to which every program counts its whole sequence; above, a pass of its own does."""


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
    """Gradients times scale, then times dloss; nothing is touched where both are 1."""
    if PDL:
        tl.extra.cuda.gdc_wait()
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
    mask = None if mask is None else aligned(mask.view(torch.uint8))  # it is counted in words
    mask, ref_logp, entropy, rollout_logp = (
        None if x is None else x.contiguous() for x in (mask, ref_logp, entropy, rollout_logp)
    )
    form, averaged, by_tokens = form_code(loss_type), sequence_mean(loss_type), divides_by_tokens(loss_type)
    divide_by, divisor = how_divided(normalizer, divisor, by_tokens, mask is not None, tokens, batch)
    has_kl, has_bonus = ref_logp is not None and kl_coef != 0.0, entropy is not None and entropy_coef != 0.0
    through_mean = sequence_ratio and form == CLIPPED
    has_counts = sequence_ratio or (mask is not None and averaged and tokens > COUNT_HERE * batch)

    dlogp = torch.empty_like(logp)
    dentropy = torch.empty_like(logp) if has_bonus else logp.new_empty(0)
    places = batch + tokens // SEGMENT + 1
    sums, extremes = logp.new_empty(SUMS, places), logp.new_empty(EXTREMES, places)
    partial_counts = logp.new_empty(PARTIAL_COUNTS, places, dtype=torch.int32)
    log_ratios = logp.new_empty(places) if sequence_ratio else None
    row_counts = logp.new_empty(places, dtype=torch.int32) if has_counts else None
    loss, scale, stats = logp.new_empty(()), logp.new_empty(()), logp.new_empty(len(STATS))
    counts = logp.new_empty(len(COUNTS), dtype=torch.int64)

    per_row = max(1, min(triton.cdiv(tokens, SEGMENT), PROGRAMS // max(1, batch)))
    grid = (batch * per_row,)
    cut: dict[str, Any] = {"SEGMENT": SEGMENT, "LANES": LANES, **options()}
    vectors = [x is not None for x in (ref_logp, entropy, rollout_logp)] + [advantages.shape[0] != batch]
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
                **ahead(any(vectors)), num_warps=1, **cut,
            )  # fmt: skip
        add_over_batch(
            cu_seqlens, sums, partial_counts, extremes, normalizer, loss, scale, stats, counts, tokens, divisor,
            divide_by, averaged, by_tokens,
        )  # fmt: skip
        if grid[0] and through_mean:
            spread_kernel[grid](
                cu_seqlens, mask, normalizer, sums[SLOPE.value], partial_counts, dlogp, tokens, batch, per_row,
                kl_coef, divisor, SEQUENCE_MEAN=averaged, DIVIDE_BY=divide_by, HAS_MASK=mask is not None,
                HAS_KL=has_kl, num_warps=1, **cut,
            )  # fmt: skip
    return loss, dlogp, dentropy, scale, stats, counts


def policy_loss_scale_(dlogp: Tensor, dentropy: Tensor, scale: Tensor, dloss: Tensor) -> None:
    tokens = dlogp.shape[0]
    if tokens:
        with on_device(dlogp):
            scale_kernel[(min(264, triton.cdiv(tokens, 2048)),)](
                dlogp, dentropy, scale, dloss, tokens, HAS_BONUS=dentropy.numel() > 0, BLOCK=2048, num_warps=8,
                **pdl(dlogp), **options(),
            )  # fmt: skip
