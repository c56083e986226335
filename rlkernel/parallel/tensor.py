"""Layers of one model on several ranks, with the bits of one device: linear layers and their gradients.

`tp_leaves` = P, part of the run's identity, is the number of chunks of K in row-parallel layers (o_proj, down_proj). A
rank of R holds P / R neighbouring chunks, a subtree of the sum. Column-parallel layers are `ops.linear` of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel import ops
from rlkernel.ops.linear import linear_dgrad
from rlkernel.parallel.collectives import all_gather, all_to_all


def row_parallel_linear(
    x: Tensor,  # [..., K / R]
    weight: Tensor,  # [N, K / R]
    bias: Tensor | None,  # [N]
    group: dist.ProcessGroup | str,
    *,
    chunks: int,
) -> Tensor:  # [..., N]
    """`ops.linear` with K split over the ranks of a group, rank 0 first; every rank gets the result.

    Args:
        x, weight: this rank's part of K.
        bias: the whole bias.
        group: as in `ops.all_reduce`.
        chunks: this rank's share of the layer's chunks, `tp_leaves` / R.

    Raises:
        ValueError, TypeError: as `ops.linear` and `ops.all_reduce`.
    """
    partial = ops.linear(x, weight, chunks=chunks, out_dtype=torch.float32)
    return ops.all_reduce(partial, group, bias=bias, dtype=x.dtype)


# ---- training ------------------------------------------------------------------------------------


def column_parallel_dgrad(
    dy: Tensor,  # [T, n]
    weight: Tensor,  # [n, K]
    rows: Sequence[int],
    group: dist.ProcessGroup,
) -> Tensor:  # [T, K]
    """Input gradient of column-parallel layers, with the bits of one device that holds all their rows.

    On one device it is one chain over the rows, which ranks cannot share, so each rank computes the whole chain for its
    part of K: it receives all rows of dy, and of the weight's columns of that part.

    Args:
        dy, weight: this rank's rows of each layer, one layer after another.
        rows: number of this rank's rows of each layer; sums to n.
        group: R ranks; R divides K.
    """
    weights = columns_of_all_rows(weight, rows, group)
    return over_columns(dy, weights, rows, group, lambda dy, weight: linear_dgrad(dy, weight, 1))


def columns_of_all_rows(
    weight: Tensor,  # [n, K]
    rows: Sequence[int],
    group: dist.ProcessGroup,
) -> Tensor:  # [R * n, K / R]
    """This rank's part of K of all ranks' weights, one layer after another; arguments as above."""
    ranks, k = group.size(), weight.shape[1]
    received = all_to_all(weight.view(-1, ranks, k // ranks).transpose(0, 1), group)
    return torch.cat([part.flatten(0, 1) for part in received.split(list(rows), 1)])


def over_columns(
    dy: Tensor,  # [T, n]
    weights: Tensor,  # [R * n, K / R]
    rows: Sequence[int],
    group: dist.ProcessGroup,
    product: Callable[[Tensor, Tensor], Tensor],  # [T, R * n], [R * n, K / R] -> [T, K / R]
) -> Tensor:  # [T, K]
    """Input gradient of all rows by `product`, of which each rank computes its part of K."""
    tokens, k = dy.shape[0], weights.shape[1] * group.size()
    parts = gather(dy, group).split(list(rows), 2)
    whole = torch.cat([part.transpose(0, 1).reshape(tokens, -1) for part in parts], 1)
    return gather(product(whole, weights), group).transpose(0, 1).reshape(tokens, k)


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:  # [...] -> [R, ...]
    """Every rank's tensor."""
    out = x.new_empty(group.size(), *x.shape)
    all_gather(out.view(-1), x.contiguous().view(-1), group)
    return out


class GatherHeads(torch.autograd.Function):
    """[T, H / R, ...] -> [T, H, ...] on every rank, which computes the same gradient of it and keeps its heads'.

    H counts heads, or columns of a layer's output.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather(x, group).transpose(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy.chunk(ctx.group.size(), 1)[ctx.group.rank()].contiguous(), None


class OwnHeads(torch.autograd.Function):
    """[T, H, D], equal on every rank, -> this rank's [T, H / R, D]. Its gradient is gathered from all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.chunk(group.size(), 1)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return gather(dy, ctx.group).transpose(0, 1).flatten(1, 2), None
