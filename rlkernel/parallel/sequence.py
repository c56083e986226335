"""Activations between tensor-parallel layers split by token (sequence parallel), with the bits of whole ones.

Of T packed tokens rank r has rows [r S, (r + 1) S), S = ceil(T / R); rows from T on are padding. Korthikanti et al.,
Reducing Activation Recomputation in Large Transformer Models, 2022.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlkernel import ops
from rlkernel.ops.all_reduce import add_ranks
from rlkernel.ops.autograd import once_differentiable, weight_grad
from rlkernel.ops.linear import bias_grad_
from rlkernel.ops.rms_norm import rms_norm_gradients
from rlkernel.parallel.collectives import all_to_all
from rlkernel.parallel.tensor import gather


def _padded(x: Tensor, group: ProcessGroup) -> Tensor:  # [T, C] -> [R, S, C]
    ranks = group.size()
    return torch.nn.functional.pad(x, (0, 0, 0, -len(x) % ranks)).view(ranks, -1, x.shape[1])


def _own(x: Tensor, group: ProcessGroup) -> Tensor:  # [T, C] -> [S, C]
    return _padded(x, group)[group.rank()].contiguous()


def _all(x: Tensor, tokens: int, group: ProcessGroup) -> Tensor:  # [S, C] -> [T, C]
    return gather(x, group).flatten(0, 1)[:tokens]


class OwnTokens(torch.autograd.Function):
    """[T, C], equal on every rank, -> this rank's [S, C]. Its gradient is gathered from all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.tokens, ctx.group = len(x), group
        return _own(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _all(dy, ctx.tokens, ctx.group), None


class GatherTokens(torch.autograd.Function):
    """[S, C] -> [T, C] on every rank. Every rank computes the same gradient of it and keeps its rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: int, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all(x, tokens, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _own(dy, ctx.group), None, None


def row_parallel_tokens(
    x: Tensor,  # [T, K / R]
    weight: Tensor,  # [N, K / R]
    bias: Tensor | None,  # [N]
    group: ProcessGroup,
    *,
    chunks: int,
) -> Tensor:  # [S, N]
    """This rank's rows of `row_parallel_linear`: a reduce-scatter in place of an all-reduce. Arguments are the same."""
    partial_sum = ops.linear(x, weight, chunks=chunks, out_dtype=torch.float32)
    out: Tensor = _ReduceScatter.apply(partial_sum, bias, x.dtype, group)
    return out


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_sum: Tensor, bias: Tensor | None, dtype: torch.dtype, group: ProcessGroup) -> Tensor:
        ctx.tokens, ctx.bias, ctx.group = len(partial_sum), bias, group
        parts = all_to_all(_padded(partial_sum, group), group)
        return add_ranks(parts.flatten(1), bias, dtype, parts.shape[2]).view(parts.shape[1:])

    @staticmethod
    @partial(once_differentiable, "row_parallel_tokens")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows = _all(dy, ctx.tokens, ctx.group)
        db = None if ctx.bias is None else weight_grad("linear", ctx, 1, ctx.bias, lambda g: bias_grad_(g, rows))
        return rows.float(), db, None, None


def rms_norm_tokens(
    x: Tensor,  # [S, C]
    weight: Tensor,  # [C]
    eps: float,
    residual: Tensor | None,  # [S, C]
    tokens: int,
    group: ProcessGroup,
) -> tuple[Tensor, Tensor]:  # y [T, C], r [S, C]
    """`ops.rms_norm` of this rank's rows, and the results of all ranks.

    The weight gradient is a sum over all tokens in one order, for which the backward gathers r from all ranks.
    """
    if residual is None:
        return _Norm.apply(x, weight, eps, None, tokens, group), x
    y, r = _Norm.apply(x, weight, eps, residual, tokens, group)
    return y, r


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, tokens: int, group: ProcessGroup
    ) -> Any:
        ctx.weight, ctx.eps, ctx.tokens, ctx.group = weight, eps, tokens, group
        ctx.set_materialize_grads(False)
        if residual is None:
            ctx.save_for_backward(x, weight)
            return _all(ops.rms_norm(x, weight, eps), tokens, group)
        y, r = ops.rms_norm(x, weight, eps, residual)
        ctx.save_for_backward(r, weight)
        return _all(y, tokens, group), r

    @staticmethod
    @partial(once_differentiable, "rms_norm_tokens")
    def backward(ctx: Any, dy: Tensor, dr: Tensor | None = None) -> tuple[Tensor | None, ...]:
        r, weight = ctx.saved_tensors
        whole = None
        if dr is not None:  # only this rank's rows matter, because dr is no part of the weight's gradient
            padded = dr.new_zeros(ctx.group.size(), *dr.shape)
            padded[ctx.group.rank()] = dr
            whole = padded.flatten(0, 1)[: ctx.tokens]
        dx, dw = rms_norm_gradients(ctx, dy.contiguous(), whole, _all(r, ctx.tokens, ctx.group), weight, True, 1)
        assert dx is not None
        dx = _own(dx, ctx.group)
        return dx, dw, None, dx if ctx.needs_input_grad[3] else None, None, None
