"""Scalar arithmetic of the CPU contract: close to fp64, exact where it claims to be, and the same in the C++ kernels.

The C++ functions are called through ops: a weight gradient of one token is one fma per element, swiglu uses exp,
rms_norm sqrt and the fixed row sum, linear the conversions, logprob log.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.contract.orders import LANES
from rlkernel.kernels import select
from rlkernel.kernels.reference import arith

INF = float("inf")
patterns = st.integers(0, 2**32 - 1)


def floats(bits: list[int] | Tensor) -> Tensor:
    return torch.as_tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def random_patterns(seed: int, count: int) -> Tensor:
    """fp32 numbers with uniformly random bits: including all exponents, subnormals, inf and NaN."""
    return floats(torch.randint(0, 2**32, (count,), generator=torch.Generator().manual_seed(seed)))


def ulps(actual: Tensor, exact: Tensor) -> float:
    """Largest error in units of the last fp32 place of the exact value."""
    exponent = torch.floor(torch.log2(exact.abs().clamp_min(2.0**-126)))
    return float(((actual.double() - exact).abs() / torch.exp2(exponent - 23)).max())


def cpp_fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """fma(a[i], b[i], c[i]) by the C++ kernel of linear's weight gradient, for [1,1] matrices of one token."""
    out = c.clone()
    with select.use("cpu"):
        for i in range(len(out)):
            torch.ops.rlkernel.linear_wgrad_(out[i].view(1, 1), a[i].view(1, 1), b[i].view(1, 1))
    return out


def equal_except_nan(actual: Tensor, expected: Tensor, what: str) -> None:
    """Bitwise, except that all NaNs are equal, because their payload depends on the machine."""
    assert bool((actual.isnan() == expected.isnan()).all()), what
    keep = ~expected.isnan()
    assert_bitwise(actual[keep], expected[keep], what)


# ---- fma


def exact_fma(a: float, b: float, c: float) -> float:
    """a * b + c in rational arithmetic, rounded once to fp32, to nearest even."""
    value = Fraction(a) * Fraction(b) + Fraction(c)
    if value == 0:
        return 0.0
    exponent = max(math.frexp(float(value))[1] - 24, -149)
    if abs(value) >= Fraction(2) ** (exponent + 24):  # float() rounded up to the next power of two
        exponent += 1
    return math.ldexp(round(value / Fraction(2) ** exponent), exponent)  # round(): half to even


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.tuples(patterns, patterns, patterns), st.integers(0, 255))
def test_fma_is_rounded_once(bits: tuple[int, int, int], exponent: int) -> None:
    # similar exponents, so that the sum cancels and carries
    a, b, c = ((p & 0x807FFFFF) | ((110 + (p >> 23 & 31)) << 23) for p in bits)
    c = (c & 0x807FFFFF) | (exponent << 23) if exponent < 255 else c
    x, y, z = floats([a]), floats([b]), floats([c])
    assert float(arith.fma(x, y, z)) == exact_fma(float(x), float(y), float(z))


def test_fma_where_fp64_alone_would_round_twice() -> None:
    one, half_ulp, tiny = 1.0, 2.0**-24, 2.0**-80
    for a, b, c in (
        (one, half_ulp, tiny),
        (1 + 2.0**-23, one, half_ulp),
        (2.0**-40, 2.0**-40, one + 2.0**-23),
        (2.0**-12 + 2.0**-35, 2.0**-12, 1 + 2.0**-23),
        (-(2.0**-12 + 2.0**-35), 2.0**-12, 1 + 2.0**-23),
        (2.0**-12, 2.0**-12, 1 + 2.0**-23),
        (2.0**-75, 2.0**-75, 2.0**-149),
    ):
        x, y, z = (torch.tensor([v], dtype=torch.float32) for v in (a, b, c))
        assert float(arith.fma(x, y, z)) == exact_fma(float(x), float(y), float(z)), (a, b, c)


