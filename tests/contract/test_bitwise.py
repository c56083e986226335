"""assert_bitwise counts, locates and measures all differences, including those that == misses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel.contract import assert_bitwise, compare_bitwise

floats = pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16))


def bits(pattern: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    view = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    return torch.tensor([pattern], dtype=torch.int64).to(view).view(dtype)


@floats
def test_equal_tensors(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4).to(dtype)
    report = compare_bitwise(x, x.clone())
    assert (report.mismatches, report.elements, report.first) == (0, 12, None)
    assert str(report) == "0 of 12 elements differ"
    assert_bitwise(x, x.clone())


@floats
def test_counts_coordinates_values_ulps(dtype: torch.dtype) -> None:
    x = torch.ones(4, 5, dtype=dtype)
    y = x.clone()
    eps = torch.finfo(dtype).eps
    y[1, 3], y[2, 0], y[3, 4] = 1 + eps, 1 + 4 * eps, 1 - eps
    report = compare_bitwise(x, y)
    assert (report.mismatches, report.elements, report.first) == (3, 20, (1, 3))
    assert (report.actual, report.expected) == (1.0, 1 + eps)
    assert (report.ulps, report.max_ulps) == (1, 4)
    assert report.max_abs_diff == 4 * eps


def test_message_names_the_thing_and_the_place() -> None:
    x = torch.zeros(2, 3)
    y = x.clone()
    y[1, 2] = 1.5
    with pytest.raises(
        AssertionError, match=r"logp: 1 of 6 elements differ; first at \(1, 2\): actual 0.0, expected 1.5"
    ):
        assert_bitwise(x, y, "logp")


def test_ulps_cross_zero() -> None:
    tiny = torch.tensor([2.0**-149])
    assert compare_bitwise(tiny, -tiny).ulps == 2
    assert compare_bitwise(tiny, torch.zeros(1)).ulps == 1


def test_signed_zeros_differ() -> None:
    report = compare_bitwise(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert (report.mismatches, report.ulps, report.max_abs_diff) == (1, 0, 0.0)


def test_nan() -> None:
    nan = torch.tensor([float("nan")])
    assert_bitwise(nan, nan.clone())
    report = compare_bitwise(nan, torch.tensor([1.0]))
    assert report.mismatches == 1 and report.ulps is None and report.max_ulps is None
    assert math.isnan(report.max_abs_diff)
    other_payload = bits(0x7FC00001)
    assert compare_bitwise(nan, other_payload).mismatches == 1
    mixed = compare_bitwise(torch.tensor([float("nan"), 1.0]), torch.tensor([0.0, 1.0 + 2.0**-23]))
    assert (mixed.mismatches, mixed.ulps, mixed.max_ulps) == (2, None, 1)


def test_infinity_is_one_ulp_above_the_largest() -> None:
    largest = torch.tensor([torch.finfo(torch.float32).max])
    assert compare_bitwise(torch.tensor([float("inf")]), largest).ulps == 1


def test_opposite_signs_in_float64_saturate() -> None:
    report = compare_bitwise(torch.tensor([1e308], dtype=torch.float64), torch.tensor([-1e308], dtype=torch.float64))
    assert report.ulps == 2**63 - 1


@pytest.mark.parametrize("dtype", (torch.int64, torch.int32, torch.uint8, torch.bool))
def test_integers_and_booleans(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1, 0]).to(dtype)
    y = torch.tensor([0, 1, 0, 1]).to(dtype)
    report = compare_bitwise(x, y)
    assert (report.mismatches, report.first, report.ulps, report.max_abs_diff) == (2, (2,), None, 1.0)


def test_scalars_views_and_empty_tensors() -> None:
    report = compare_bitwise(torch.tensor(1.0), torch.tensor(2.0))
    assert (report.mismatches, report.first, report.ulps) == (1, (), 2**23)
    x = torch.randn(4, 6)
    assert_bitwise(x.t(), x.t().contiguous())
    assert_bitwise(x[:, ::2], x[:, ::2].clone())
    assert compare_bitwise(torch.empty(0, 3), torch.empty(0, 3)).mismatches == 0
    assert_bitwise(x.clone().requires_grad_(), x)


@pytest.mark.parametrize("other", (torch.zeros(3, 2), torch.zeros(6), torch.zeros(2, 3, dtype=torch.bfloat16)))
def test_shapes_and_dtypes_must_agree(other: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"both must have one shape and dtype"):
        compare_bitwise(torch.zeros(2, 3), other)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_any_two_patterns(a: int, b: int) -> None:
    x = torch.tensor([a], dtype=torch.int64).to(torch.int32).view(torch.float32)
    y = torch.tensor([b], dtype=torch.int64).to(torch.int32).view(torch.float32)
    forward, backward = compare_bitwise(x, y), compare_bitwise(y, x)
    assert forward.mismatches == backward.mismatches == int(a != b)
    assert forward.ulps == backward.ulps
    if forward.ulps == 1 and bool(torch.isfinite(x) & torch.isfinite(y)):
        assert bool((torch.nextafter(x, y) == y).all())
