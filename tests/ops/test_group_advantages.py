"""group_advantages: accuracy, independence of groups, ties exactly 0, and errors that name a bad reward."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import differs, rand, with_threads
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_accurate, assert_bitwise
from rlkernel.kernels import select
from rlkernel.kernels.reference.group_advantages import centred, over, row_sum
from rlkernel.ops.group_advantages import MODES

properties = settings(max_examples=30, deadline=None, derandomize=True)
seeds = st.integers(0, 2**16)


def truth(rewards: Tensor, group_size: int, mode: str, normalize_std: bool, eps: float) -> Tensor:
    """The published formulas in fp64, one group at a time."""
    r = rewards.double()
    out = []
    for g in r.split(group_size):
        for i in range(group_size):
            others = torch.cat((g[:i], g[i + 1 :]))
            value = g[i] - (others if mode == "leave_one_out" and group_size > 1 else g).mean()
            if normalize_std and mode in ("group", "batch") and group_size > 1:
                value = value / ((g if mode == "group" else r).std() + eps)
            out.append(g[i] if mode == "none" else value)
    return torch.stack(out)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("normalize_std", (True, False))
@pytest.mark.parametrize("groups,size", ((1, 2), (3, 8), (5, 17), (4, 1), (2, 40)))
def test_accuracy(mode: str, normalize_std: bool, groups: int, size: int) -> None:
    rewards = rand(groups * 100 + size, groups * size) + 1.0
    options = {"mode": mode, "normalize_std": normalize_std, "eps": 1e-3}
    ours = ops.group_advantages(rewards, size, **options)
    with ops.stock():
        base = ops.group_advantages(rewards, size, **options)
    assert_accurate(ours, truth(rewards, size, **options), base, f"{mode} {groups}x{size}")


def test_the_deviation_is_rounded_correctly() -> None:
    """torch.sqrt in fp32 may go to a vector library that is off by one ulp; a GPU's is not."""
    rows = rand(6, 2000 * 4).view(-1, 4)
    c = centred(rows)
    exact = over(row_sum(c * c), 3).double().sqrt().float()
    assert_bitwise(ops.group_advantages(rows.flatten(), 4).view(-1, 4), c / (exact + 1e-4), "2000 groups")


def test_values_by_hand() -> None:
    r = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    assert ops.group_advantages(r, 4, normalize_std=False).tolist() == [0.5, -0.5, -0.5, 0.5, 0.25, 0.25, 0.25, -0.75]
    third = 1 / 3
    loo = ops.group_advantages(r, 4, mode="leave_one_out").tolist()
    assert loo == pytest.approx([1 - third, -2 * third, -2 * third, 1 - third, third, third, third, -1.0])
    assert float(ops.group_advantages(r, 4)[0]) == pytest.approx(0.5 / (math.sqrt(third) + 1e-4))
    assert_bitwise(ops.group_advantages(r, 4, mode="none"), r, "none")


def check_own_group(groups: int, size: int, which: int, mode: str, seed: int) -> None:
    rewards = rand(seed, groups * size)
    mine = slice(which * size, (which + 1) * size)
    whole = ops.group_advantages(rewards, size, mode=mode)[mine]
    assert_bitwise(ops.group_advantages(rewards[mine], size, mode=mode), whole, f"group {which} alone")
    order = torch.randperm(groups, generator=torch.Generator().manual_seed(seed))
    moved = ops.group_advantages(rewards.view(groups, size)[order].flatten(), size, mode=mode).view(groups, size)
    assert_bitwise(moved[order.argsort()[which]], whole, f"group {which} moved")


@properties
@given(st.integers(1, 8), st.integers(1, 40), st.integers(0, 7), st.sampled_from(("group", "leave_one_out")), seeds)
def test_groups_are_independent(groups: int, size: int, which: int, mode: str, seed: int) -> None:
    check_own_group(groups, size, which % groups, mode, seed)


@properties
@given(st.integers(1, 20), st.integers(1, 20), st.floats(-1e4, 1e4, width=32), st.sampled_from(MODES[:3]))
def test_equal_rewards_are_exactly_zero(groups: int, size: int, value: float, mode: str) -> None:
    rewards = torch.full((groups * size,), value)
    assert_bitwise(ops.group_advantages(rewards, size, mode=mode), torch.zeros_like(rewards), f"{mode} of {value}")


