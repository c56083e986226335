"""Arithmetic of the CPU contract in torch: fma, exp2, log2 and the fixed row sum, all in fp32.

Each function has the operations of its namesake in `csrc/cpu/common.h`, so the references and the C++ kernels have the
same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.contract.orders import LANES

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453

# Taylor coefficients ln(2)^i / i! of 2^f on |f| <= 1/2, with a truncation error below 1e-8.
EXP2_COEFFICIENTS = (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)
# log2(1 + r) = r * poly(r) on sqrt(1/2) <= 1 + r < sqrt(2): degree 9, fitted at Chebyshev nodes, error below 2^-25.
LOG2_COEFFICIENTS = (
    -0.11020159721374512,
    0.18631209433078766,
    -0.19102497398853302,
    0.2045752853155136,
    -0.23961904644966125,
    0.2885688841342926,
    -0.3606966435909271,
    0.4808982014656067,
    -0.7213473320007324,
    1.4426950216293335,
)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """round(a * b + c) with one rounding, fp32; shapes broadcast.

    The product is exact in fp64. The fp64 sum is rounded to odd, so that rounding it again to fp32 is exact.
    """
    product = a.double() * b.double()
    c64 = c.double()
    total = product + c64
    # TwoSum (Knuth): the exact error of the fp64 addition.
    virtual = total - product
    error = (product - (total - virtual)) + (c64 - virtual)
    bits = total.view(torch.int64)
    even = (bits & 1) == 0
    inexact = (error != 0) & torch.isfinite(total)
    toward = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(inexact & even, bits + toward, bits).view(torch.float64).float()


def sqrt(x: Tensor) -> Tensor:
    """Correctly rounded square root of fp32 numbers.

    torch.sqrt in fp32 may call a vector library that is off by one ulp (measured on 19% of random inputs). An error of
    one fp64 ulp is harmless, because the root of an fp32 number is at least 2^-51 (relative) from a rounding boundary.
    """
    return torch.sqrt(x.double()).float()


def horner(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """Polynomial in x by a chain of fma, highest coefficient first."""
    total = torch.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        total = fma(total, x, torch.full_like(x, c))
    return total


def exp2(x: Tensor) -> Tensor:
    """2^x in fp32; results below 2^-126 are +0, results above the range inf, NaN gives NaN."""
    clamped = torch.clamp(torch.nan_to_num(x, nan=0.0), -127.0, 128.0)
    whole = torch.round(clamped)
    fraction = clamped - whole
    # two exact scaling steps, because 2^128 is not an fp32 number
    half = torch.ldexp(horner(EXP2_COEFFICIENTS, fraction), torch.clamp(whole, -126.0, 127.0))
    out = torch.where(whole > 127.0, half * 2.0, half)
    out = torch.where(x < -126.0, torch.zeros_like(out), out)
    out = torch.where(x >= 128.0, torch.full_like(out, float("inf")), out)
    return torch.where(torch.isnan(x), x, out)


def exp(x: Tensor) -> Tensor:
    """e^x as exp2(x * log2(e)), the product rounded to fp32."""
    return exp2(x * torch.tensor(LOG2E, dtype=torch.float32))


def log2_parts(r: Tensor, exponent: Tensor) -> Tensor:
    """exponent + log2(1 + r) for 1 + r in [sqrt(1/2), sqrt(2))."""
    return fma(r, horner(LOG2_COEFFICIENTS, r), exponent)


def log2_exponent(x: Tensor) -> Tensor:
    """Exponent (int32) of positive normal fp32 numbers such that the mantissa lies in [sqrt(1/2), sqrt(2))."""
    return (x.contiguous().view(torch.int32) - 0x3F3504F3) >> 23


def log2(x: Tensor) -> Tensor:
    """log2 of positive normal fp32 numbers; +0 gives -inf, inf gives inf, NaN gives NaN."""
    exponent = log2_exponent(x)
    r = (x.contiguous().view(torch.int32) - (exponent << 23)).view(torch.float32) - 1.0
    out = log2_parts(r, exponent.float())
    out = torch.where(x == 0, torch.full_like(out, float("-inf")), out)
    return torch.where(torch.isposinf(x) | torch.isnan(x), x, out)


def log(x: Tensor) -> Tensor:
    """Natural logarithm as log2(x) * ln(2)."""
    return log2(x) * torch.tensor(LN2, dtype=torch.float32)


def lane_fold(lanes: Tensor) -> Tensor:
    """Folds the last dimension of LANES partial sums in halves: 8, 4, 2, 1."""
    width = LANES
    while width > 1:
        width //= 2
        lanes = lanes[..., :width] + lanes[..., width : 2 * width]
    return lanes[..., 0]


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension in the CPU order: lane j adds j, j + LANES, ...; lanes are folded in halves."""
    x = _pad_lanes(x)
    lanes = torch.zeros(*x.shape[:-1], LANES, dtype=torch.float32)
    for start in range(0, x.shape[-1], LANES):
        lanes = lanes + x[..., start : start + LANES]
    return lane_fold(lanes)


def row_dot(x: Tensor, y: Tensor) -> Tensor:
    """Sum of x * y over the last dimension: `row_sum`, with a chain of fma in each lane."""
    x, y = _pad_lanes(x), _pad_lanes(y)
    lanes = torch.zeros(*x.shape[:-1], LANES, dtype=torch.float32)
    for start in range(0, x.shape[-1], LANES):
        lanes = fma(x[..., start : start + LANES], y[..., start : start + LANES], lanes)
    return lane_fold(lanes)


def _pad_lanes(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % LANES))
