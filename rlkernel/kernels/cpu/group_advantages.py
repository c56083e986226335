"""group_advantages on the CPU: launcher of `csrc/cpu/group_advantages.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels.cpu.library import function, pointer, threads
from rlkernel.kernels.reference.group_advantages import check_rewards

_MODES = ("group", "leave_one_out", "batch")  # codes of the C interface


def group_advantages(rewards: Tensor, group_size: int, mode: str, normalize_std: bool, eps: float) -> Tensor:
    check_rewards(rewards, group_size, mode)
    if mode == "none" or rewards.numel() == 0:
        return rewards.clone()
    rewards = rewards.contiguous()
    out = torch.empty_like(rewards)
    function("rlk_group_advantages", "pplliifi")(
        pointer(rewards), pointer(out), rewards.numel(), group_size, _MODES.index(mode), normalize_std, eps, threads()
    )
    return out
