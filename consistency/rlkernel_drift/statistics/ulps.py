"""Distances in units in the last place, by the bits of two arrays of one floating dtype."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from rlkernel_drift.capsule.tensor_file import Array, Tensor

_SIGNED = {2: np.int16, 4: np.int32, 8: np.int64}
_EDGES = [0, 1, 2, 3, 5, 9, 17, 65, 257, 1025, 65537, 1 << 24, 1 << 62]


class UlpHistogram(BaseModel):
    """Counts of distances.

    Attributes:
        equal: elements with the same bits.
        bins: label ("1", "2", "3-4", ...) -> count, ascending.
        maximum: largest distance; None where a NaN has none.
    """

    equal: int = 0
    bins: dict[str, int] = {}
    maximum: int | None = 0


def ulp_distance(a: Array, b: Array) -> NDArray[np.int64]:
    """|a - b| in units in the last place; +0 and -0 are one apart, NaN is far from everything but its own bits.

    Args:
        a, b: floating arrays of one dtype, or the bit patterns of bfloat16.
    """
    kind = _SIGNED[a.dtype.itemsize]
    x, y = _ordered(np.ascontiguousarray(a).view(kind)), _ordered(np.ascontiguousarray(b).view(kind))
    # Opposite signs of fp64 overflow the difference; halves of it do not.
    far = np.abs(x // 2 - y // 2) > (1 << 61)
    return np.where(far, np.iinfo(np.int64).max, np.abs(x - np.where(far, x, y)))


def _ordered(bits: Array) -> NDArray[np.int64]:
    """Sign and magnitude to integers in the order of the floats, -0 just below +0."""
    wide = bits.astype(np.int64)
    return np.where(wide >= 0, wide, -1 - (wide & int(np.iinfo(bits.dtype).max)))


def ulp_histogram(distance: NDArray[np.int64]) -> UlpHistogram:
    """Histogram with bins that double."""
    if not len(distance):
        return UlpHistogram()
    counts = np.histogram(distance, np.array(_EDGES, np.int64))[0]
    labels = [_label(low, high) for low, high in pairwise(_EDGES)]
    bins = {label: int(count) for label, count in zip(labels[1:], counts[1:], strict=True) if count}
    return UlpHistogram(equal=int(counts[0]), bins=bins, maximum=int(distance.max()))


def _label(low: int, high: int) -> str:
    if high == low + 1:
        return str(low)
    return f"{low}-{high - 1}" if high < 1 << 62 else f">={low}"


def tensor_ulps(a: Tensor, b: Tensor) -> NDArray[np.int64] | None:
    """Distances of two tensors of one shape and floating dtype; None where these differ."""
    if a.dtype != b.dtype or a.shape != b.shape or a.dtype not in ("F64", "F32", "F16", "BF16"):
        return None
    return ulp_distance(a.values, b.values)