def test_equal_rewards_control() -> None:
    """The mean of equal fp32 numbers need not be that number: dividing the rest by its own deviation makes it large."""

    def check() -> None:
        for value in (0.1, 0.7, 1.1, 2.3):
            for size in (3, 6, 7, 11):
                rewards = torch.full((size,), value)
                assert_bitwise(ops.group_advantages(rewards, size), torch.zeros(size), f"{size} x {value}")

    check()
    with ops.stock():
        assert differs(check)


def test_group_of_one_has_no_advantage() -> None:
    rewards = rand(1, 5)
    for mode in MODES[:3]:
        assert_bitwise(ops.group_advantages(rewards, 1, mode=mode), torch.zeros(5), mode)
    assert ops.group_advantages(torch.zeros(0), 4).shape == (0,)


def test_threads_are_free() -> None:
    rewards = rand(2, 4096 * 4)
    for mode in MODES:
        run = lambda mode=mode: ops.group_advantages(rewards, 8, mode=mode)
        assert_bitwise(with_threads(2, run), with_threads(1, run), mode)


def test_opcheck_and_compile() -> None:
    op = torch.ops.rlkernel.group_advantages.default
    for mode in MODES:
        torch.library.opcheck(op, (rand(3, 12), 4, mode, True, 1e-4))
    torch.compiler.reset()
    fn = torch.compile(ops.group_advantages, fullgraph=True, backend="aot_eager")
    assert_bitwise(fn(rand(3, 12), 4), ops.group_advantages(rand(3, 12), 4), "compiled")
    assert not ops.group_advantages(rand(3, 12).requires_grad_(), 4).requires_grad


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
def test_a_bad_reward_is_named(bad: float) -> None:
    rewards = rand(4, 12)
    rewards[7] = bad
    for mode in MODES:
        with pytest.raises(ValueError, match=rf"rewards\[7\] is {bad} \(group 1, member 3\)"):
            ops.group_advantages(rewards, 4, mode=mode)


@pytest.mark.parametrize("size", (3e38, -3e38, 2e15))
@pytest.mark.parametrize("implementation", ("cpu", "reference"))
def test_a_huge_reward_is_named(size: float, implementation: str) -> None:
    rewards = rand(4, 12)
    rewards[6] = size
    with select.use(implementation):
        for mode in MODES[:3]:
            with pytest.raises(
                ValueError, match=r"rewards\[6\] is .* \(group 1, member 2\); .* at most 1e\+15 .*; scale"
            ):
                ops.group_advantages(rewards, 4, mode=mode)
        assert_bitwise(ops.group_advantages(rewards, 4, mode="none"), rewards, "none")
        rewards[6], rewards[7] = 1e15, -1e15
        for mode in MODES[:3]:
            assert ops.group_advantages(rewards, 4, mode=mode).isfinite().all()


@properties
@given(st.integers(1, 9), st.integers(1, 40), st.sampled_from(MODES), st.booleans(), st.integers(-45, 14), seeds)
def test_reference_equals_cpp(groups: int, size: int, mode: str, normalize: bool, power: int, seed: int) -> None:
    rewards = rand(seed, groups * size) * 10.0**power
    rewards[:: 1 + seed % 5] = -0.0
    for given_rewards in (rewards, rewards.round(decimals=1), torch.stack((rewards, rewards), 1)[:, 0]):
        run = lambda x=given_rewards: ops.group_advantages(x, size, mode=mode, normalize_std=normalize)
        with select.use("reference"):
            expected = run()
        assert_bitwise(run(), expected, mode)


def test_bad_input() -> None:
    rewards = rand(5, 12)
    with pytest.raises(ValueError, match="group_size=5 must be positive and divide B=12"):
        ops.group_advantages(rewards, 5)
    with pytest.raises(ValueError, match="group_size=0"):
        ops.group_advantages(rewards, 0)
    with pytest.raises(ValueError, match="mode='mean' is unknown; expected one of group"):
        ops.group_advantages(rewards, 4, mode="mean")
    with pytest.raises(ValueError, match=r"rewards is \(3, 4\), expected \[B\]"):
        ops.group_advantages(rewards.view(3, 4), 4)
    for flag in (None, "x", 2, 2.5, torch.ones(2)):
        with pytest.raises(TypeError, match=r"normalize_std=.* must be True or False"):
            ops.group_advantages(rewards, 4, normalize_std=flag)
    with pytest.raises(ValueError, match=r"eps=0\.0 must be above 0"):
        ops.group_advantages(rewards, 4, eps=0.0)
    with pytest.raises(TypeError, match=r"rewards is torch\.float64, expected torch\.float32"):
        ops.group_advantages(rewards.double(), 4)
