"""qk_norm_rope on the CPU: the C++ kernel of rms_norm, then that of rope."""

from __future__ import annotations

from torch import Tensor

from rlkernel.kernels.cpu.rms_norm import rms_norm
from rlkernel.kernels.cpu.rope import rope


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, positions: Tensor, cos_sin: Tensor
) -> tuple[Tensor, Tensor]:
    d = q.shape[2]
    q_normed = rms_norm(q.reshape(-1, d), q_weight, eps).view(q.shape)
    k_normed = rms_norm(k.reshape(-1, d), k_weight, eps).view(k.shape)
    return rope(q_normed, k_normed, positions, cos_sin, False)
