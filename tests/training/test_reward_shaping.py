"""Token rewards, whitening, KL controller and overlong penalty against the formulas of their papers, in fp64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from ops.op_checks import rand

from rlkernel.contract import assert_bitwise
from rlkernel.training.config import KLSettings
from rlkernel.training.grpo import returns_to_go
from rlkernel.training.reward_shaping import (
    KLController,
    RunningMoments,
    overlong_penalty,
    token_rewards,
    whitened,
)


def test_token_rewards_and_returns() -> None:
    kl = torch.tensor([0.5, -0.25, 1.0])
    rewards = token_rewards(3.0, kl, 0.5)
    assert rewards.tolist() == [-0.25, 0.125, 2.5]
    assert kl.tolist() == [0.5, -0.25, 1.0], "the input is not changed"
    (returns,) = returns_to_go([rewards])
    assert returns.tolist() == [2.375, 2.625, 2.5]


def test_whitened_tokens() -> None:
    values = [3.0 * rand(i, n) + 5.0 for i, n in enumerate((4, 1, 30))]
    white = whitened(values, [True, True, True])
    pool = np.concatenate([x.double().numpy() for x in values])
    expected = (pool - pool.mean()) / pool.std(ddof=1)
    assert np.allclose(torch.cat(white).numpy(), expected, rtol=1e-6, atol=1e-7)
    assert all(x.dtype == torch.float32 for x in white)
    moved = whitened([values[2], values[0], values[1]], [True] * 3)
    assert_bitwise(torch.cat([moved[1], moved[2], moved[0]]), torch.cat(white), "the order of completions is free")
    without = whitened(values, [True, True, False])  # the third completion is masked
    assert_bitwise(torch.cat(without[:2]), torch.cat(whitened(values[:2], [True, True])), "moments without the masked")
    equal = whitened([torch.full((3,), 0.1), torch.full((4,), 0.1)], [True, True])
    assert_bitwise(torch.cat(equal), torch.zeros(7), "equal values")
    assert whitened(values, [False] * 3) == values


def test_running_moments_are_those_of_all_rewards() -> None:
    steps = [(1e6 + 10.0 * rand(i, n).double()).tolist() for i, n in enumerate((1, 5, 8, 64))]
    moments, seen = RunningMoments(), []
    for rewards in steps:
        moments.add(rewards)
        seen += rewards
        if len(seen) > 1:
            exact = np.array(seen, dtype=np.longdouble)
            expected = (np.array(rewards) - exact.mean()) / exact.std(ddof=1)
            assert np.allclose(moments.whiten(rewards), expected.astype(float), rtol=1e-7, atol=1e-7)
    one = RunningMoments()
    one.add([2.0, 2.0])
    assert one.whiten([2.0, 2.0]) == [0.0, 0.0]


def test_the_kl_controller_follows_ziegler() -> None:
    """coef (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon), arXiv:1909.08593."""
    adaptive = KLController(KLSettings(coef=0.2, controller="adaptive", target=6.0, horizon=10000.0))
    coef = 0.2
    for kl, n in ((6.0, 512), (6.6, 512), (60.0, 512), (0.0, 512), (5.7, 64)):
        coef *= 1 + np.clip(kl / 6.0 - 1, -0.2, 0.2) * n / 10000
        adaptive.update(kl, n)
        assert adaptive.coef == pytest.approx(coef, rel=1e-14)
    fixed = KLController(KLSettings(coef=0.2))
    fixed.update(60.0, 512)
    assert fixed.coef == 0.2


def test_the_overlong_penalty_is_dapos() -> None:
    """Equation 13 of arXiv:2503.14476, with L_max = 20480 and L_cache = 4096."""
    for length in (1, 16384, 16385, 18432, 20480):
        expected = 0.0 if length <= 20480 - 4096 else ((20480 - 4096) - length) / 4096
        assert overlong_penalty(length, 20480, 0.2, 1.0) == pytest.approx(expected, abs=1e-12)
        assert overlong_penalty(length, 20480, 0.2, 0.5) == pytest.approx(expected / 2, abs=1e-12)
        assert overlong_penalty(length, 20480, 0.0, 1.0) == 0.0
    assert math.isclose(overlong_penalty(10, 10, 1.0, 1.0), -1.0)
