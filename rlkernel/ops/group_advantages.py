"""group_advantages: advantages of completions from the rewards of their prompt's group, without a value model.

Contract: fp32, fixed order; a group's advantages depend on that group alone (mode "batch" excepted).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels import cpu, reference, stock, triton
from rlkernel.ops.checks import check, check_flag, check_number, check_tensors, is_int
from rlkernel.ops.define import define
from rlkernel.ops.stock_switch import is_stock

MODES = ("group", "leave_one_out", "batch", "none")

_group_advantages = define(
    "group_advantages(Tensor rewards, int group_size, str mode, bool normalize_std, float eps) -> Tensor",
    fake=lambda rewards, group_size, mode, normalize_std, eps: rewards.new_empty(rewards.shape),
    reference=lambda: reference.group_advantages.group_advantages,
    cpu=lambda: cpu.group_advantages.group_advantages,
    triton=lambda: triton.group_advantages.group_advantages,
)


def group_advantages(
    rewards: Tensor,  # [B] fp32
    group_size: int,
    *,
    mode: str = "group",
    normalize_std: bool = True,
    eps: float = 1e-4,
) -> Tensor:  # [B] fp32
    """Advantages from rewards; group g is rewards[g * group_size : (g + 1) * group_size].

        group:            (r - mean of its group) / (std of its group + eps)
        batch:            (r - mean of its group) / (std of all rewards + eps)
        leave_one_out:    r - mean of the other members of its group
        none:             r

    std is the sample standard deviation (divisor n - 1). A group of one has nothing to compare with, so its advantage
    is 0 in every mode except "none". A group of equal rewards has advantage exactly 0.

    Args:
        rewards: [B] fp32, finite and, except in mode "none", at most 1e15 in size. Constants: no gradient.
        group_size: completions per prompt, divides B. One global baseline (REINFORCE++) is mode "group" with
            group_size = B.
        mode: see above.
        normalize_std: False omits the division in modes "group" and "batch" (Dr. GRPO). The modes "leave_one_out" and
            "none" never divide.
        eps: added to the standard deviation, in units of reward, above 0.

    Raises:
        ValueError: a reward is NaN, infinite or too large (CPU; the message names its index), B is not a multiple of
            group_size, or an unknown mode.
        TypeError: rewards is not an fp32 tensor, group_size not an integer, or normalize_std not a bool.

    Source:
        GRPO arXiv:2402.03300, Dr. GRPO 2503.20783, RLOO 2402.14740, batch deviation 2508.08221.
    """
    check_tensors("group_advantages", rewards=rewards)
    check(
        is_int(group_size),
        lambda: f"group_advantages: group_size={group_size!r} must be an integer",
        TypeError,
    )
    check(rewards.dim() == 1, lambda: f"group_advantages: rewards is {tuple(rewards.shape)}, expected [B]")
    check(
        rewards.dtype == torch.float32,
        lambda: f"group_advantages: rewards is {rewards.dtype}, expected torch.float32; convert with rewards.float()",
        TypeError,
    )
    check(
        group_size >= 1 and rewards.shape[0] % group_size == 0,
        lambda: f"group_advantages: group_size={group_size} must be positive and divide B={rewards.shape[0]}",
    )
    check(mode in MODES, lambda: f"group_advantages: mode={mode!r} is unknown; expected one of {', '.join(MODES)}")
    expected = "above 0 and finite in float32, because a group of equal rewards divides by it"
    eps = check_number("group_advantages", "eps", eps, expected)
    check_flag("group_advantages", "normalize_std", normalize_std)
    op = stock.group_advantages if is_stock() else _group_advantages
    return op(rewards.detach(), group_size, mode, normalize_std, eps)
