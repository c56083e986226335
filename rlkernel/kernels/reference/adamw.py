"""Reference of adamw_ and grad_norm: elementwise fp32 with the contract's fmas, sums of squares in fp64.

`lane_sum` adds the squares of each segment of NORM_SEGMENT elements, then the segments of a tensor, then the tensors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlkernel.contract.lane_sum import lane_sum
from rlkernel.contract.orders import NORM_SEGMENT
from rlkernel.kernels.adamw import AdamwInputs, coefficients
from rlkernel.kernels.reference.arith import fma, sqrt


def adamw_(x: AdamwInputs) -> None:
    near_mean, *numbers = coefficients(x)
    weight, keep, fresh, inverse_root, eps32, rate, decay = torch.tensor(numbers)
    if x.scale is None or bool(torch.isfinite(x.scale)):
        for i, (w, grad, m, v) in enumerate(zip(x.masters, x.grads, x.exp_avgs, x.exp_avg_sqs, strict=True)):
            g = grad.float() if x.scale is None else grad.float() * x.scale
            m.copy_(fma(weight, g - m, m) if near_mean else fma(weight, m - g, g))
            v.copy_(fma(fresh * g, g, keep * v))
            update = m / fma(sqrt(v), inverse_root, eps32)
            w.copy_(w - fma(rate, update, decay * w))
            if x.params:
                x.params[i].copy_(w)
    if x.zero_grad:
        for grad in x.grads:
            grad.zero_()


def sum_of_squares(grad: Tensor) -> Tensor:
    """Sum of squares in fp64, where the product of two fp32 numbers is exact."""
    segments = [lane_sum(part.double().square()) for part in grad.reshape(-1).split(NORM_SEGMENT)]
    return lane_sum(torch.stack(segments))


def grad_norm(grads: list[Tensor], loss_scale: Tensor | None, max_norm: float | None) -> tuple[Tensor, Tensor, Tensor]:
    squares = torch.stack([sum_of_squares(grad) for grad in grads])
    one = torch.ones((), dtype=torch.float64)
    divisor = one if loss_scale is None else loss_scale.double()
    # math.sqrt, because torch.sqrt may call a vector library that is off by one ulp
    norm = torch.tensor(math.sqrt(lane_sum(squares)), dtype=torch.float64) / divisor
    factor = one
    if max_norm is not None:
        limit = torch.tensor(max_norm).double()
        factor = torch.where(norm > limit, limit / norm, one)
    scale = torch.where(torch.isfinite(norm), factor / divisor, torch.nan).float()
    return norm, scale, squares
