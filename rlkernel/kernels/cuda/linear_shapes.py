"""Shape classes, row counts and samples for the certification of linear and its gradients on CUDA.

A class holds one bucket of row counts. The schedules are in cuda/linear.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.contract.orders import DGRAD_WHOLE
from rlkernel.kernels.samples import values

# Fine-grained at the row counts of decode steps, to which cuBLASLt fits its tiles.
BUCKETS = (0, 1, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 512, 1024, 2048, 4096, 8192, 16384)
SAMPLE_BYTES = 3 << 30  # limit on a sample's largest matrix (8192 rows of a head); larger calls run in pieces


class LinearShape(NamedTuple):
    """Shape class of a call.

    `form` is the product: "forward" x [M, K] w^T, "dgrad" dy [M, N] w, or "wgrad" dy^T x. For "wgrad", `rows` is a
    number of tokens and `weight` the gradient's shape.
    """

    device: int  # index, -1 for the CPU
    rows: int  # bucket of M
    weight: torch.Size
    dtype: torch.dtype
    out_dtype: torch.dtype | None  # None: dtype
    bias: bool
    chunks: int
    contiguous: bool  # contiguous and not empty; schedules check addresses themselves
    form: str
    fresh: bool = True  # the result is overwritten, not added to

    @property
    def n(self) -> int:
        return self.weight[0 if self.form == "forward" else 1]

    @property
    def k(self) -> int:
        """Length of the contraction; for "wgrad" an upper bound."""
        return self.rows if self.form == "wgrad" else self.weight[1 if self.form == "forward" else 0]

    @property
    def out(self) -> torch.dtype:
        return self.out_dtype or self.dtype

    @property
    def is_head(self) -> bool:
        """Whether this is an input gradient whose chunks are added in ascending order."""
        return self.form == "dgrad" and self.chunks == 1 and self.k > DGRAD_WHOLE

    def describe(self) -> dict[str, Any]:
        name = lambda dtype: str(dtype).removeprefix("torch.")
        found = {
            "T" if self.form == "wgrad" else "M": self.rows, "N": self.weight[0], "K": self.weight[1],
            "dtype": name(self.dtype), "out": name(self.out), "bias": self.bias, "chunks": self.chunks,
            "contiguous": self.contiguous,
        }  # fmt: skip
        return {**found, "fresh": self.fresh} if self.form == "wgrad" else found


def bucket(m: int) -> int:
    """Bucket of a row count, one of `BUCKETS`; the last has no upper bound."""
    return BUCKETS[min(bisect_left(BUCKETS, m), len(BUCKETS) - 1)]


def _contiguous(*operands: Tensor) -> bool:
    """Whether all operands are contiguous and not empty, as schedules need. Empty weights of different shapes would
    have the same call key."""
    return all(t.is_contiguous() and t.numel() for t in operands)


def linear_shape(
    x: Tensor, weight: Tensor, bias: Tensor | None, chunks: int, dgrad_chunks: int, out_dtype: torch.dtype | None
) -> LinearShape:
    contiguous, rows = _contiguous(x, weight), bucket(x.shape[0])
    return LinearShape(
        x.get_device(), rows, weight.shape, x.dtype, out_dtype, bias is not None, chunks, contiguous, "forward"
    )


def dgrad_shape(dy: Tensor, weight: Tensor, chunks: int) -> LinearShape:
    contiguous = _contiguous(dy, weight)
    return LinearShape(
        dy.get_device(), bucket(dy.shape[0]), weight.shape, dy.dtype, None, False, chunks, contiguous, "dgrad"
    )


def wgrad_shape(grad: Tensor, dy: Tensor, x: Tensor, fresh: bool) -> LinearShape:
    contiguous = _contiguous(grad, dy, x)
    rows = bucket(dy.shape[0])
    return LinearShape(dy.get_device(), rows, grad.shape, dy.dtype, grad.dtype, False, 1, contiguous, "wgrad", fresh)


# Call keys. Reading an attribute of a tensor costs 0.1 us, so one operand adds its shape, and those that share a
# dimension with it add only numel or nothing. Alignment is not part of the key: a schedule checks it and falls back to
# the anchor for pointers that are not 16-byte aligned.


def linear_call(
    x: Tensor, weight: Tensor, bias: Tensor | None, chunks: int, dgrad_chunks: int, out_dtype: torch.dtype | None
) -> Hashable:
    return (
        x.shape, weight.numel(), x.dtype, out_dtype, chunks, x.get_device(), bias is None,
        x.is_contiguous() and weight.is_contiguous(),
    )  # fmt: skip


def dgrad_call(dy: Tensor, weight: Tensor, chunks: int) -> Hashable:
    return (
        dy.shape, weight.numel(), dy.dtype, chunks, dy.get_device(), dy.is_contiguous() and weight.is_contiguous()
    )  # fmt: skip


def wgrad_call(grad: Tensor, dy: Tensor, x: Tensor, fresh: bool) -> Hashable:
    return (
        grad.shape, dy.numel(), dy.dtype, grad.dtype, fresh, dy.get_device(),
        grad.is_contiguous() and dy.is_contiguous() and x.is_contiguous(),
    )  # fmt: skip


def _row_bytes(s: LinearShape) -> int:
    """Bytes per row of a call's largest matrix."""
    if s.form == "wgrad":
        return sum(s.weight) * s.dtype.itemsize
    partials = 4 * s.chunks * s.n if s.chunks > 1 else 0
    return max(s.k * s.dtype.itemsize, s.n * s.out.itemsize, partials)


