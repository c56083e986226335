"""Reference of rope: fma(x1, cos, -(x2 * sin)) and fma(x2, cos, x1 * sin) in fp32, one rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels.reference.arith import fma
from rlkernel.kernels.reference.embedding import check_range


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    check_range("rope", "positions", positions, cos_sin.shape[0], "P (rows of cos_sin)")
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)  # [T, 1, D/2]
    if inverse:
        sin = -sin

    def rotate(x: Tensor) -> Tensor:
        x1, x2 = x.float().chunk(2, dim=-1)
        return torch.cat((fma(x1, cos, -(x2 * sin)), fma(x2, cos, x1 * sin)), dim=-1).to(x.dtype)

    return rotate(q), rotate(k)
