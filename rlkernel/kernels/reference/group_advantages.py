"""Reference of group_advantages: elementwise torch and fixed row sums, with the same bits on every device.

Rewards are shifted by their row's first element before they are summed, so that equal rewards give exactly 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels.reference.arith import sqrt

LANES = 16
LARGEST = 1e15
"""Largest absolute reward on a CPU, except in mode "none"."""


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension on any device, in the order of `arith.row_sum`; keeps the dimension."""
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % LANES))
    lanes = x[..., :LANES]
    for start in range(LANES, x.shape[-1], LANES):
        lanes = lanes + x[..., start : start + LANES]
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes


def over(x: Tensor, count: int) -> Tensor:
    """x / max(1, count); divides by a tensor, because torch on CUDA multiplies by the reciprocal of a Python number."""
    return x / torch.full_like(x, float(max(1, count)))


def centred(rows: Tensor) -> Tensor:
    """rows [N, G] minus the mean of each row."""
    shifted = rows - rows[:, :1]
    return shifted - over(row_sum(shifted), rows.shape[1])


def deviation(rows: Tensor) -> Tensor:
    """Sample standard deviation (divisor G - 1) [N, 1] of each row; 0 if G is 1."""
    c = centred(rows)
    return sqrt(over(row_sum(c * c), rows.shape[1] - 1))


def check_rewards(rewards: Tensor, group_size: int, mode: str) -> None:
    """Raises ValueError for a reward that is not finite or too large for the mode; CPU tensors only."""
    for bad, expected in (
        (~torch.isfinite(rewards), "finite numbers"),
        (rewards.abs() > LARGEST, f"at most {LARGEST:g} in size, because float32 adds their squares; scale them"),
    ):
        if mode == "none" and expected != "finite numbers":
            continue
        if bad.any():
            i = int(bad.nonzero()[0])
            raise ValueError(
                f"group_advantages: rewards[{i}] is {float(rewards[i])} (group {i // group_size}, "
                f"member {i % group_size}); rewards must be {expected}"
            )


def group_advantages(rewards: Tensor, group_size: int, mode: str, normalize_std: bool, eps: float) -> Tensor:
    if rewards.device.type == "cpu":
        check_rewards(rewards, group_size, mode)
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
