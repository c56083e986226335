"""group_advantages: elementwise torch with fixed row sums; the same bits on every device.

Rewards are centred on their row's first element before anything is summed, so that equal rewards give exactly 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels.reference.arith import sqrt

LANES = 16


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension on any device: LANES strided lanes, ascending, then folded in halves."""
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % LANES))
    lanes = x[..., :LANES]
    for start in range(LANES, x.shape[-1], LANES):
        lanes = lanes + x[..., start : start + LANES]
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes


def over(x: Tensor, count: int) -> Tensor:
    """x / max(1, count) as a true division: CUDA multiplies by the reciprocal where the divisor is a Python number."""
    return x / torch.full_like(x, float(max(1, count)))


def centred(rows: Tensor) -> Tensor:
    """rows [N, G] minus the mean of each row."""
    shifted = rows - rows[:, :1]
    return shifted - over(row_sum(shifted), rows.shape[1])


def deviation(rows: Tensor) -> Tensor:
    """Sample standard deviation (divisor G - 1) of each row [N, 1]; 0 for rows of one."""
    c = centred(rows)
    return sqrt(over(row_sum(c * c), rows.shape[1] - 1))


def group_advantages(rewards: Tensor, group_size: int, mode: str, normalize_std: bool, eps: float) -> Tensor:
    # On a GPU this would wait for it; there NaN stays NaN.
    bad = (~torch.isfinite(rewards)).nonzero() if rewards.device.type == "cpu" else rewards[:0]
    if bad.numel():
        i = int(bad[0])
        raise ValueError(
            f"group_advantages: rewards[{i}] is {float(rewards[i])} (group {i // group_size}, "
            f"member {i % group_size}); rewards must be finite numbers"
        )
    if mode == "none" or rewards.numel() == 0:
        return rewards.clone()
    rows = rewards.reshape(-1, group_size)
    if mode == "leave_one_out":
        shifted = rows - rows[:, :1]
        others = over(row_sum(shifted) - shifted, group_size - 1)
        return (shifted - others).reshape(-1)
    out = centred(rows)
    if normalize_std:
        spread = deviation(rows if mode == "group" else rewards.reshape(1, -1))
        out = out / (spread + torch.full_like(spread, eps))
    return out.reshape(-1)
