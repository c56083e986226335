"""layer_norm and gelu, composed of other ops and of elementwise fp32 torch ops, so that they need no new order.

torch rounds additions, products and quotients of tensors correctly on every device; the row sums are those of the ops.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkernel.ops.autograd import once_differentiable
from rlkernel.ops.checks import check, check_float
from rlkernel.ops.linear import linear
from rlkernel.ops.rms_norm import check_eps, rms_norm
from rlkernel.ops.stock_switch import is_stock
from rlkernel.ops.swiglu import swiglu

_FAR = 36.0  # above x^2 = 36 the sigmoid in gelu is 1 or below 1e-9, and its argument continues linearly
_TANH = (2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715)
# log(Phi(x) / Phi(-x)) / x in powers of x^2, fitted at Chebyshev nodes of [0, 36] in fp64; gelu then errs by < 1e-7.
_ERF = (
    *(1.59576958263168, 0.0726668260899656, -6.71483804086156e-05, -1.08386403895087e-04, 6.89882711448054e-06),
    *(-2.94619496902181e-08, -2.58260099432496e-08, 2.12706121292143e-09, -9.32348578458161e-11),
    *(2.54758687145456e-12, -4.34748916476117e-14, 4.25735375897714e-16, -1.83130097441898e-18),
)


def reshaped(parameter: Tensor, *shape: int) -> Tensor:
    """A view of a parameter whose gradient is accumulated into the same view of its `main_grad`."""
    out = parameter.reshape(*shape)
    grad = getattr(parameter, "main_grad", None)
    if grad is not None and torch.is_grad_enabled():
        out.main_grad = grad.view(*shape)  # type: ignore[attr-defined]
    return out


def widened(parameter: Tensor) -> Tensor:
    """A parameter in fp32 whose gradient is accumulated into the `main_grad` of the original."""
    out = parameter.float()
    grad = getattr(parameter, "main_grad", None)
    if out is not parameter and grad is not None and torch.is_grad_enabled():
        out.main_grad = grad  # type: ignore[attr-defined]
    return out


def layer_norm(
    x: Tensor,  # [T, C]
    weight: Tensor,  # [C]
    bias: Tensor,  # [C]
    eps: float,
) -> Tensor:  # [T, C]
    """Layer norm over the last dimension in fp32, rounded once: `rms_norm(x - mean) * weight + bias`.

    The row sum is the chain of `linear` with a weight of ones, the sum of squares that of `rms_norm`; gradients of
    weight and bias have the orders of these two ops.

    Args:
        x: [T, C], fp32, bf16 or fp16.
        weight, bias: [C]. If they have an fp32 `main_grad`, the gradient is added to that.
        eps: added to the variance.

    Raises:
        ValueError: shapes do not fit. TypeError: another dtype.

    Source: Ba et al., Layer Normalization, arXiv:1607.06450.
    """
    check_float("layer_norm", "x", x)
    eps = check_eps("layer_norm", eps)
    check(
        x.dim() == 2 and weight.shape == bias.shape == x.shape[1:],
        lambda: (
            f"layer_norm: x is {tuple(x.shape)}, weight {tuple(weight.shape)}, bias {tuple(bias.shape)}; expected "
            "[T, C], [C] and [C]"
        ),
    )
    if is_stock():
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    rows, width = x.shape
    wide = x.float()
    total = linear(wide, wide.new_ones(1, width))
    mean = total / torch.full_like(total, width)  # torch multiplies by the reciprocal of a number on a GPU
    normed = rms_norm(wide - mean, widened(weight), eps)
    column = reshaped(widened(bias), width, 1)
    return (normed + linear(wide.new_ones(rows, 1), column)).to(x.dtype)  # a product, so that its gradient has an order


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """`x * Phi(x)`, elementwise in fp32 and rounded once, or its tanh approximation.

    Both are `x sigmoid(g)` with `g = x h(x^2)` and a polynomial h, fitted to `g = log(Phi(x) / Phi(-x))`. The
    exponential is that of `swiglu`.

    Args:
        x: [..., N], fp32, bf16 or fp16.
        approximate: as in `torch.nn.functional.gelu`.

    Raises:
        ValueError: approximate has another value. TypeError: another dtype.

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, arXiv:1606.08415.
    """
    check_float("gelu", "x", x)
    check(approximate in ("none", "tanh"), lambda: f"gelu: approximate={approximate!r}; expected 'none' or 'tanh'")
    if is_stock():
        return F.gelu(x, approximate=approximate)
    wide: Tensor = _Gelu.apply(x.float(), _TANH if approximate == "tanh" else _ERF)
    return wide.to(x.dtype)


def _polynomial(coefficients: tuple[float, ...], u: Tensor) -> Tensor:
    value = torch.full_like(u, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        value = value * u + c
    return value


def _sigmoid_below(m: Tensor) -> Tensor:
    """sigmoid(-m) for m >= 0, with the exponential of `swiglu`."""
    return torch.where(m == 0, 0.5, swiglu(torch.cat((-m, torch.ones_like(m)), dim=-1)) / -m)


class _Gelu(torch.autograd.Function):
    """x sigmoid(g) with g = x h(u), u = min(x^2, 36)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
        below = _sigmoid_below(x.abs() * _polynomial(coefficients, (x * x).clamp(max=_FAR)))
        ctx.save_for_backward(x, below)
        ctx.coefficients = coefficients
        return x * torch.where(x > 0, 1 - below, below)

    @staticmethod
    @partial(once_differentiable, "gelu")
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        x, below = ctx.saved_tensors
        u = (x * x).clamp(max=_FAR)
        rising = tuple(c * (2 * i + 1) for i, c in enumerate(ctx.coefficients))  # dg/dx = h + 2 u h'
        slope = _polynomial(rising, u)
        slope = torch.where(x * x < _FAR, slope, _polynomial(ctx.coefficients, u))
        share = torch.where(x > 0, 1 - below, below)
        return upstream * (share + x * (below * (1 - below)) * slope), None
