"""embedding: rows of the weight by token id, and a weight gradient without atomics.

Contract: orders.py, `embedding`. The weight gradient is a separate op.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from rlkernel.kernels import cpu, reference, stock, triton
from rlkernel.ops.autograd import has_main_grad, outside_graph, weight_grad
from rlkernel.ops.checks import check, check_float, not_tensor
from rlkernel.ops.define import define
from rlkernel.ops.stock_switch import is_stock


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ids, ctx.weight = inputs
    ctx.save_for_backward(ids)


def _backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None]:
    (ids,) = ctx.saved_tensors
    compute = lambda: embedding_wgrad(dy, ids, ctx.weight.shape[0])
    return None, weight_grad("embedding", ctx, 1, ctx.weight, lambda g: embedding_wgrad_(g, dy, ids), compute)


embedding_wgrad = define(
    "embedding_wgrad(Tensor dy, Tensor ids, int vocabulary) -> Tensor",
    fake=lambda dy, ids, vocabulary: dy.new_empty((vocabulary, dy.shape[1])),
    reference=lambda: reference.embedding.embedding_wgrad,
    cpu=lambda: cpu.embedding.embedding_wgrad,
    triton=lambda: triton.embedding.embedding_wgrad,
)
embedding_wgrad_ = define(
    "embedding_wgrad_(Tensor(a!) grad, Tensor dy, Tensor ids) -> ()",
    fake=lambda grad, dy, ids: None,
    reference=lambda: reference.embedding.embedding_wgrad_,
    cpu=lambda: cpu.embedding.embedding_wgrad_,
    triton=lambda: triton.embedding.embedding_wgrad_,
)
_embedding = define(
    "embedding(Tensor ids, Tensor weight) -> Tensor",
    fake=lambda ids, weight: weight.new_empty((ids.shape[0], weight.shape[1])),
    setup_context=_setup,
    backward=_backward,
    reference=lambda: reference.embedding.embedding,
    cpu=lambda: cpu.embedding.embedding,
    triton=lambda: triton.embedding.embedding,
)


def check_ids(ids: Tensor, vocabulary: int) -> None:
    """Raises the op's IndexError for an id outside the vocabulary (CPU)."""
    reference.embedding.check_range("embedding", "ids", ids, vocabulary, "V (rows of weight)")


def embedding(
    ids: Tensor,  # [...] int64
    weight: Tensor,  # [V, C]
) -> Tensor:  # [..., C]
    """`weight[ids]`. The gradient of a row is the fp32 sum of dy over the id's occurrences, in packed order.

    Args:
        ids: [...] int64 in [0, V). Checked on the CPU before anything is read. On CUDA a check would wait for the
            device, so an id outside is a device-side assertion, after which the process cannot use CUDA.
        weight: [V, C], fp32, bf16 or fp16. If it has an fp32 `main_grad`, the gradient is added to that.

    Raises:
        ValueError: ids is not int64 or weight not a matrix. TypeError: one is not a tensor, or weight has another
            dtype.
        IndexError: an id outside the vocabulary (CPU); the message names it and V.
    """
    if is_dynamo_compiling() and has_main_grad(weight):
        return outside_graph("embedding", embedding, ids, weight)
    if not (isinstance(ids, Tensor) and isinstance(weight, Tensor)):
        raise not_tensor("embedding", ids=ids, weight=weight)
    check(ids.dtype == torch.int64, lambda: f"embedding: ids is {ids.dtype}; expected int64, cast with ids.long()")
    check(weight.dim() == 2, lambda: f"embedding: weight is {tuple(weight.shape)}; expected [V, C]")
    if is_stock():
        return stock.embedding(ids, weight)
    check_float("embedding", "weight", weight)
    return _embedding(ids.reshape(-1), weight).view(*ids.shape, weight.shape[1])
