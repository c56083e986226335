"""A model, in integers on any CPU, of a Hopper tensor core: bf16 and fp16 products with fp32 accumulation.

One instruction step (mma.sync m16n8k16, or a k16 slice of wgmma) adds 17 terms at once: 16 exact products and the fp32
accumulator. The terms are aligned to the largest exponent among them, cut toward zero 25 bits below it, added exactly,
and the sum is cut toward zero to fp32. A product's exponent is the sum of its factors' exponents, not normalised.

Source: the bit models of MMA-Sim (arXiv 2511.10909) and of arXiv 2512.07004, which agree on these figures.
Control: `tests/gpu/test_linear_oracle.py` shows that the GPU's bits differ with 24 or 26 fraction bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

GROUP = 16
FRACTION_BITS = 25


def decompose(x: Floats) -> tuple[Ints, Ints]:
    """x as significand * 2^(exponent - 23), significand a signed integer below 2^24; zero and subnormals at -126."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.int64)
    field, fraction = bits >> 23 & 0xFF, bits & 0x7FFFFF
    if (field == 0xFF).any():
        raise ValueError("hopper_mma: the model covers finite numbers only; remove inf and NaN from the operands")
    magnitude = np.where(field == 0, fraction, fraction | 0x800000)
    return np.where(bits >> 31 == 1, -magnitude, magnitude), np.maximum(field, 1) - 127


def shift_toward_zero(value: Ints, right: Ints) -> Ints:
    """value * 2^-right, cut toward zero; 0 <= right, any size."""
    return np.sign(value) * (np.abs(value) >> np.minimum(right, 63))


def compose(total: Ints, unit: Ints) -> Floats:
    """total * 2^unit cut toward zero to fp32, gradual underflow included."""
    magnitude = np.abs(total)
    width = np.frexp(magnitude.astype(np.float64))[1].astype(np.int64)  # exact: sums of 17 terms stay below 2^53
    drop = np.maximum(np.maximum(width - 24, -149 - unit), 0)
    kept = shift_toward_zero(total, drop)
    return np.ldexp(kept.astype(np.float64), (unit + drop).astype(np.int32)).astype(np.float32)


def mma_k16(a: Floats, b: Floats, c: Floats, fraction_bits: int = FRACTION_BITS) -> Floats:
    """One step.

    Args:
        a, b: [M, 16] and [N, 16] fp32 arrays that hold bf16 or fp16 values.
        c: [M, N] fp32 accumulator.
        fraction_bits: bits kept below the largest exponent; 25 is Hopper's, other values serve as controls.
    """
    (sa, ea), (sb, eb), (sc, ec) = decompose(a), decompose(b), decompose(c)
    products = sa[:, None, :] * sb[None, :, :]  # units of 2^(exponent - 46)
    exponents = ea[:, None, :] + eb[None, :, :]
    top = np.maximum(exponents.max(-1), ec)  # [M, N]
    aligned = shift_toward_zero(products, 46 - fraction_bits + top[..., None] - exponents).sum(-1)
    widened = sc << 8  # units of 2^(exponent - 31), so that the shift below is always to the right
    aligned += shift_toward_zero(widened, 31 - fraction_bits + top - ec)
    return compose(aligned, top - fraction_bits)


def chain(x: Floats, w: Floats, start: Floats | None = None, fraction_bits: int = FRACTION_BITS) -> Floats:
    """start [M, N] + x [M, K] w [N, K]^T, k ascending in groups of 16; the last group is padded with zeros."""
    fill = -x.shape[1] % GROUP
    x, w = np.pad(x, ((0, 0), (0, fill))), np.pad(w, ((0, 0), (0, fill)))
    total = np.zeros((x.shape[0], w.shape[0]), np.float32) if start is None else start
    for k in range(0, x.shape[1], GROUP):
        total = mma_k16(x[:, k : k + GROUP], w[:, k : k + GROUP], total, fraction_bits)
    return total


def linear(x: Floats, w: Floats, chunks: int = 1, fraction_bits: int = FRACTION_BITS) -> Floats:
    """The contract's linear in fp32: K in `chunks` equal chains, added in a balanced binary tree, to nearest even."""
    span = x.shape[1] // chunks
    parts = [
        chain(x[:, k : k + span], w[:, k : k + span], fraction_bits=fraction_bits)
        for k in range(0, span * chunks, span)
    ]
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    return parts[0]
