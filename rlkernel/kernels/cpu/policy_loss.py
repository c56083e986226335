"""policy_loss on the CPU: launchers of `csrc/cpu/policy_loss.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels.cpu.library import CPU, FLOATS, function, pointer, threads
from rlkernel.kernels.cu_seqlens import check_cu_seqlens
from rlkernel.kernels.policy_loss import (
    COUNTS,
    KL_TYPES,
    STATS,
    Outputs,
    PolicyLossInputs,
    divides_by_tokens,
    form_code,
    sequence_mean,
)


def policy_loss(x: PolicyLossInputs) -> Outputs:
    if x.divisor is not None:
        x = x._replace(normalizer=torch.tensor(x.divisor, **FLOATS))
    tokens = x.logp.shape[0]
    batch = len(check_cu_seqlens("policy_loss", x.cu_seqlens, tokens)) - 1
    tensors = [None if t is None else t.contiguous() for t in x[:9]]
    flags = torch.tensor(
        [
            x.advantages.shape[0] != batch,
            form_code(x.loss_type),
            KL_TYPES.index(x.kl_type),
            x.sequence_ratio,
            sequence_mean(x.loss_type),
            divides_by_tokens(x.loss_type),
        ],
        dtype=torch.int32,
        device=CPU,
    )
    dual = float("inf") if x.clip_dual is None else x.clip_dual
    scalars = torch.tensor(
        [1.0 - x.clip_low, 1.0 + x.clip_high, dual, x.kl_coef, x.entropy_coef, x.tis_cap or 0.0], **FLOATS
    )
    loss, dlogp = torch.empty((), **FLOATS), torch.empty(tokens, **FLOATS)
    dentropy = torch.empty(tokens, **FLOATS) if x.has_bonus else None
    stats, counts = torch.empty(len(STATS), **FLOATS), torch.empty(len(COUNTS), dtype=torch.int64, device=CPU)
    function("rlk_policy_loss", "p" * 16 + "li")(
        *(pointer(t) for t in (*tensors, flags, scalars, loss, dlogp, dentropy, stats, counts)), batch, threads()
    )
    dentropy = torch.empty(0, **FLOATS) if dentropy is None else dentropy
    return loss, dlogp, dentropy, torch.ones((), **FLOATS), stats, counts


def policy_loss_scale_(dlogp: Tensor, dentropy: Tensor, scale: Tensor, dloss: Tensor) -> None:
    for gradient in (dlogp, dentropy):
        scaled = gradient.contiguous()
        function("rlk_policy_loss_scale", "pppli")(*map(pointer, (scaled, scale, dloss)), scaled.numel(), threads())
        if scaled is not gradient:
            gradient.copy_(scaled)
