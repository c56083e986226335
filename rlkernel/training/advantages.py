"""Advantages of a rollout in which rewards may have dropped completions; `ops.group_advantages` computes them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rlkernel import ops
from rlkernel.training.config import AdvantageSettings
from rlkernel.training.reward_shaping import moments


def advantages_of(rewards: Sequence[float | None], group_size: int, settings: AdvantageSettings) -> Tensor:  # [B] fp32
    """Advantages of consecutive groups of `group_size` completions; 0 for a dropped one, whose reward is None.

    A dropped completion is left out of its group's mean and deviation, and in mode "batch" of the batch's deviation:
    the others get what they would get without it. The last completion of a group has nothing to be compared with, and
    so its advantage is 0 (except in mode "none").
    """
    groups = [
        [i for i in range(start, start + group_size) if rewards[i] is not None]
        for start in range(0, len(rewards), group_size)
    ]
    values = torch.tensor([0.0 if reward is None else reward for reward in rewards], dtype=torch.float32)
    sizes = sorted({len(group) for group in groups if group})
    spread = 0.0
    normalize_std = settings.normalize_std
    if settings.mode == "batch" and normalize_std and len(sizes) > 1:  # the op takes groups of one size
        spread, normalize_std = _deviation(values[[i for group in groups for i in group]]), False
    advantages = torch.zeros_like(values)
    for size in sizes:
        places = torch.tensor([i for group in groups if len(group) == size for i in group])
        advantages[places] = ops.group_advantages(
            values[places], size, mode=settings.mode, normalize_std=normalize_std, eps=settings.eps
        )
    if spread:
        advantages = advantages / (spread + settings.eps)
    return advantages


def _deviation(values: Tensor) -> float:
    """Sample standard deviation, exactly rounded sums."""
    return math.sqrt(moments(values.tolist())[1] / (len(values) - 1))
