"""From rewards of completions to rewards of tokens: KL inside the reward, whitening, the penalty of long completions.

Everything here is computed on the CPU; sums over completions and tokens are exact (`math.fsum`), so that neither their
order nor the number of threads changes a bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlkernel.training.config import KLSettings

WHITENING_EPS = 1e-8
"""Added to a standard deviation, in units of reward."""


def token_rewards(reward: float, kl: Tensor, coef: float) -> Tensor:  # [L] fp32
    """Rewards of one completion's tokens: -coef kl_t at each token, plus `reward` at the last one.

    Args:
        reward: reward of the completion.
        kl: [L] fp32, logp - ref_logp of its tokens, in nats (the k1 estimator).

    Source: Ziegler et al. 2019, arXiv:1909.08593, equation 2; Stiennon et al. 2020, arXiv:2009.01325.
    """
    rewards = -coef * kl
    rewards[-1] += reward
    return rewards


def moments(numbers: Sequence[float]) -> tuple[float, float]:
    """(mean, sum of the squared differences to it) with exactly rounded sums."""
    mean = math.fsum(numbers) / len(numbers)
    return mean, math.fsum((number - mean) ** 2 for number in numbers)


def whitened(values: Sequence[Tensor], counted: Sequence[bool]) -> list[Tensor]:  # [L_i] fp32 each
    """(x - mean) / std over the tokens of the counted sequences, in fp64 and rounded once; equal values give exactly 0.

    Args:
        values: one vector per completion.
        counted: which completions the moments are taken of. The others are whitened with the same moments.
    """
    used = [x.double() for x, count in zip(values, counted, strict=True) if count]
    if not used:
        return list(values)
    shift = float(used[0][0])  # the mean of equal numbers need not be that number
    pool = (torch.cat(used) - shift).tolist()
    mean, squares = moments(pool)
    variance = squares / max(1, len(pool) - 1)
    return [((x.double() - shift - mean) / (math.sqrt(variance) + WHITENING_EPS)).float() for x in values]


@dataclass
class RunningMoments:
    """Mean and variance of all rewards of a run, in fp64 (Chan, Golub and LeVeque 1983, the pairwise update).

    Attributes:
        count: rewards seen.
        mean: their mean.
        squares: sum of their squared differences to the mean.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, rewards: Sequence[float]) -> None:
        """Takes the rewards of one step into account."""
        total = self.count + len(rewards)
        mean, squares = moments(rewards)
        difference = mean - self.mean
        self.squares += squares + difference**2 * self.count * len(rewards) / total
        self.mean += difference * len(rewards) / total
        self.count = total

    def whiten(self, rewards: Sequence[float]) -> list[float]:
        """(reward - mean) / std, with the sample standard deviation of all rewards seen."""
        deviation = math.sqrt(self.squares / max(1, self.count - 1))
        return [(reward - self.mean) / (deviation + WHITENING_EPS) for reward in rewards]


class KLController:
    """Coefficient of the KL inside the reward: fixed, or moved towards a target KL.

    Attributes:
        coef: the current coefficient.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2: coef <- coef (1 + K e) with
    e = clip(KL / target - 1, -0.2, 0.2); K is n / horizon for n completions, as in their code.
    """

    def __init__(self, settings: KLSettings):
        self.settings, self.coef = settings, settings.coef

    def update(self, kl: float, completions: int) -> None:
        """Adapts the coefficient to the mean KL of a step's completions, in nats per completion."""
        if self.settings.controller == "adaptive":
            error = min(max(kl / self.settings.target - 1.0, -0.2), 0.2)
            self.coef *= 1.0 + error * completions / self.settings.horizon


def overlong_penalty(length: int, limit: int, buffer: float, penalty: float) -> float:
    """Reward, at most 0, of a completion's length: falls linearly to -penalty over the last part of the limit.

    Args:
        length: tokens of the completion.
        limit: `rollout.max_tokens`.
        buffer: that part, as a share of the limit.

    Source: DAPO, Yu et al. 2025, arXiv:2503.14476, equation 13.
    """
    start = limit * (1.0 - buffer)
    return 0.0 if length <= start else -penalty * (length - start) / (limit - start)
