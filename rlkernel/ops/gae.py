"""gae: generalized advantage estimation of packed completions, from rewards and values of their tokens.

Contract: orders.py, `gae`. A sequence's advantages depend on that sequence alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.kernels import cpu, reference, stock, triton
from rlkernel.ops.checks import check, check_number, check_tensors
from rlkernel.ops.define import define
from rlkernel.ops.stock_switch import is_stock


class GAE(NamedTuple):
    """Result of `gae`.

    Attributes:
        advantages: [T] fp32.
        returns: [T] fp32, advantages + values: the targets of the value model.
    """

    advantages: Tensor
    returns: Tensor


_gae = define(
    "gae(Tensor rewards, Tensor values, Tensor cu_seqlens, float gamma, float lam) -> (Tensor, Tensor)",
    fake=lambda rewards, values, cu_seqlens, gamma, lam: (
        rewards.new_empty(rewards.shape),
        rewards.new_empty(rewards.shape),
    ),
    reference=lambda: reference.gae.gae,
    cpu=lambda: cpu.gae.gae,
    triton=lambda: triton.gae.gae,
)


def gae(
    rewards: Tensor,  # [T] fp32
    values: Tensor,  # [T] fp32
    cu_seqlens: Tensor,  # [B + 1] int32
    gamma: float = 1.0,
    lam: float = 1.0,
) -> GAE:
    """Advantages and returns of every token, computed from the last token of its sequence to the first:

        delta_t = r_t + gamma V_(t+1) - V_t
        A_t = delta_t + gamma lam A_(t+1)
        return_t = A_t + V_t

    V and A after the last token are 0, because the completion has ended.

    Args:
        rewards: [T] fp32, reward of each token, a constant: KL penalties at every token, the score at the last one.
        values: [T] fp32, value of the state in which each token was chosen, a constant.
        cu_seqlens: [B + 1] int32, offsets of the sequences, from 0 to T. A sequence may be empty.
        gamma, lam: discount and lambda, both from 0 to 1. The kernels use fp32(gamma) and fp32(gamma * lam).

    Raises:
        ValueError: shapes differ, a number lies outside [0, 1], or cu_seqlens does not rise from 0 to T (checked on a
            CPU; on a GPU, tokens that no sequence covers get NaN).
        TypeError: rewards or values are not fp32 tensors, or cu_seqlens is not an int32 tensor.
        RuntimeError: rewards or values require a gradient.

    Source: Schulman et al., High-dimensional continuous control using generalized advantage estimation,
    arXiv:1506.02438.
    """
    check_tensors("gae", rewards=rewards, values=values, cu_seqlens=cu_seqlens)
    _check_dtype("rewards", rewards, torch.float32)
    _check_dtype("values", values, torch.float32)
    _check_dtype("cu_seqlens", cu_seqlens, torch.int32)
    check(
        rewards.dim() == 1 and values.shape == rewards.shape,
        lambda: f"gae: rewards is {tuple(rewards.shape)}, values {tuple(values.shape)}; expected [T] for both",
    )
    check(
        cu_seqlens.dim() == 1 and cu_seqlens.shape[0] >= 1,
        lambda: f"gae: cu_seqlens is {tuple(cu_seqlens.shape)}, expected [B + 1]",
    )
    gamma = check_number("gae", "gamma", gamma, "from 0 to 1", 0.0, 1.0)
    lam = check_number("gae", "lam", lam, "from 0 to 1", 0.0, 1.0)
    return GAE(*(stock.gae if is_stock() else _gae)(rewards, values, cu_seqlens, gamma, lam))


def _check_dtype(name: str, x: Tensor, dtype: torch.dtype) -> None:
    check(x.dtype == dtype, lambda: f"gae: {name} is {x.dtype}, expected {dtype}; cast it", TypeError)