def test_double_rounding_control() -> None:
    # The product is 2^-24 - 2^-70, just below half an ulp of z, which is odd: fp64 drops the 2^-70 and then sees a tie.
    eps = 2.0**-23
    x, y, z = (torch.tensor([v], dtype=torch.float32) for v in (2.0**-12 * (1 + eps), 2.0**-12 * (1 - eps), 1 + eps))
    naive = (x.double() * y.double() + z.double()).float()
    assert float(naive) == 1 + 2 * eps
    assert float(arith.fma(x, y, z)) == exact_fma(float(x), float(y), float(z)) == 1 + eps


def test_fma_equals_cpp() -> None:
    a, b, c = (random_patterns(seed, 400) for seed in range(3))
    near = [
        torch.ldexp(torch.randn(200, generator=torch.Generator().manual_seed(9 + i)), torch.tensor(0)) for i in range(2)
    ]
    a, b = torch.cat((a, near[0])), torch.cat((b, near[1]))
    c = torch.cat((c, -(near[0] * near[1])))  # leaves the product's rounding error
    equal_except_nan(cpp_fma(a, b, c), arith.fma(a, b, c), "fma")


# ---- exp2, exp, log2, log, sqrt


def test_exp2_accuracy() -> None:
    for low, high in ((-125.9, 127.99), (-0.5, 0.5), (-20.0, 0.0)):
        x = torch.linspace(low, high, 40_001)
        assert ulps(arith.exp2(x), torch.exp2(x.double())) < 2.7


def test_exp2_is_monotonic_and_exact_at_integers() -> None:
    y = arith.exp2(torch.linspace(-20, 0, 200_001))
    assert bool((y[1:] >= y[:-1]).all())
    whole = torch.arange(-126, 128).float()
    assert_bitwise(arith.exp2(whole), torch.exp2(whole.double()).float(), "2^integer")


def test_exp2_at_the_edges() -> None:
    x = torch.tensor([-INF, -1e30, -127.0, -126.0000076, -126.0, -0.0, 127.99999, 128.0, 1e30, INF])
    y = arith.exp2(x)
    assert_bitwise(y[:5], torch.tensor([0.0, 0.0, 0.0, 0.0, 2.0**-126]), "below 2^-126 is +0")
    assert y[5] == 1.0 and bool(torch.isfinite(y[6])) and y[7:].tolist() == [INF] * 3
    assert bool(arith.exp2(torch.tensor([float("nan")])).isnan())


def test_exp_accuracy() -> None:
    # The product x * log2(e) is rounded: the relative error grows by up to 2^-24 with each unit of |x|.
    x = torch.linspace(-1, 1, 20_001)
    assert ulps(arith.exp(x), torch.exp(x.double())) < 4
    x = torch.linspace(-87, 88, 20_001)
    assert bool(((arith.exp(x).double() / torch.exp(x.double()) - 1).abs() < 2.0**-24 * (4 + 1.2 * x.abs())).all())


def test_log2_accuracy() -> None:
    x = torch.exp2(torch.linspace(-125, 127, 40_001))
    exact = torch.log2(x.double())
    assert bool(((arith.log2(x).double() - exact).abs() <= 2.0**-24 * 1.1 * exact.abs().clamp_min(1)).all())
    x = torch.linspace(0.71, 1.41, 40_001)
    exact = torch.log2(x.double())
    assert bool(((arith.log2(x).double() - exact).abs() <= 2.0**-22 * exact.abs() + 1e-12).all()), "relative near 1"
    powers = torch.arange(-126, 128)
    assert_bitwise(arith.log2(torch.ldexp(torch.ones(254), powers)), powers.float(), "powers of two")
    assert arith.log2(torch.tensor([0.0, INF])).tolist() == [-INF, INF]


def test_log_accuracy() -> None:
    x = torch.linspace(1, 300_000, 40_001)
    exact = torch.log(x.double())
    assert bool(((arith.log(x).double() - exact).abs() <= 2.0**-23 * exact.abs().clamp_min(1)).all())


