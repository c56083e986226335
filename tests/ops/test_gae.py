"""gae: accuracy, values by hand, and bits that depend on a sequence alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import assert_reference_equal, differs, rand, with_threads
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_accurate, assert_bitwise
from rlkernel.kernels import select
from rlkernel.kernels.reference import gae as reference

properties = settings(max_examples=30, deadline=None, derandomize=True)
lengths_of_sequences = st.lists(st.integers(0, 40), min_size=1, max_size=6)
coefficients = st.sampled_from(((1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (0.9, 0.0), (0.0, 0.5), (0.3, 1.0)))
seeds = st.integers(0, 2**16)


def borders(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def truth(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """Equation 16 of arXiv:1506.02438 for one sequence in fp64: discounted sums of the TD residuals."""
    r, v = rewards.double(), values.double()
    delta = r + gamma * torch.cat((v[1:], v.new_zeros(1))) - v
    n = len(delta)
    return torch.stack([sum((gamma * lam) ** (j - i) * delta[j] for j in range(i, n)) for i in range(n)])


# ---- right


@pytest.mark.parametrize("gamma,lam", ((1.0, 0.95), (0.99, 0.9), (1.0, 1.0), (0.5, 0.0)))
def test_accuracy(gamma: float, lam: float) -> None:
    lengths = [37, 1, 120, 4]
    rewards, values, cu = rand(0, 162), rand(1, 162), borders(lengths)
    ours = ops.gae(rewards, values, cu, gamma, lam)
    with ops.stock():
        base = ops.gae(rewards, values, cu, gamma, lam)
    pieces = zip(rewards.split(lengths), values.split(lengths), strict=True)
    exact = torch.cat([truth(r, v, gamma, lam) for r, v in pieces])
    assert_accurate(ours.advantages, exact, base.advantages, "advantages")
    assert_accurate(ours.returns, exact + values.double(), base.returns, "returns")


def test_values_by_hand() -> None:
    rewards, values = torch.tensor([0.0, 0.0, 1.0, 5.0]), torch.tensor([0.5, 0.25, 0.5, 2.0])
    cu = torch.tensor([0, 3, 3, 4], dtype=torch.int32)
    out = ops.gae(rewards, values, cu, 0.5, 0.5)  # residuals -0.375, 0, 0.5; then 3
    assert out.advantages.tolist() == [-0.375 + 0.5 / 16, 0.125, 0.5, 3.0]
    assert out.returns.tolist() == [-0.375 + 0.5 / 16 + 0.5, 0.375, 1.0, 5.0]
    summed = ops.gae(rewards, values, cu)  # gamma = lam = 1: the rewards to come, minus the value
    assert summed.advantages.tolist() == [0.5, 0.75, 0.5, 3.0] and summed.returns.tolist() == [1.0, 1.0, 1.0, 5.0]


def check_reference(seed: int, lengths: list[int], gamma: float, lam: float) -> None:
    rewards, values = rand(seed, sum(lengths)), rand(seed + 1, sum(lengths))
    assert_reference_equal(lambda: ops.gae(rewards, values, borders(lengths), gamma, lam), "gae")


@properties
@given(seeds, lengths_of_sequences, coefficients)
def test_reference_equals_cpp(seed: int, lengths: list[int], coefficients: tuple[float, float]) -> None:
    check_reference(seed, lengths, *coefficients)


def test_reference_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that is rounded before the sum is another order, and the comparison sees it."""
    monkeypatch.setattr(reference, "fma", lambda a, b, c: a * b + c)
    assert differs(lambda: check_reference(0, [30, 7], 0.99, 0.95))


# ---- invariant


@properties
@given(seeds, lengths_of_sequences, coefficients, st.integers(0, 5))
def test_sequences_are_independent(seed: int, lengths: list[int], c: tuple[float, float], which: int) -> None:
    rewards, values = rand(seed, sum(lengths)), rand(seed + 1, sum(lengths))
    whole = ops.gae(rewards, values, borders(lengths), *c)
    which %= len(lengths)
    mine = slice(sum(lengths[:which]), sum(lengths[: which + 1]))
    strided = torch.stack((rewards[mine], values[mine]), dim=1)
    alone = ops.gae(strided[:, 0], strided[:, 1], borders([lengths[which]]), *c)
    assert_bitwise(alone.advantages, whole.advantages[mine], f"sequence {which} alone")
    assert_bitwise(alone.returns, whole.returns[mine], f"returns of sequence {which} alone")


def test_threads_are_free() -> None:
    lengths = [300, 40, 0, 1000, 5] * 20
    rewards, values = rand(2, sum(lengths)), rand(3, sum(lengths))
    run = lambda: ops.gae(rewards, values, borders(lengths), 0.99, 0.95)
    for two, one in zip(with_threads(2, run), with_threads(1, run), strict=True):
        assert_bitwise(two, one, "1 against 2 threads")


# ---- torch's machinery


def test_opcheck_and_compile() -> None:
    rewards, values, cu = rand(0, 9), rand(1, 9), borders([4, 5])
    torch.library.opcheck(torch.ops.rlkernel.gae.default, (rewards, values, cu, 0.9, 0.5))
    torch.compiler.reset()
    fn = torch.compile(ops.gae, fullgraph=True, backend="aot_eager")
    for a, b in zip(fn(rewards, values, cu, 0.9, 0.5), ops.gae(rewards, values, cu, 0.9, 0.5), strict=True):
        assert_bitwise(a, b, "compiled")


def test_empty_batches() -> None:
    for context in ("cpu", "reference"):
        with select.use(context):
            assert ops.gae(rand(0, 0), rand(0, 0), borders([])).advantages.shape == (0,)
    with ops.stock():
        assert ops.gae(rand(0, 0), rand(0, 0), borders([0, 0])).returns.shape == (0,)


def test_bad_input() -> None:
    x, cu = rand(0, 6), borders([2, 4])
    with pytest.raises(ValueError, match=r"gae: rewards is \(6,\), values \(5,\); expected \[T\] for both"):
        ops.gae(x, x[:5], cu)
    for wrong in ([0, 2, 5], [1, 2, 6], [0, 4, 2, 6]):
        for implementation in ("cpu", "reference"):
            with select.use(implementation), pytest.raises(ValueError, match=r"gae: cu_seqlens must start at 0.*T=6"):
                ops.gae(x, x, torch.tensor(wrong, dtype=torch.int32))
    with pytest.raises(RuntimeError, match=r"gae.* values"):
        ops.gae(x, x.clone().requires_grad_(), cu)
    for gamma, lam, name in ((1.5, 1.0, "gamma=1.5"), (1.0, -0.1, "lam=-0.1"), (math.nan, 1.0, "gamma=nan")):
        with pytest.raises(ValueError, match=f"gae: {name} must be from 0 to 1"):
            ops.gae(x, x, cu, gamma, lam)