def max_rows(s: LinearShape) -> int:
    """The most rows of a comparison, and therefore of one launch."""
    if s.form == "wgrad":  # the chain over the tokens of a chunk cannot be cut
        return s.rows
    return min(s.rows, max(8, SAMPLE_BYTES // max(_row_bytes(s), 1) // 8 * 8))


def rows_of(s: LinearShape) -> list[int]:
    """The smallest and largest row count of a launch, and one in between unless it takes gigabytes."""
    high = max_rows(s)
    low = BUCKETS[max(BUCKETS.index(s.rows) - 1, 0)] + 1
    if high < s.rows or s.rows == BUCKETS[-1]:
        low = min(low, max(high // 2 - 7, 1))  # the smallest piece of a call that is cut
    between = {(low + high) // 2 | 1} if high * _row_bytes(s) <= SAMPLE_BYTES // 2 else set()
    return sorted({min(low, high), high} | {m for m in between if m < high})


def cut(m: int, most: int) -> list[slice]:
    """Slices of m rows, as few and even as possible with at most `most` (a multiple of 8) rows each. All except the
    last have a multiple of 8 rows, so that every piece starts at a 16-byte address."""
    units = -(-m // 8)
    pieces = -(-units // (most // 8))
    at = [min(m, units * i // pieces * 8) for i in range(pieces + 1)]
    return [slice(first, last) for first, last in pairwise(at)]


def linear_sample(s: LinearShape, m: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    x = values(kind, m, s.k, s.dtype, generator)
    weight = values(kind, s.n, s.k, s.dtype, generator, second=True)
    bias = values("normal", 1, s.n, s.dtype, generator)[0] if s.bias else None
    return x, weight, bias, s.chunks, 1, s.out_dtype


def dgrad_sample(s: LinearShape, m: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    dy = values(kind, m, s.k, s.dtype, generator)
    return dy, values(kind, s.n, s.k, s.dtype, generator, second=True).t().contiguous(), s.chunks


def wgrad_sample(s: LinearShape, tokens: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    n, k = s.weight
    dy = values(kind, n, tokens, s.dtype, generator).t().contiguous()
    x = values(kind, k, tokens, s.dtype, generator, second=True).t().contiguous()
    if s.fresh:  # the buffer's old content must not matter
        return torch.full((n, k), float("nan"), dtype=s.out, device=generator.device), dy, x, True
    return values("normal", n, k, s.out, generator), dy, x, False