def test_sqrt_is_correctly_rounded() -> None:
    x = random_patterns(3, 50_000).abs()
    x = x[torch.isfinite(x)]
    expected = torch.from_numpy(np.sqrt(x.numpy()))
    assert_bitwise(arith.sqrt(x), expected, "sqrt")
    assert arith.sqrt(torch.tensor([0.0, INF])).tolist() == [0.0, INF]


# ---- row sums


@pytest.mark.parametrize("n", (1, 15, 16, 17, 100))
def test_row_sums_are_lanes_folded_in_halves(n: int) -> None:
    x = torch.randn(3, n, generator=torch.Generator().manual_seed(n))
    y = torch.randn(3, n, generator=torch.Generator().manual_seed(n + 1))
    for row in range(3):
        lanes, dots = np.zeros(LANES, np.float32), torch.zeros(LANES)
        for i in range(n):
            lanes[i % LANES] += np.float32(x[row, i])
            dots[i % LANES] = arith.fma(x[row, i], y[row, i], dots[i % LANES])
        for width in (8, 4, 2, 1):
            lanes = lanes[:width] + lanes[width:]
            dots = dots[:width] + dots[width:]
        assert float(arith.row_sum(x)[row]) == float(lanes[0])
        assert float(arith.row_dot(x, y)[row]) == float(dots[0])
    exact = x.double().sum(-1)
    assert bool(((arith.row_sum(x).double() - exact).abs() < 1e-5).all())


# ---- the C++ functions, through ops


def both(run: Callable[[], Any]) -> tuple[Any, Any]:
    with select.use("cpu"):
        compiled = run()
    with select.use("reference"):
        return compiled, run()


def test_exp_equals_cpp() -> None:
    gate = torch.cat((torch.linspace(-100, 100, 20_001), random_patterns(5, 5_000)))
    gate_up = torch.stack((gate, torch.ones_like(gate)), dim=-1)
    equal_except_nan(*both(lambda: ops.swiglu(gate_up)), "exp through swiglu")
    grad = lambda: torch.ops.rlkernel.swiglu_grad(torch.ones(len(gate), 1), gate_up)
    equal_except_nan(*both(grad), "exp through the gradient of swiglu")


def test_sqrt_and_row_dot_equal_cpp() -> None:
    x = torch.randn(2_000, 9, generator=torch.Generator().manual_seed(0)) * torch.logspace(-12, 12, 2_000)[:, None]
    equal_except_nan(*both(lambda: ops.rms_norm(x, torch.ones(9), 0.0)), "sqrt through rms_norm")


def test_log_equals_cpp() -> None:
    logits = torch.randn(300, 70, generator=torch.Generator().manual_seed(0)) * torch.linspace(0, 30, 300)[:, None]
    targets = torch.arange(300) % 70
    for name, compiled, reference in zip(
        ("logp", "entropy", "lse"), *both(lambda: ops.logprob(logits, targets)), strict=True
    ):
        assert_bitwise(compiled, reference, f"{name} of logprob")


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_conversions_equal_torch(dtype: torch.dtype) -> None:
    x = random_patterns(7, 20_000)
    step = torch.finfo(dtype).eps
    ties = torch.tensor([s * m * (1 + k * step / 2) for s in (1, -1) for m in (1.0, 2.0**-9) for k in range(40)])
    subnormal = torch.ldexp(torch.arange(-64, 64).float(), torch.tensor(-28 if dtype == torch.float16 else -137))
    x = torch.cat((x, ties, subnormal, torch.tensor([0.0, INF, -INF, 65504.0, 65519.9, 65520.0, 3.4e38])))
    x = x.masked_fill(x.abs() < 2.0**-149, 0.0) + 0.0  # 1 * x + 0 turns -0 into +0
    with select.use("cpu"):
        y = ops.linear(x[:, None], torch.ones(1, 1), out_dtype=dtype)[:, 0]
        equal_except_nan(y, x.to(dtype), f"fp32 to {dtype}")
        wide = ops.linear(y[:, None], torch.ones(1, 1, dtype=dtype), out_dtype=torch.float32)[:, 0]
    equal_except_nan(wide, y.float() + 0.0, f"{dtype} to fp32")
