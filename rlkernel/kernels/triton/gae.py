"""gae on GPUs: one program per sequence, from its last token to its first.

Contract: orders.py, `gae`, with the bits of `kernels/reference/gae.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.kernels.triton.common import on_device, options

# ---- kernels ------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["T"])
def gae_kernel(
    rewards,  # [T]
    values,  # [T]
    cu_seqlens,  # [B + 1]
    advantages,  # [T]
    returns,  # [T]
    T,
    gamma,
    decay,  # gamma * lambda
    UNROLL: tl.constexpr,
):
    first = tl.maximum(tl.load(cu_seqlens + tl.program_id(0)), 0)
    last = tl.minimum(tl.load(cu_seqlens + tl.program_id(0) + 1), T) - 1
    advantage, after = 0.0, 0.0
    for start in range(0, last - first + 1, UNROLL):
        r, v = (), ()
        for u in tl.static_range(UNROLL):  # issues all loads before the first step
            at = last - start - u
            r = r + (tl.load(rewards + at, mask=at >= first, other=0.0),)
            v = v + (tl.load(values + at, mask=at >= first, other=0.0),)
        for u in tl.static_range(UNROLL):
            at = last - start - u
            advantage = tl.fma(decay, advantage, tl.fma(gamma, after, r[u]) - v[u])
            after = v[u]
            tl.store(advantages + at, advantage, mask=at >= first)
            tl.store(returns + at, advantage + after, mask=at >= first)


# ---- launchers ----------------------------------------------------------------------------------

_UNROLL = 16


def gae(rewards: Tensor, values: Tensor, cu_seqlens: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """(advantages, returns) [T] fp32. cu_seqlens are not checked, because that would synchronise; a token outside every
    sequence gets NaN."""
    rewards, values, cu_seqlens = rewards.contiguous(), values.contiguous(), cu_seqlens.contiguous()
    advantages, returns = (torch.full_like(rewards, float("nan")) for _ in range(2))
    batch = cu_seqlens.shape[0] - 1
    if batch and rewards.shape[0]:
        with on_device(rewards):
            gae_kernel[(batch,)](
                rewards, values, cu_seqlens, advantages, returns, rewards.shape[0], gamma, gamma * lam,
                UNROLL=_UNROLL, num_warps=1, **options(),
            )  # fmt: skip
    return advantages, returns
