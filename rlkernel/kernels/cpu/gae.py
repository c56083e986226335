"""gae on the CPU: launcher of `csrc/cpu/gae.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels.cpu.library import function, pointer, threads
from rlkernel.kernels.cu_seqlens import check_cu_seqlens


def gae(rewards: Tensor, values: Tensor, cu_seqlens: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    check_cu_seqlens("gae", cu_seqlens, rewards.shape[0])
    rewards, values, cu_seqlens = rewards.contiguous(), values.contiguous(), cu_seqlens.contiguous()
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    function("rlk_gae", "ppppplffi")(
        *map(pointer, (rewards, values, cu_seqlens, advantages, returns)),
        *(cu_seqlens.shape[0] - 1, gamma, gamma * lam, threads()),
    )
    return advantages, returns
