"""Layers of one model on several ranks, with the bits of one device: row-parallel linear, sharded embedding.

`tp_leaves` = P, part of the run's identity, is the number of chunks of K in row-parallel layers (o_proj, down_proj). A
rank of R holds P / R neighbouring chunks, a subtree of the sum. Column-parallel layers are `ops.linear` of its rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel import ops
from rlkernel.ops.all_reduce import group_of
from rlkernel.ops.define import define


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


def _embedding(ids: Tensor, weight: Tensor, first: int, group_name: str) -> Tensor:
    own = ids - first
    elsewhere = (own < 0) | (own >= weight.shape[0])
    rows = ops.embedding(own.masked_fill(elsewhere, 0), weight).masked_fill_(elsewhere[:, None], 0)
    # One rank has a row's bits and the others zeros. Their sum as integers is those bits, also of -0.
    dist.all_reduce(rows.view(torch.int8), group=group_of(group_name))
    return rows


_embedding_op = define(
    "parallel_embedding(Tensor ids, Tensor weight, int first, str group_name) -> Tensor",
    fake=lambda ids, weight, first, group_name: weight.new_empty((ids.shape[0], weight.shape[1])),
    compute=_embedding,
)


def parallel_embedding(
    ids: Tensor,  # [...] int64
    weight: Tensor,  # [rows, C]
    first: int,
    group: str,
) -> Tensor:  # [..., C]
    """`ops.embedding` of a vocabulary split over the ranks of a group; every rank gets all rows. It has no gradient.

    Args:
        ids: any ids of the vocabulary, equal on all ranks.
        weight: this rank's rows, of ids `first` and on. An id that no rank has is a row of zeros.
        group: name of the group, from `register_group`.
    """
    out: Tensor = _embedding_op(ids.reshape(-1), weight, first, group)
    return out.view(*ids.shape, weight.shape[1])
