"""What every implementation of adamw_ and grad_norm shares: the numbers of one update, computed once on the host."""

from __future__ import annotations

import math
from typing import NamedTuple


class Coefficients(NamedTuple):
    """Numbers of one update, in fp64; each is rounded to fp32 once, where it enters a kernel.

    Attributes:
        near_mean: whether the first moment starts from itself (beta1 > 1/2) or from the gradient.
        weight: factor of what is added to it, (gradient - moment) or (moment - gradient): 1 - beta1 or beta1.
        beta2, fresh: factors of the second moment and of the squared gradient, 1 - beta2.
        inverse_root: 1 / sqrt(1 - beta2^step), the second moment's bias correction.
        eps: of the denominator.
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


def coefficients(lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int) -> Coefficients:
    """The numbers of update `step`, counted from 1."""
    near_mean = beta1 > 0.5  # else rounding (gradient - moment) would lose a gradient far smaller than the moment
    return Coefficients(
        near_mean,
        1.0 - beta1 if near_mean else beta1,
        beta2,
        1.0 - beta2,
        1.0 / math.sqrt(1.0 - beta2**step),
        eps,
        lr / (1.0 - beta1**step),
        lr * weight_decay,
    )
