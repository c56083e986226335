"""Operands, shape classes and plain products for tests of the schedules of linear and linear_logprob without a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlkernel.kernels.cuda import linear_logprob_shapes as scored
from rlkernel.kernels.cuda import linear_shapes as shapes
from rlkernel.kernels.scheduled_op import ScheduledOp
from rlkernel.kernels.triton import linear_logprob_backward as loop
from rlkernel.kernels.triton import linear_logprob_rows as token_rows
from rlkernel.kernels.triton.linear_logprob_rows import Active, Rows


def forward_shape(
    x: Tensor, w: Tensor, bias: Tensor | None = None, chunks: int = 1, out: torch.dtype | None = None
) -> shapes.LinearShape:
    return shapes.linear_shape(x, w, bias, chunks, 1, out)._replace(device=0)


def offers(op: ScheduledOp[Any], shape: Any) -> list[str]:
    """Names of the schedules that compute a shape class."""
    return [schedule.name for schedule in op.spec.schedules if schedule.supports(shape)]


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(dtype)


NONE = Active(*[torch.zeros(1, dtype=torch.int32)] * 2)
MOST = NONE._replace(row=48)


def all_active(targets: Tensor, *_: Any) -> Rows:
    """`row_order` if every token has a gradient, for blocks of WGRAD_TOKENS."""
    tokens, most = len(targets), loop.WGRAD_TOKENS
    order = torch.arange(tokens, dtype=torch.int32) % most
    counts = torch.tensor([min(most, tokens - at) for at in range(0, tokens, most)], dtype=torch.int32)
    return Rows(order, counts, most)


def as_they_come(targets: Tensor, kept: Any, stats: Any, dlogp: Tensor, dentropy: Any, vocab: int, row: int) -> Active:
    """`Active` of tokens with and without a gradient, in their original order."""
    token = torch.arange(len(targets), dtype=torch.int32)
    return Active(torch.where(dlogp != 0, token, -1 - token), torch.tensor([len(token)], dtype=torch.int32), row)


def keep_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the backward's loop without its kernels, as if every token had a gradient and kept its row."""
    for module in (loop, token_rows):
        monkeypatch.setattr(module, "row_order", all_active)
        monkeypatch.setattr(module, "gather", lambda hidden, order, out, block: out.copy_(hidden))
        monkeypatch.setattr(module, "scatter", lambda totals, order, dhidden, block: dhidden.copy_(totals))


def at(shift: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Small integers, `shift` elements after a 16-byte boundary."""
    return torch.randint(-4, 5, (shift + math.prod(shape),)).to(dtype)[shift:].view(shape)


def dhidden(running: Tensor, dz: Tensor, weight: Tensor, fresh: bool, active: Any) -> None:
    running.copy_(dz.float() @ weight.float() + (0 if fresh else running))


def dweight(grad: Tensor, dz: Tensor, hidden: Tensor, fresh: bool, active: Any) -> None:
    grad.copy_(dz.float().t() @ hidden.float() + (0 if fresh else grad))


GRAD = scored.GradShape(-1, 16, torch.bfloat16, torch.float32, True, False, 16384)
