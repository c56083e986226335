"""Reference of rms_norm: fixed row sum, the rounding points of Hugging Face, weight gradient row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels.reference.arith import fma, row_dot, sqrt


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """`row_dot` [..., 1] over the last dimension of [..., C]."""
    c = a.shape[-1]
    return row_dot(a.reshape(-1, c), b.reshape(-1, c)).view(*a.shape[:-1], 1)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) of each row of x [..., C], fp32 [..., 1]."""
    mean = _row_dot(x, x) / torch.tensor(float(x.shape[-1]))
    return 1.0 / sqrt(mean + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = (x.float() * inverse_rms(x, eps)).to(x.dtype)
    return (h.float() * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    r = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(r, weight, eps), r


def rms_norm_dgrad(dy: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rstd = inverse_rms(x, eps)
    g = dy.float() * weight.float()
    h = x.float() * rstd
    mean = _row_dot(g, h) / torch.tensor(float(x.shape[-1]))
    dx = rstd * fma(-h, mean, g)
    return (dx if dr is None else dx + dr.float()).to(x.dtype)


def _wgrad_(grad: Tensor, dy: Tensor, x: Tensor, eps: float) -> None:
    h = (x.float() * inverse_rms(x, eps)).to(x.dtype).float()
    total, c = grad, x.shape[-1]
    for up, row in zip(dy.float().reshape(-1, c), h.reshape(-1, c), strict=True):
        total = fma(up, row, total)
    grad.copy_(total)


def rms_norm_grad(dy: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dw = torch.zeros(weight.shape)
    return rms_norm_grad_(dw, dy, dr, x, weight, eps), dw.to(weight.dtype)


def rms_norm_grad_(grad: Tensor, dy: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    _wgrad_(grad, dy, x, eps)
    return rms_norm_dgrad(dy, dr, x, weight, eps)
