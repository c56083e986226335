"""The oracle of Hopper's tensor cores has the properties on which the contract of `linear` relies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import rand
from oracle.hopper_mma import FRACTION_BITS, Floats, chain, linear, mma_k16

from rlkernel import ops
from rlkernel.contract import assert_accurate

properties = settings(max_examples=25, deadline=None, derandomize=True)
seeds = st.integers(0, 2**16)


def values(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16, spread: int = 0) -> Floats:
    """bf16 or fp16 values in fp32, scaled by random powers of two within +-spread."""
    x = rand(seed, *shape)
    if spread:
        exponents = torch.randint(-spread, spread + 1, shape, generator=torch.Generator().manual_seed(seed))
        x = torch.ldexp(x, exponents)
    return x.to(dtype).float().numpy()


def same(a: Floats, b: Floats) -> bool:
    return a.tobytes() == b.tobytes()


def fused(*terms: tuple[float, float], c: float = 0.0, fraction_bits: int = FRACTION_BITS) -> float:
    """One step on the given products."""
    a, b = np.zeros((1, 16), np.float32), np.zeros((1, 16), np.float32)
    for i, (x, y) in enumerate(terms):
        a[0, i], b[0, i] = x, y
    return float(mma_k16(a, b, np.full((1, 1), c, np.float32), fraction_bits)[0, 0])


# ---- one step, by hand


def test_terms_are_cut_25_bits_below_the_largest() -> None:
    one, minus = (1.0, 1.0), (-1.0, 1.0)
    assert fused(one, (2.0**-12, 2.0**-13), minus) == 2.0**-25
    assert fused(one, (2.0**-13, 2.0**-13), minus) == 0.0
    assert fused(one, (2.0**-12, 2.0**-13), minus, fraction_bits=24) == 0.0
    assert fused((2.0**-13, 2.0**-13), (-(2.0**-13), 2.0**-14)) == 2.0**-27, "no larger term, nothing cut"


def test_the_cut_is_toward_zero_and_term_by_term() -> None:
    small = (2.0**-13, 2.0**-13)  # 2^-26: half of the last bit kept next to 1
    assert fused((1.0, 1.0), small, small, (-1.0, 1.0)) == 0.0
    assert fused((1.0, 1.0), (-small[0], small[1]), (-1.0, 1.0)) == 0.0, "toward zero, not down"


def test_products_are_not_normalised() -> None:
    # 1.5 * 1.5 = 2.25 keeps exponent 0, so 2^-25 next to it is kept; 2 * 1.125, the same number, has exponent 1.
    tiny = (2.0**-12, 2.0**-13)
    assert fused((1.5, 1.5), tiny, (-1.5, 1.5)) == 2.0**-25
    assert fused((2.0, 1.125), tiny, (-2.0, 1.125)) == 0.0


def test_the_accumulator_is_one_of_the_terms() -> None:
    assert fused((2.0**-12, 2.0**-13), (-1.0, 1.0), c=1.0) == 2.0**-25
    assert fused((1.0, 2.0**-12), (1.0, 2.0**-12), c=1.0) == 1.0 + 2.0**-11
    assert fused((1.0, 2.0**-24), (1.0, 2.0**-24), c=1.0) == 1.0 + 2.0**-23, "25 bits: two half-ulps make one"
    assert fused((1.0, 2.0**-24), c=1.0) == 1.0, "the result is cut toward zero"
    assert fused((1.0, -(2.0**-25)), c=1.0) == 1.0 - 2.0**-24, "toward zero as well: just below 1"


def test_gradual_underflow_and_non_finite() -> None:
    assert fused((2.0**-100, 2.0**-49)) == 2.0**-149
    assert fused((2.0**-100, 2.0**-50)) == 0.0
    with pytest.raises(ValueError, match="finite numbers only"):
        fused((float("inf"), 1.0))


def test_small_integers_are_exact() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.integers(-99, 100, (5, 70)), rng.integers(-99, 100, (6, 70))
    assert np.array_equal(chain(x.astype(np.float32), w.astype(np.float32)), x @ w.T)


# ---- what makes schedules free


@properties
@given(st.sampled_from((torch.bfloat16, torch.float16)), st.integers(0, 8), seeds)
def test_order_inside_a_group_is_free(dtype: torch.dtype, spread: int, seed: int) -> None:
    a, b = values(seed, 5, 16, dtype=dtype, spread=spread), values(seed + 1, 6, 16, dtype=dtype, spread=spread)
    c = rand(seed + 2, 5, 6).numpy()
    order = np.random.default_rng(seed).permutation(16)
    assert same(mma_k16(a[:, order], b[:, order], c), mma_k16(a, b, c))


@properties
@given(st.integers(0, 40), seeds)
def test_a_group_of_zeros_is_the_identity(spread: int, seed: int) -> None:
    c = values(seed, 4, 5, dtype=torch.float32, spread=spread)
    zero = np.zeros((5, 16), np.float32)
    assert same(mma_k16(zero[:4], zero, c), c)
    x, w = values(seed, 3, 40), values(seed + 1, 4, 40)
    longer = np.pad(x, ((0, 0), (0, 56))), np.pad(w, ((0, 0), (0, 56)))
    assert same(chain(*longer), chain(x, w)), "masked tails"


@properties
@given(st.integers(1, 5), st.integers(1, 5), seeds)
def test_a_chain_continues(first: int, second: int, seed: int) -> None:
    cut = 16 * first
    x, w = values(seed, 3, cut + 16 * second, spread=4), values(seed + 1, 4, cut + 16 * second, spread=4)
    assert same(chain(x[:, cut:], w[:, cut:], chain(x[:, :cut], w[:, :cut])), chain(x, w))


@properties
@given(st.integers(1, 64), seeds)
def test_operands_may_be_swapped(k: int, seed: int) -> None:
    x, w = values(seed, 7, k, spread=4), values(seed + 1, 5, k, spread=4)
    assert same(np.ascontiguousarray(chain(w, x).T), chain(x, w))


@properties
@given(st.sampled_from((2, 4, 8)), st.integers(1, 3), seeds)
def test_chunks_are_a_tree_of_chains(p: int, groups: int, seed: int) -> None:
    x, w = values(seed, 3, 16 * groups * p), values(seed + 1, 4, 16 * groups * p)
    half = x.shape[1] // 2
    ranks = linear(x[:, :half], w[:, :half], p // 2) + linear(x[:, half:], w[:, half:], p // 2)
    assert same(ranks, linear(x, w, p)), "two tensor-parallel ranks"


def test_controls() -> None:
    x, w = values(0, 16, 512), values(1, 16, 512)
    plain = chain(x, w)
    groups = np.arange(512).reshape(32, 16)
    backward, strided = groups[::-1].reshape(-1), groups.T.reshape(-1)
    assert not same(chain(x[:, backward], w[:, backward]), plain), "the order of groups is not free"
    assert not same(chain(x[:, strided], w[:, strided]), plain), "nor which products share a group"
    assert not same(linear(x, w, 4), plain), "nor the number of chunks"
    assert not same(chain(x, w, fraction_bits=24), plain), "the bits kept are 25"


def test_groups_of_zeros_may_be_omitted_from_a_chain_but_single_zeros_may_not() -> None:
    """linear_logprob's weight gradient therefore omits tokens only in groups of 16. If it omitted single tokens, the
    group of a token, and with it the bits, would depend on how many earlier tokens have a gradient."""
    tokens, entries, channels = 512, 24, 32
    dz, hidden = values(0, entries, tokens), values(1, channels, tokens)
    groups = np.arange(tokens) // 16 % 3 != 1
    single = np.arange(tokens) % 2 == 0
    without = lambda some: chain(dz[:, some], hidden[:, some])
    assert same(without(groups), chain(np.where(groups, dz, 0.0).astype(np.float32), hidden))
    found, wanted = without(single), chain(np.where(single, dz, 0.0).astype(np.float32), hidden)
    assert (found != wanted).mean() > 0.25, "other bits, in many of the sums"


# ---- accuracy


def test_error_scale() -> None:
    x, w = values(0, 16, 4096), values(1, 32, 4096)
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    error = {p: float(np.sqrt(np.mean((linear(x, w, p) - exact) ** 2)) / 64) for p in (1, 8)}  # rms of y is 64
    assert 2e-6 < error[1] < 8e-6, "one chain of 4096: the cuts add up"
    assert 2e-7 < error[8] < 8e-7, "chunks of 512"
    positive = chain(np.abs(x), np.abs(w))
    assert bool((positive <= np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64).T).all()), "cuts only shrink"


@pytest.mark.parametrize("chunks", (1, 4))
def test_close_to_the_cpu(chunks: int) -> None:
    x, w = rand(0, 9, 256, dtype=torch.bfloat16), rand(1, 20, 256, dtype=torch.bfloat16)
    gpu = torch.from_numpy(linear(x.float().numpy(), w.float().numpy(), chunks))
    assert_accurate(gpu, ops.linear(x, w, chunks=chunks, out_dtype=torch.float32), None, "oracle against the CPU")
