"""Statistics against plain loops and torch; lattices are found, and smooth noise has none."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel.contract import compare_bitwise
from rlkernel_drift.capsule import Tensor
from rlkernel_drift.statistics import (
    Comparable,
    SequenceSums,
    find_lattice,
    sequence_statistics,
    tensor_ulps,
    token_statistics,
    ulp_distance,
    ulp_histogram,
)


def pair(n: int = 1000, noise: float = 0.01, seed: int = 0) -> Comparable:
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(1.0, n).astype(np.float32)
    train = (rollout + rng.normal(0, noise, n)).astype(np.float32)
    return Comparable(rollout, train, np.ones(n, np.bool_))


def test_against_plain_loops() -> None:
    p = pair()
    s = token_statistics(p)
    d = [float(t) - float(r) for r, t in zip(p.rollout, p.train, strict=True)]
    n = len(d)
    assert s.mean == pytest.approx(math.fsum(map(abs, d)) / n)
    assert s.bias == pytest.approx(math.fsum(d) / n) and s.k1 == -s.bias
    assert s.k3 == pytest.approx(math.fsum(math.exp(x) - 1 - x for x in d) / n, rel=1e-6)
    assert s.chi_square == pytest.approx(math.fsum(math.exp(2 * x) for x in d) / n - 1)
    assert s.multiplicative == pytest.approx(math.fsum(math.exp(abs(x)) for x in d) / n)
    assert s.pearson == pytest.approx(np.corrcoef(p.rollout.astype(float), p.train.astype(float))[0, 1])
    w = [math.exp(x) for x in d]
    assert s.ess == pytest.approx(sum(w) ** 2 / (n * sum(x * x for x in w)))
    assert s.maximum == max(map(abs, d)) and s.p50 <= s.p90 <= s.p95 <= s.p99 <= s.p999 <= s.maximum
    assert s.retention["5%"] == sum(0.95 <= x <= 1.05 for x in w) / n


def test_equal_streams() -> None:
    p = pair(noise=0.0)
    s = token_statistics(p)
    assert (s.equal, s.mean, s.k3, s.ess) == (1.0, 0.0, 0.0, 1.0)


def test_values_that_are_not_finite_are_counted_separately() -> None:
    rollout = np.array([-1, np.nan, -np.inf, -2, 0.5, -3, -1], np.float32)
    train = np.array([-1, -1, -1, np.inf, -1, -20000, -9], np.float32)
    mask = np.array([1, 1, 1, 1, 1, 1, 0], np.bool_)
    s = token_statistics(Comparable(rollout, train, mask))
    assert (s.tokens, s.nan_rollout, s.support_rollout, s.support_train, s.inf_train) == (2, 1, 1, 1, 1)
    assert (s.positive, s.masked_out, s.maximum) == (1, 1, 1.5)


def test_nothing_to_compare() -> None:
    empty = np.full(3, np.nan, np.float32)
    s = token_statistics(Comparable(empty, empty, np.ones(3, np.bool_)))
    assert s.tokens == 0 and s.pearson is None and s.nan_rollout == 3


def test_sequences() -> None:
    p = pair(10)
    sums = SequenceSums(p, np.array([0, 4, 10]))
    assert sums.total == pytest.approx([p.d[:4].sum(), p.d[4:].sum()])
    s = sequence_statistics(sums)
    assert s.sequences == 2 and s.sum_max == pytest.approx(max(abs(sums.total)))
    masked = Comparable(p.rollout, p.train, np.arange(10) >= 4)
    assert SequenceSums(masked, np.array([0, 4, 10])).sequence.tolist() == [1]


def test_bias_and_worst_sequence_beyond_chance() -> None:
    rng = np.random.default_rng(0)
    rollout = -rng.exponential(1.0, 800).astype(np.float32) - 1
    places = np.arange(0, 801, 100)
    of = lambda d: sequence_statistics(
        SequenceSums(Comparable(rollout, (rollout + d).astype(np.float32), np.ones(800, np.bool_)), places)
    )
    quiet, shifted = of(rng.normal(0, 0.1, 800)), of(rng.normal(0.05, 0.1, 800))
    assert quiet.bias < 1e-3 and 0.03 < shifted.bias < 0.05
    one = rng.normal(0, 0.01, 800)
    one[300:400] += 0.9
    assert of(one).worst_mean == pytest.approx(0.9, abs=0.02) and quiet.worst_mean < 0.09
    lone = np.zeros(800)
    lone[5] = 9.0  # a single token does not make a sequence drift
    assert of(lone).worst_mean == 0 == of(lone).bias


def test_a_hundred_thousand_tokens_take_well_under_ten_seconds() -> None:
    p = pair(100_000)
    start = time.perf_counter()
    token_statistics(p), find_lattice(p.d), ulp_histogram(ulp_distance(p.rollout, p.train))
    sequence_statistics(SequenceSums(p, np.arange(0, 100_001, 100)))
    assert time.perf_counter() - start < 2


# ---- ulps ----------------------------------------------------------------------------------------------------------

floats = st.floats(width=32, allow_nan=False)


@settings(max_examples=200, deadline=None)
@given(floats, floats)
def test_ulps_are_those_of_the_contract(a: float, b: float) -> None:
    x, y = np.array([a], np.float32), np.array([b], np.float32)
    ours = int(ulp_distance(x, y)[0])
    report = compare_bitwise(torch.tensor(x), torch.tensor(y))
    signs = (math.copysign(1, a) != math.copysign(1, b)) and report.mismatches
    assert ours == (report.ulps or 0) + bool(signs)


def test_ulps_of_other_dtypes() -> None:
    a = Tensor.bfloat16(np.array([1.0, 2.0, -3.0], np.float32))
    b = Tensor(a.values + np.array([0, 1, 3], np.uint16), "BF16")
    assert tensor_ulps(a, b).tolist() == [0, 1, 3]  # type: ignore[union-attr]
    assert tensor_ulps(a, Tensor.of(np.ones(3))) is None
    assert int(ulp_distance(np.array([1e300]), np.array([-1e300]))[0]) > 1 << 60


def test_histogram() -> None:
    h = ulp_histogram(np.array([0, 0, 1, 2, 4, 100, 5_000_000_000]))
    assert h.equal == 2 and h.bins == {"1": 1, "2": 1, "3-4": 1, "65-256": 1, ">=16777216": 1}
    assert h.maximum == 5_000_000_000


# ---- lattices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1 / 8, 1 / 32, 1 / 128])
@pytest.mark.parametrize("jitter", [0.0, 0.05])
def test_a_lattice_is_found(step: float, jitter: float) -> None:
    rng = np.random.default_rng(1)
    d = rng.integers(-2, 3, 600) * step + rng.normal(0, jitter * step + 1e-12, 600)
    found = find_lattice(d)
    assert found is not None and found.step == step and found.exact == (jitter == 0)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("scale", [0.001, 0.03, 0.5])
def test_smooth_noise_has_no_lattice(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    assert find_lattice(rng.normal(0, scale, 500)) is None
    assert find_lattice(rng.laplace(0, scale, 500)) is None
    assert find_lattice(np.abs(rng.normal(0, scale, 500))) is None


@pytest.mark.parametrize("noise", [0.0, 1e-5, 1e-3])
def test_one_multiple_is_not_a_lattice(noise: float) -> None:
    d = 0.029 + np.random.default_rng(0).normal(0, noise, 600)
    assert find_lattice(d) is None and find_lattice(np.full(600, 1 / 32)) is None


def test_bf16_logits_show_their_lattice() -> None:
    torch.manual_seed(0)
    # Sampled tokens have logits in [4, 8), where bf16 steps by 1/32; a wide vocabulary keeps the log-sum-exp steady.
    logits = torch.cat([4 + 4 * torch.rand(2000, 1), 3 + torch.randn(2000, 1024)], 1)
    rounded = [(logits + torch.randn_like(logits) * 0.01).bfloat16().float() for _ in range(2)]
    a, b = (x.log_softmax(-1)[:, 0] for x in rounded)
    found = find_lattice((a - b).double().numpy())
    assert found is not None and found.step == 1 / 32 and "1/32" in str(found)
    fine = [(logits + torch.randn_like(logits) * 0.01) for _ in range(2)]
    a, b = (x.log_softmax(-1)[:, 0] for x in fine)
    assert find_lattice((a - b).double().numpy()) is None
