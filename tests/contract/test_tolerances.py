"""The tolerance table and the accuracy rule: at most twice the error of plain torch, plus a grain."""

from __future__ import annotations

import pytest
import torch

from rlkernel.contract import TOLERANCES, assert_accurate

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_the_table_has_a_row_per_dtype() -> None:
    assert set(TOLERANCES) == set(DTYPES)
    for dtype, row in TOLERANCES.items():
        eps = torch.finfo(dtype).eps
        assert row.factor == 2.0
        assert 0.4 * eps <= row.grain <= 8 * eps, "the grain is a few ulps of the dtype"
        assert row.grain < row.grain_cross < 200 * eps


@pytest.mark.parametrize("dtype", DTYPES)
def test_limit_is_factor_times_baseline_plus_grain(dtype: torch.dtype) -> None:
    row = TOLERANCES[dtype]
    reference = torch.tensor([1.0, -4.0], dtype=torch.float64)
    baseline = reference + torch.tensor([0.0, 0.125], dtype=torch.float64)
    limit = row.factor * 0.125 + row.grain * 4.0
    out = reference.clone()
    out[0] += 0.99 * limit
    assert_accurate(out, reference, baseline, dtype=dtype)
    out[0] = reference[0] + 1.01 * limit
    with pytest.raises(AssertionError, match=r"logits: error .* exceeds .* \(largest value 4\)"):
        assert_accurate(out, reference, baseline, "logits", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_baseline_the_cross_grain_counts(dtype: torch.dtype) -> None:
    row = TOLERANCES[dtype]
    reference = torch.full((3,), 8.0, dtype=torch.float64)
    assert_accurate(reference + 0.99 * 8 * row.grain_cross, reference, None, dtype=dtype)
    with pytest.raises(AssertionError):
        assert_accurate(reference + 1.01 * 8 * row.grain_cross, reference, None, dtype=dtype)


def test_default_row_is_that_of_the_output() -> None:
    reference = torch.ones(4)
    off = 2.0**-7
    assert_accurate((reference + off).bfloat16(), reference, reference + off / 2)
    with pytest.raises(AssertionError):
        assert_accurate(reference + off, reference, reference + off / 4)


@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf"), 1e30))
def test_non_finite_elements_must_agree(value: float) -> None:
    for expected in (float("nan"), float("inf"), -float("inf")):
        out, reference = torch.tensor([1.0, value]), torch.tensor([1.0, expected])
        if str(value) == str(expected):
            assert_accurate(out, reference, None)
        else:
            with pytest.raises(AssertionError, match="non-finite elements differ"):
                assert_accurate(out, reference, None)
    with pytest.raises(AssertionError):
        assert_accurate(torch.tensor([1.0, value]), torch.ones(2), None)


def test_a_nan_baseline_allows_nothing() -> None:
    with pytest.raises(AssertionError):
        assert_accurate(torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor([float("nan")]))


def test_shapes_must_agree_and_all_infinite_is_fine() -> None:
    with pytest.raises(AssertionError, match=r"shape \(2,\), expected \(2, 1\)"):
        assert_accurate(torch.ones(2), torch.ones(2, 1), None)
    lowest = torch.full((3,), -float("inf"))
    assert_accurate(lowest, lowest.clone(), None)
    assert_accurate(torch.empty(0), torch.empty(0), None)
