"""Reference of qk_norm_rope: rms_norm of every head, then rope."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from rlkernel.kernels.reference.rms_norm import rms_norm
from rlkernel.kernels.reference.rope import rope


def norm_then_rope(
    norm: Callable[[Tensor, Tensor, float], Tensor],
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]],
    q: Tensor,  # [T, H, D]
    k: Tensor,  # [T, HK, D]
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
) -> tuple[Tensor, Tensor]:
    """qk_norm_rope by the given implementations of rms_norm and rope."""
    d = q.shape[2]
    q_normed = norm(q.reshape(-1, d), q_weight, eps).view(q.shape)
    k_normed = norm(k.reshape(-1, d), k_weight, eps).view(k.shape)
    return rotate(q_normed, k_normed, positions, cos_sin, False)


qk_norm_rope = functools.partial(norm_then_rope, rms_norm, rope)
