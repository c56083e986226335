"""Reference of embedding: a gather; the gradient adds one token at a time in fp32, tokens ascending."""

from __future__ import annotations

import torch
from torch import Tensor


def check_range(op: str, name: str, index: Tensor, size: int, what: str) -> None:
    """Raises IndexError unless every element of `index` [T] int64 lies in [0, size).

    Does nothing for GPU tensors, because reading their values would synchronise.
    """
    if index.device.type != "cpu" or index.numel() == 0:
        return
    low, high = index.aminmax()
    if int(low) < 0 or int(high) >= size:
        bad = int(((index < 0) | (index >= size)).nonzero()[0])
        raise IndexError(f"{op}: {name}[{bad}] is {int(index[bad])}; expected 0 <= {name} < {size} = {what}")


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    check_range("embedding", "ids", ids, weight.shape[0], "V (rows of weight)")
    return weight[ids]


def embedding_wgrad_(grad: Tensor, dy: Tensor, ids: Tensor) -> None:
    check_range("embedding", "ids", ids, grad.shape[0], "V (rows of weight)")
    for i, row in zip(ids.tolist(), dy.float(), strict=True):
        grad[i] += row


def embedding_wgrad(dy: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    grad = torch.zeros(vocabulary, dy.shape[1])
    embedding_wgrad_(grad, dy, ids)
    return grad.to(dy.dtype)
