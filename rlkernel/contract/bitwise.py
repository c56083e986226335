"""Comparison of tensors by their bytes, which reports coordinates, values and the distance in ulps.

Tests, the trainer and certification use the same comparison, so that all failures have the same form: number of
elements, coordinate of the first one, both values, distance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_INT_VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class MismatchError(RuntimeError):
    """A sampled token's log-probability differs between rollout and training forward; raised before the update."""


@dataclass(frozen=True)
class BitwiseReport:
    """Result of comparing two tensors of one shape and dtype by their bytes.

    Attributes:
        mismatches: number of elements whose bytes differ.
        elements: number of elements compared.
        first: coordinate of the first differing element in row-major order, or None.
        actual, expected: the two values at `first` as Python numbers, or None.
        ulps: their distance in units in the last place; None for non-floating dtypes and NaN.
        max_ulps: the largest such distance over all differing elements, or None.
        max_abs_diff: the largest absolute difference in fp64, NaN if either side is NaN.
    """

    mismatches: int
    elements: int
    first: tuple[int, ...] | None = None
    actual: float | int | None = None
    expected: float | int | None = None
    ulps: int | None = None
    max_ulps: int | None = None
    max_abs_diff: float = 0.0

    def __str__(self) -> str:
        if self.mismatches == 0:
            return f"0 of {self.elements} elements differ"
        return (
            f"{self.mismatches} of {self.elements} elements differ; first at {self.first}: "
            f"actual {self.actual!r}, expected {self.expected!r}, {self.ulps} ulps apart "
            f"(largest {self.max_ulps} ulps, {self.max_abs_diff:.3g} absolute)"
        )


def bits(t: Tensor) -> Tensor:
    """The bytes of a contiguous tensor as integers of its element size."""
    return t.view(_INT_VIEW[t.element_size()])


def _ordered(signed: Tensor) -> Tensor:
    """Maps the sign-magnitude bits of floats to integers in the order of the floats."""
    wide = signed.to(torch.int64)
    lowest = torch.iinfo(signed.dtype).min
    return torch.where(wide >= 0, wide, lowest - wide)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """|a - b| in int64, clamped to the largest int64 where fp64 numbers of opposite signs overflow."""
    difference = a - b
    wrapped = ((a < 0) != (b < 0)) & ((difference < 0) != (a < 0))
    return torch.where(wrapped, torch.iinfo(torch.int64).max, difference.abs())


def compare_bitwise(actual: Tensor, expected: Tensor) -> BitwiseReport:
    """Compares two tensors by their bytes; +0 and -0 differ, NaNs with the same payload are equal.

    Args:
        actual, expected: tensors of one shape and dtype, on any devices.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise ValueError(
            f"compare_bitwise: actual is {tuple(actual.shape)} {actual.dtype}, expected is "
            f"{tuple(expected.shape)} {expected.dtype}; both must have one shape and dtype"
        )
    a = actual.detach().contiguous().cpu()
    b = expected.detach().contiguous().cpu()
    if a.dtype == torch.bool:
        a, b = a.to(torch.uint8), b.to(torch.uint8)
    bits_a, bits_b = bits(a), bits(b)
    differs = (bits_a != bits_b).reshape(-1)
    count = int(differs.sum())
    if count == 0:
        return BitwiseReport(0, a.numel())
    index = int(differs.to(torch.uint8).argmax())
    first = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), a.shape)) if a.dim() else ()
    x, y = a.reshape(-1)[index].item(), b.reshape(-1)[index].item()
    ulps = max_ulps = None
    gap = (a.reshape(-1)[differs].double() - b.reshape(-1)[differs].double()).abs()
    if a.is_floating_point():
        distance = _distance(_ordered(bits_a), _ordered(bits_b)).reshape(-1)
        finite = ~(torch.isnan(a) | torch.isnan(b)).reshape(-1)
        ulps = int(distance[index]) if bool(finite[index]) else None
        max_ulps = int(distance[finite & differs].max()) if bool((finite & differs).any()) else None
    return BitwiseReport(count, a.numel(), first, x, y, ulps, max_ulps, float(gap.max()))


def assert_bitwise(actual: Tensor, expected: Tensor, what: str = "tensors") -> None:
    """Raises AssertionError unless both tensors have the same bytes.

    Args:
        actual, expected: tensors of one shape and dtype.
        what: name of the compared tensors, printed first in the error.
    """
    report = compare_bitwise(actual, expected)
    if report.mismatches:
        raise AssertionError(f"{what}: {report}")
