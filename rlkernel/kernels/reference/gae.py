"""Reference of gae: all sequences step together from their last token to their first, with explicit fma."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels.cu_seqlens import check_cu_seqlens
from rlkernel.kernels.reference.arith import fma


def gae(rewards: Tensor, values: Tensor, cu_seqlens: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    check_cu_seqlens("gae", cu_seqlens, rewards.shape[0])
    first, at = cu_seqlens[:-1].long(), cu_seqlens[1:].long() - 1
    discount, decay = (torch.tensor(c, dtype=torch.float32, device=rewards.device) for c in (gamma, gamma * lam))
    advantages = torch.empty_like(rewards)
    advantage = after = torch.zeros(len(at), dtype=torch.float32, device=rewards.device)
    while bool((unfinished := at >= first).any()):
        first, at, advantage, after = (x[unfinished] for x in (first, at, advantage, after))
        delta = fma(discount, after, rewards[at]) - values[at]
        advantage = fma(decay, advantage, delta)
        advantages[at], after, at = advantage, values[at], at - 1
    return advantages, advantages + values
