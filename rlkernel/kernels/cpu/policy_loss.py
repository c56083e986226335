"""policy_loss on the CPU: launchers of `csrc/cpu/policy_loss.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels.cpu.library import CPU, FLOATS, function, pointer, threads
from rlkernel.kernels.policy_loss import (
    COUNTS,
    KL_TYPES,
    STATS,
    check_cu_seqlens,
    divides_by_tokens,
    form_code,
    sequence_mean,
)


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
    if divisor is not None:
        normalizer = torch.tensor(divisor, **FLOATS)
    tokens = logp.shape[0]
    batch = len(check_cu_seqlens(cu_seqlens, tokens)) - 1
    vectors = [
        None if x is None else x.contiguous()
        for x in (logp, old_logp, advantages, cu_seqlens, mask, ref_logp, entropy, rollout_logp, normalizer)
    ]
    flags = torch.tensor(
        [
            advantages.shape[0] != batch,
            form_code(loss_type),
            KL_TYPES.index(kl_type),
            sequence_ratio,
            sequence_mean(loss_type),
            divides_by_tokens(loss_type),
        ],
        dtype=torch.int32,
        device=CPU,
    )
    dual = float("inf") if clip_dual is None else clip_dual
    scalars = torch.tensor([1.0 - clip_low, 1.0 + clip_high, dual, kl_coef, entropy_coef, tis_cap or 0.0], **FLOATS)
    loss, dlogp = torch.empty((), **FLOATS), torch.empty(tokens, **FLOATS)
    has_bonus = entropy is not None and entropy_coef != 0.0
    dentropy = torch.empty(tokens, **FLOATS) if has_bonus else None
    stats, counts = torch.empty(len(STATS), **FLOATS), torch.empty(len(COUNTS), dtype=torch.int64, device=CPU)
    function("rlk_policy_loss", "p" * 16 + "li")(
        *(pointer(x) for x in (*vectors, flags, scalars, loss, dlogp, dentropy, stats, counts)), batch, threads()
    )
    dentropy = torch.empty(0, **FLOATS) if dentropy is None else dentropy
    return loss, dlogp, dentropy, torch.ones((), **FLOATS), stats, counts


def policy_loss_scale_(dlogp: Tensor, dentropy: Tensor, scale: Tensor, dloss: Tensor) -> None:
    for gradient in (dlogp, dentropy):
        scaled = gradient.contiguous()
        function("rlk_policy_loss_scale", "pppli")(*map(pointer, (scaled, scale, dloss)), scaled.numel(), threads())
        if scaled is not gradient:
            gradient.copy_(scaled)
