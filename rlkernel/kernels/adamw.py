"""Shared by every implementation of adamw_: its inputs, and the coefficients of an update, computed on the host."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class AdamwInputs(NamedTuple):
    """Arguments of the torch op `adamw_`, checked by `ops.adamw_`. Tensors at one index have one shape."""

    masters: list[Tensor]  # fp32
    grads: list[Tensor]  # fp32, bf16 or fp16
    exp_avgs: list[Tensor]  # fp32
    exp_avg_sqs: list[Tensor]  # fp32
    params: list[Tensor]  # fp32, bf16 or fp16; empty if the parameters are the masters
    scale: Tensor | None  # [] fp32, factor of all gradients
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int  # from 1
    zero_grad: bool


class Coefficients(NamedTuple):
    """Coefficients of one update in fp64; each is rounded to fp32 once, on entering a kernel.

    Attributes:
        near_mean: True: m += weight (g - m), with weight = 1 - beta1. False: m = g + weight (m - g), with
            weight = beta1.
        weight: see near_mean.
        beta2, fresh: factors of the second moment and of the squared gradient; fresh = 1 - beta2.
        inverse_root: 1 / sqrt(1 - beta2^step), the second moment's bias correction.
        eps: added to the denominator.
        rate: lr / (1 - beta1^step), the learning rate with the first moment's bias correction.
        decay: lr * weight_decay.
    """

    near_mean: bool
    weight: float
    beta2: float
    fresh: float
    inverse_root: float
    eps: float
    rate: float
    decay: float


def coefficients(x: AdamwInputs) -> Coefficients:
    """The coefficients of update `x.step`."""
    near_mean = x.beta1 > 0.5  # otherwise rounding g - m would lose a gradient far smaller than the moment
    return Coefficients(
        near_mean,
        1.0 - x.beta1 if near_mean else x.beta1,
        x.beta2,
        1.0 - x.beta2,
        1.0 / math.sqrt(1.0 - x.beta2**x.step),
        x.eps,
        x.lr / (1.0 - x.beta1**x.step),
        x.lr * x.weight_decay,
    )
