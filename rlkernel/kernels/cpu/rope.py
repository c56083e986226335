"""rope on the CPU: launcher of `csrc/cpu/rope.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels.cpu.library import code, function, threads
from rlkernel.kernels.reference.embedding import check_range


def _rotate(x: Tensor, positions: Tensor, cos_sin: Tensor, inverse: bool) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    function("rlk_rope", "ppppllliii")(
        x.data_ptr(),
        positions.data_ptr(),
        cos_sin.data_ptr(),
        y.data_ptr(),
        *x.shape,
        inverse,
        code(x.dtype),
        threads(),
    )
    return y


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    check_range("rope", "positions", positions, cos_sin.shape[0], "P (rows of cos_sin)")
    positions, cos_sin = positions.contiguous(), cos_sin.contiguous()
    return _rotate(q, positions, cos_sin, inverse), _rotate(k, positions, cos_sin, inverse)
