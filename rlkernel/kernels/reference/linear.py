"""Reference of linear: one ascending chain of fma over k per chunk, and a balanced binary tree over the chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels.reference.arith import fma


def chain(a: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """start [M,N] + a [M,K] b [K,N], k ascending, one fma per step."""
    total = start
    a, b = a.float(), b.float()
    for k in range(a.shape[1]):
        total = fma(a[:, k : k + 1], b[k : k + 1, :], total)
    return total


def chunked(a: Tensor, b: Tensor, chunks: int) -> Tensor:
    """fp32 product of a [M,K] and b [K,N]: one chain per equal chunk of K, added in a balanced binary tree."""
    span = a.shape[1] // chunks
    zero = torch.zeros(a.shape[0], b.shape[1])
    parts = [chain(a[:, i * span : (i + 1) * span], b[i * span : (i + 1) * span], zero) for i in range(chunks)]
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    return parts[0]


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, chunks: int, dgrad_chunks: int, out_dtype: torch.dtype | None
) -> Tensor:
    y = chunked(x, weight.t(), chunks)
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype or x.dtype)


def linear_dgrad(dy: Tensor, weight: Tensor, chunks: int) -> Tensor:
    return chunked(dy, weight, chunks).to(dy.dtype)


def linear_wgrad_(grad: Tensor, dy: Tensor, x: Tensor) -> None:
    grad.copy_(chain(dy.t(), x, grad))


def linear_wgrad(dy: Tensor, x: Tensor) -> Tensor:
    return chain(dy.t(), x, torch.zeros(dy.shape[1], x.shape[1])).to(dy.dtype)


def bias_grad_(grad: Tensor, dy: Tensor) -> None:
    for row in dy.float():
        grad += row
