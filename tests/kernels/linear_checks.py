"""Operands, keys and plain products for tests of the CUDA schedules of linear and linear_logprob without a GPU."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rlkernel.kernels.cuda import linear_logprob_shapes as scored
from rlkernel.kernels.cuda import linear_shapes as shapes
from rlkernel.kernels.triton.linear_logprob_backward import Active


def key(x: Tensor, w: Tensor, bias: Tensor | None = None, chunks: int = 1, out: torch.dtype | None = None) -> tuple:
    return (0, *shapes.linear_key(x, w, bias, chunks, 1, out)[1:])


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(dtype)


NONE = Active(*[torch.zeros(1, dtype=torch.int32)] * 3)


MOST = NONE._replace(row=48)


def at(shift: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Small whole numbers at `shift` elements behind a 16-byte address."""
    return torch.randint(-4, 5, (shift + math.prod(shape),)).to(dtype)[shift:].view(shape)


def dhidden(running: Tensor, rounded: Tensor | None, dz: Tensor, weight: Tensor, fresh: bool, active: Any) -> None:
    running.copy_(dz.float() @ weight.float() + (0 if fresh else running))
    if rounded is not None:
        rounded.copy_(running)


def dweight(grad: Tensor, dz: Tensor, hidden: Tensor, fresh: bool, active: Any) -> None:
    grad.copy_(dz.float().t() @ hidden.float() + (0 if fresh else grad))


GRAD = scored.GradShape(-1, 16, torch.bfloat16, torch.float32, True, False, False, 16384)
