"""adamw_ and grad_norm, spelled out: elementwise fp32 with one fma where the contract has one, sums of squares in fp64.

A sum: element j goes to lane j mod SEGMENT, ascending, neighbouring lanes are added until one is left. Squares are
added so inside segments of NORM_SEGMENT elements from each tensor's first, then a tensor's segments, then the tensors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlkernel.contract.orders import NORM_SEGMENT, SEGMENT
from rlkernel.kernels.adamw import coefficients
from rlkernel.kernels.reference.arith import fma, sqrt


def adamw_(
    masters: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    params: list[Tensor],
    scale: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    zero_grad: bool,
) -> None:
    near_mean, *numbers = coefficients(lr, beta1, beta2, eps, weight_decay, step)
    weight, keep, fresh, inverse_root, eps32, rate, decay = torch.tensor(numbers)
    if scale is None or bool(torch.isfinite(scale)):
        for i, (w, grad, m, v) in enumerate(zip(masters, grads, exp_avgs, exp_avg_sqs, strict=True)):
            g = grad.float() if scale is None else grad.float() * scale
            m.copy_(fma(weight, g - m, m) if near_mean else fma(weight, m - g, g))
            v.copy_(fma(fresh * g, g, keep * v))
            update = m / fma(sqrt(v), inverse_root, eps32)
            w.copy_(w - fma(rate, update, decay * w))
            if params:
                params[i].copy_(w)
    if zero_grad:
        for grad in grads:
            grad.zero_()


def lane_sum(x: Tensor) -> Tensor:  # [..., n] -> [...]
    """Sum over the last dimension: SEGMENT strided lanes, ascending, added by neighbours."""
    rows = torch.nn.functional.pad(x, (0, -x.shape[-1] % SEGMENT)).unflatten(-1, (-1, SEGMENT))
    lanes = x.new_zeros(*x.shape[:-1], SEGMENT)
    for row in rows.unbind(-2):
        lanes = lanes + row
    while lanes.shape[-1] > 1:
        lanes = lanes[..., 0::2] + lanes[..., 1::2]
    return lanes[..., 0]


def sum_of_squares(grad: Tensor) -> Tensor:
    """fp64; the product of two fp32 numbers is exact there."""
    segments = [lane_sum(part.double().square()) for part in grad.reshape(-1).split(NORM_SEGMENT)]
    return lane_sum(torch.stack(segments))


def grad_norm(grads: list[Tensor], loss_scale: Tensor | None, max_norm: float | None) -> tuple[Tensor, Tensor, Tensor]:
    squares = torch.stack([sum_of_squares(grad) for grad in grads])
    one = torch.ones((), dtype=torch.float64)
    by = one if loss_scale is None else loss_scale.double()
    # torch.sqrt may go to a vector library that is off by one ulp.
    norm = torch.tensor(math.sqrt(lane_sum(squares)), dtype=torch.float64) / by
    factor = one
    if max_norm is not None:
        limit = torch.tensor(max_norm).double()
        factor = torch.where(norm > limit, limit / norm, one)
    scale = torch.where(torch.isfinite(norm), factor / by, torch.nan).float()
    return norm, scale, squares
