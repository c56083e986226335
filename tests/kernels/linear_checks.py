"""Operands and keys for tests of linear's CUDA schedules without a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels.cuda import linear_shapes as shapes
from rlkernel.kernels.triton.linear_logprob_backward import Active


def key(x: Tensor, w: Tensor, bias: Tensor | None = None, chunks: int = 1, out: torch.dtype | None = None) -> tuple:
    return (0, *shapes.linear_key(x, w, bias, chunks, 1, out)[1:])


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(dtype)


NONE = Active(*[torch.zeros(1, dtype=torch.int32)] * 3)


MOST = NONE._replace(row=48)
