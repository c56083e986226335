"""Shape classes of linear and its gradients on CUDA: their keys, warm dispatch, rows to compare, samples.

One class holds a bucket of row counts; which schedules compute it is cuda/linear.py's matter.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.contract.orders import DGRAD_WHOLE
from rlkernel.kernels.certification import First, Instead, Key, Run, Runs, values

# Close together where a decode step has its rows and the library fits its tiles to them.
BUCKETS = (0, 1, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 512, 1024, 2048, 4096, 8192, 16384)
SAMPLE_BYTES = 3 << 30  # limit on the largest matrix of a comparison, 8192 rows of a head; a call with more is cut


class Shape(NamedTuple):
    """Shape class of a call.

    `form` says which product it is: "forward" x [M,K] w^T, "dgrad" dy [M,N] w, "wgrad" dy^T x, where `rows` counts
    tokens and `weight` is the gradient's shape.
    """

    device: int  # index, -1 for the CPU
    rows: int  # bucket of M
    weight: torch.Size
    dtype: torch.dtype
    out_dtype: torch.dtype | None  # None: dtype
    bias: bool
    chunks: int
    dense: bool  # contiguous matrices; schedules ask for their addresses themselves
    form: str
    fresh: bool = True  # what the result held before does not count

    @property
    def n(self) -> int:
        return self.weight[0 if self.form == "forward" else 1]

    @property
    def k(self) -> int:
        """Length of the contraction, for "wgrad" at most."""
        return self.rows if self.form == "wgrad" else self.weight[1 if self.form == "forward" else 0]

    @property
    def out(self) -> torch.dtype:
        return self.out_dtype or self.dtype

    @property
    def is_head(self) -> bool:
        """An input gradient whose chunks are added ascending."""
        return self.form == "dgrad" and self.chunks == 1 and self.k > DGRAD_WHOLE


def bucket(m: int) -> int:
    """Bucket of a row count, one of `BUCKETS`; the last holds all above too."""
    return BUCKETS[min(bisect_left(BUCKETS, m), len(BUCKETS) - 1)]


def _dense(*operands: Tensor) -> bool:
    """Whether schedules may have them. An empty one: no, as a warm call tells weights apart by their elements."""
    return all(t.is_contiguous() and t.numel() for t in operands)


def linear_key(
    x: Tensor, weight: Tensor, bias: Tensor | None, chunks: int, dgrad_chunks: int, out_dtype: torch.dtype | None
) -> Key:
    return (
        x.get_device(), bucket(x.shape[0]), weight.shape, x.dtype, out_dtype, bias is not None, chunks,
        _dense(x, weight), "forward",
    )  # fmt: skip


def dgrad_key(dy: Tensor, weight: Tensor, chunks: int) -> Key:
    return (
        dy.get_device(), bucket(dy.shape[0]), weight.shape, dy.dtype, None, False, chunks, _dense(dy, weight),
        "dgrad",
    )  # fmt: skip


def wgrad_key(grad: Tensor, dy: Tensor, x: Tensor, fresh: bool) -> Key:
    return (
        dy.get_device(), bucket(dy.shape[0]), grad.shape, dy.dtype, grad.dtype, False, 1, _dense(grad, dy, x),
        "wgrad", fresh,
    )  # fmt: skip


# Dispatch of a warm call. Each attribute of a tensor costs a tenth of a microsecond: of the operands that share a
# dimension one gives its shape, the others their number of elements or nothing. Nobody is asked for an address here:
# a schedule has the addresses at hand, and at others than multiples of 16 bytes runs the anchor.


def linear_warm(runs: Runs, first: First, instead: Instead) -> Run:
    def linear(
        x: Tensor, weight: Tensor, bias: Tensor | None, chunks: int, dgrad_chunks: int, out_dtype: torch.dtype | None
    ) -> Tensor:
        call = (
            x.shape, weight.numel(), x.dtype, out_dtype, chunks, x.get_device(), bias is None,
            x.is_contiguous() and weight.is_contiguous(),
        )  # fmt: skip
        run = runs.get(call) or first(call, x, weight, bias, chunks, dgrad_chunks, out_dtype)
        try:
            return run(x, weight, bias, chunks, dgrad_chunks, out_dtype)
        except Exception as error:
            return instead(error, run, x, weight, bias, chunks, dgrad_chunks, out_dtype)

    return linear


def dgrad_warm(runs: Runs, first: First, instead: Instead) -> Run:
    def linear_dgrad(dy: Tensor, weight: Tensor, chunks: int) -> Tensor:
        call = (
            dy.shape, weight.numel(), dy.dtype, chunks, dy.get_device(),
            dy.is_contiguous() and weight.is_contiguous(),
        )  # fmt: skip
        run = runs.get(call) or first(call, dy, weight, chunks)
        try:
            return run(dy, weight, chunks)
        except Exception as error:
            return instead(error, run, dy, weight, chunks)

    return linear_dgrad


def wgrad_warm(runs: Runs, first: First, instead: Instead) -> Run:
    def linear_wgrad(grad: Tensor, dy: Tensor, x: Tensor, fresh: bool) -> None:
        call = (
            grad.shape, dy.numel(), dy.dtype, grad.dtype, fresh, dy.get_device(),
            grad.is_contiguous() and dy.is_contiguous() and x.is_contiguous(),
        )  # fmt: skip
        run = runs.get(call) or first(call, grad, dy, x, fresh)
        try:
            run(grad, dy, x, fresh)
        except Exception as error:
            instead(error, run, grad, dy, x, fresh)

    return linear_wgrad


def shape_of(key: Key) -> Shape:
    return Shape(*key)  # type: ignore[arg-type]


def describe(key: Key) -> dict[str, Any]:
    s = shape_of(key)
    name = lambda dtype: str(dtype).removeprefix("torch.")
    found = {
        "T" if s.form == "wgrad" else "M": s.rows, "N": s.weight[0], "K": s.weight[1], "dtype": name(s.dtype),
        "out": name(s.out), "bias": s.bias, "chunks": s.chunks, "dense": s.dense,
    }  # fmt: skip
    return {**found, "fresh": s.fresh} if s.form == "wgrad" else found


def _row_bytes(s: Shape) -> int:
    """Bytes of a row of the largest matrix of a call."""
    if s.form == "wgrad":
        return sum(s.weight) * s.dtype.itemsize
    partials = 4 * s.chunks * s.n if s.chunks > 1 else 0
    return max(s.k * s.dtype.itemsize, s.n * s.out.itemsize, partials)


def most_rows(s: Shape) -> int:
    """The most rows that a schedule is compared at, and therefore the most that it gets at once."""
    if s.form == "wgrad":  # one chain over the tokens of a chunk: nothing to cut
        return s.rows
    return min(s.rows, max(8, SAMPLE_BYTES // max(_row_bytes(s), 1) // 8 * 8))


def rows_of(key: Key) -> list[int]:
    """The lowest and the highest count that a schedule gets, and one between where that is no matter of gigabytes."""
    s = shape_of(key)
    high = most_rows(s)
    low = BUCKETS[max(BUCKETS.index(s.rows) - 1, 0)] + 1
    if high < s.rows or s.rows == BUCKETS[-1]:
        low = min(low, max(high // 2 - 7, 1))  # the fewest rows of a piece of a call that is cut
    between = {(low + high) // 2 | 1} if high * _row_bytes(s) <= SAMPLE_BYTES // 2 else set()
    return sorted({min(low, high), high} | {m for m in between if m < high})


def cut(m: int, most: int) -> list[slice]:
    """m rows in as few even pieces of at most `most` rows as there can be; but for the end in units of eight, so that
    every piece begins at a 16-byte address. `most` is a multiple of eight."""
    units = -(-m // 8)
    pieces = -(-units // (most // 8))
    at = [min(m, units * i // pieces * 8) for i in range(pieces + 1)]
    return [slice(first, last) for first, last in pairwise(at)]


def linear_sample(key: Key, m: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    s = shape_of(key)
    x = values(kind, m, s.k, s.dtype, generator)
    weight = values(kind, s.n, s.k, s.dtype, generator, second=True)
    bias = values("normal", 1, s.n, s.dtype, generator)[0] if s.bias else None
    return x, weight, bias, s.chunks, 1, s.out_dtype


def dgrad_sample(key: Key, m: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    s = shape_of(key)
    dy = values(kind, m, s.k, s.dtype, generator)
    return dy, values(kind, s.n, s.k, s.dtype, generator, second=True).t().contiguous(), s.chunks


def wgrad_sample(key: Key, tokens: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    s = shape_of(key)
    n, k = s.weight
    dy = values(kind, n, tokens, s.dtype, generator).t().contiguous()
    x = values(kind, k, tokens, s.dtype, generator, second=True).t().contiguous()
    if s.fresh:  # what the buffer held must not count
        return torch.full((n, k), float("nan"), dtype=s.out, device=generator.device), dy, x, True
    return values("normal", n, k, s.out, generator), dy, x, False
