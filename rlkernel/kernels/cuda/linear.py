"""linear and its gradients on CUDA: cuBLASLt without split-K, further Triton tiles, a kernel for few rows; where equal.

The anchor is kernels/triton/linear.py. One cuBLASLt algorithm serves a whole bucket of row counts: what was certified
is what runs. Sums over chunks are the anchor's own folds, or the product's beta = 1, chunk after chunk.
"""

from __future__ import annotations

import ctypes
import functools
from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.contract.orders import DGRAD_CHUNK, DGRAD_WHOLE, WGRAD_TOKENS
from rlkernel.kernels import build
from rlkernel.kernels.certification import Family, First, Instead, Key, Run, Runs, Schedule, Warm, values
from rlkernel.kernels.cuda import driver, linear_rows
from rlkernel.kernels.errors import BuildError, LaunchError
from rlkernel.kernels.schedule import ScheduledOp
from rlkernel.kernels.triton import common, linear_grad, matrix
from rlkernel.kernels.triton import linear as anchor
from rlkernel.kernels.triton.matrix import Tile

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
RANKS = 4  # answers of cuBLASLt's heuristic that compete
MOST_WORKSPACE = 32 << 20
# Close together where a decode step has its rows and the library fits its tiles to them.
BUCKETS = (0, 1, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 512, 1024, 2048, 4096, 8192, 16384)
SAMPLE_BYTES = 3 << 30  # limit on the largest matrix of a comparison, 8192 rows of a head; a call with more is cut
SPLIT_ROWS = 512  # most rows at which a head's input gradient keeps one fp32 partial sum a chunk
ANY = 1 << 40


class Offer(NamedTuple):
    """A Triton tile for products of least..most rows and a width n of narrow..wide; a tile may have several."""

    least: int
    most: int
    narrow: int
    wide: int
    tile: Tile


# One chain over K leaves few programs where n is small: narrow tiles with long blocks of K, and as many bytes under way
# as shared memory holds. Above 64 rows a program reads as much of x as of the weight, and what an SM can take in is the
# limit: about 128 programs (4224 and 8448 are 132 times 32 and 64), of such tiles the squarest.
OFFERS = (
    Offer(1, 16, 1, 2048, Tile(16, 16, 512, 1, 4)),
    Offer(1, 16, 1, 2048, Tile(16, 8, 512, 1, 5)),
    Offer(1, 16, 1, 2048, Tile(16, 16, 256, 4, 7, tma=False)),
    Offer(1, 16, 2049, ANY, Tile(16, 32, 128, 4, 12, tma=False)),
    Offer(1, 16, 2049, ANY, Tile(16, 32, 256, 4, 5)),
    Offer(1, 16, 2049, ANY, Tile(16, 64, 256, 4, 5)),
    Offer(1, 16, 2049, ANY, Tile(16, 64, 128, 4, 5)),
    Offer(17, 128, 1, 2048, Tile(64, 16, 256, 4, 5)),
    Offer(17, 64, 2049, ANY, Tile(64, 32, 128, 4, 9)),
    Offer(65, 256, 1, 2048, Tile(64, 32, 128, 4, 9)),
    Offer(17, 64, 2049, ANY, Tile(64, 64, 128, 4, 7)),
    Offer(65, 128, 2049, 4224, Tile(64, 64, 128, 4, 7)),
    Offer(65, 128, 2049, 4224, Tile(128, 32, 128, 8, 5)),
    Offer(65, 128, 2049, 4224, Tile(128, 32, 64, 8, 11)),
    Offer(65, 128, 4225, 8448, Tile(128, 64, 64, 8, 9)),
    Offer(129, 192, 2049, 4224, Tile(128, 64, 64, 8, 9)),
    Offer(65, 256, 2049, ANY, Tile(64, 128, 64, 4, 9)),
)
# The input gradient of a head: every program one chunk of a tile, above SPLIT_ROWS all of them.
HEAD_OFFERS = (
    Offer(1, 16, 1, ANY, Tile(16, 64, 256, 4, 3)),
    Offer(1, 16, 1, ANY, Tile(16, 64, 128, 4, 6)),
    Offer(17, 64, 1, ANY, Tile(64, 64, 64, 4, 7)),
    Offer(65, ANY, 1, ANY, Tile(128, 128, 64, 8, 6)),
)


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


def _contiguous(*operands: Tensor) -> bool:
    return all(t.is_contiguous() for t in operands)


def _linear_key(
    x: Tensor, weight: Tensor, bias: Tensor | None, chunks: int, dgrad_chunks: int, out_dtype: torch.dtype | None
) -> Key:
    return (
        x.get_device(), bucket(x.shape[0]), weight.shape, x.dtype, out_dtype, bias is not None, chunks,
        _contiguous(x, weight), "forward",
    )  # fmt: skip


def _dgrad_key(dy: Tensor, weight: Tensor, chunks: int) -> Key:
    return (
        dy.get_device(), bucket(dy.shape[0]), weight.shape, dy.dtype, None, False, chunks, _contiguous(dy, weight),
        "dgrad",
    )  # fmt: skip


def _wgrad_key(grad: Tensor, dy: Tensor, x: Tensor, fresh: bool) -> Key:
    return (
        dy.get_device(), bucket(dy.shape[0]), grad.shape, dy.dtype, grad.dtype, False, 1, _contiguous(grad, dy, x),
        "wgrad", fresh,
    )  # fmt: skip


# Dispatch of a warm call. Each attribute of a tensor costs a tenth of a microsecond: of the operands that share a
# dimension one gives its shape, the others their number of elements or nothing. Nobody is asked for an address here:
# a schedule has the addresses at hand, and at others than multiples of 16 bytes runs the anchor.


def _linear_warm(runs: Runs, first: First, instead: Instead) -> Run:
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


def _dgrad_warm(runs: Runs, first: First, instead: Instead) -> Run:
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


def _wgrad_warm(runs: Runs, first: First, instead: Instead) -> Run:
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


def _shape(key: Key) -> Shape:
    return Shape(*key)  # type: ignore[arg-type]


def _describe(key: Key) -> dict[str, Any]:
    s = _shape(key)
    name = lambda dtype: str(dtype).removeprefix("torch.")
    found = {
        "T" if s.form == "wgrad" else "M": s.rows, "N": s.weight[0], "K": s.weight[1], "dtype": name(s.dtype),
        "out": name(s.out), "bias": s.bias, "chunks": s.chunks, "dense": s.dense,
    }  # fmt: skip
    return {**found, "fresh": s.fresh} if s.form == "wgrad" else found


def _device(key: Key) -> torch.device:
    index = _shape(key).device
    return torch.device("cpu") if index < 0 else torch.device("cuda", index)


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


def _rows(key: Key) -> list[int]:
    """The lowest and the highest count that a schedule gets, and one between where that is no matter of gigabytes."""
    s = _shape(key)
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


def _in_pieces(s: Shape, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`run` (a, weight, bias where there is one, out) for calls of any number of rows: above `most_rows` in pieces.
    Rows are independent, so no bit changes by it."""
    most = most_rows(s)
    if s.rows <= most and s.rows < BUCKETS[-1]:
        return run

    def pieces(a: Tensor, weight: Tensor, *bias: Tensor | None) -> Tensor:
        m = a.shape[0]
        if m <= most:
            return run(a, weight, *bias)
        out = torch.empty((m, s.n), dtype=s.out, device=a.device)
        for rows in cut(m, most):
            run(a[rows], weight, *bias, out=out[rows])
        return out

    return pieces


def _placed(bias: Tensor) -> Tensor:
    """Contiguous at a 16-byte address, as it was compared. Dispatch does not ask: here the address is at hand."""
    good = not bias.data_ptr() & 15 and bias.is_contiguous()
    return bias if good else bias.clone(memory_format=torch.contiguous_format)


def _linear_sample(key: Key, m: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    s = _shape(key)
    x = values(kind, m, s.k, s.dtype, generator)
    weight = values(kind, s.n, s.k, s.dtype, generator, second=True)
    bias = values("normal", 1, s.n, s.dtype, generator)[0] if s.bias else None
    return x, weight, bias, s.chunks, 1, s.out_dtype


def _dgrad_sample(key: Key, m: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    s = _shape(key)
    dy = values(kind, m, s.k, s.dtype, generator)
    return dy, values(kind, s.n, s.k, s.dtype, generator, second=True).t().contiguous(), s.chunks


def _wgrad_sample(key: Key, tokens: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    s = _shape(key)
    n, k = s.weight
    dy = values(kind, n, tokens, s.dtype, generator).t().contiguous()
    x = values(kind, k, tokens, s.dtype, generator, second=True).t().contiguous()
    if s.fresh:  # what the buffer held must not count
        return torch.full((n, k), float("nan"), dtype=s.out, device=generator.device), dy, x, True
    return values("normal", n, k, s.out, generator), dy, x, False


# ---- cuBLASLt ------------------------------------------------------------------------------------

_P, _L, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


@functools.cache
def _function(name: str, result: Any, *arguments: Any) -> Any:
    fn = getattr(build.cublaslt_library(), name)
    fn.argtypes, fn.restype = arguments, result
    return fn


def _error() -> str:
    return str(_function("rlk_lt_error", ctypes.c_char_p)().decode())


@functools.cache  # a failed build is not run again for every shape class
def unavailable() -> str | None:
    """Why cuBLASLt cannot be called from this process, or None."""
    try:
        build.cublaslt_library()
    except (build.BuildError, OSError) as error:
        return str(error).splitlines()[0]
    return None


def versions() -> dict[str, str]:
    """Versions of the cuBLASLt that torch has loaded and of the CUDA compiler."""
    library = {} if unavailable() else {"cublaslt": str(_function("rlk_lt_version", _L)())}
    return {**library, "cuda compiler": driver.compiler()}


class Plan(NamedTuple):
    """One algorithm of cuBLASLt for a shape class: the C handle, its workspace in bytes, and which it is."""

    handle: int
    workspace: int
    algorithm: str


@functools.cache
def plan(
    device: int, m: int, n: int, k: int, batch: int, a_row: int, b_row: int, a_by_k: bool, b_by_n: bool,
    dtype: torch.dtype, out: torch.dtype, bias: bool, rank: int,
) -> Plan:  # fmt: skip
    """The algorithm that cuBLASLt's heuristic ranks `rank`-th, split-K excluded, for out [batch, m, n] on a device.

    Args:
        k: length of each of the `batch` consecutive pieces of the contraction.
        a_row, b_row: elements from one stored row of an operand to the next.
        a_by_k: a is stored [K, m], else [m, K].
        b_by_n: b is stored [n, K], else [K, n].

    Raises:
        RuntimeError: cuBLASLt has no such algorithm; the message ends with its status.
        BuildError: cuBLASLt cannot be called from this process.
    """
    if (reason := unavailable()) is not None:
        raise BuildError(reason)
    make = _function("rlk_lt_plan", _P, _I, _L, _L, _L, _L, _L, _L, _I, _I, _I, _I, _I, _I, _L)
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # the device's context exists from here on
        handle = make(
            device, m, n, k, batch, a_row, b_row, a_by_k, b_by_n, DTYPE_CODES[dtype], DTYPE_CODES[out], bias, rank,
            MOST_WORKSPACE,
        )  # fmt: skip
    if not handle:
        raise RuntimeError(f"cuBLASLt, [{m}, {k}] x [{k}, {n}], batch {batch}, {dtype} to {out}: {_error()}")
    text = _function("rlk_lt_describe", ctypes.c_char_p, _P)(handle).decode()
    return Plan(handle, _function("rlk_lt_workspace", _L, _P)(handle), text)


def launcher(device: int, chosen: Plan) -> Callable[..., None]:
    """(m, k, a, b, bias, add, out) -> None on the current stream; a and b are addresses."""
    launch = _function("rlk_lt_run", _I, _P, _L, _L, _P, _P, _P, _I, _P, _P, _L, _P)
    stream_of = torch._C._cuda_getCurrentRawStream
    handle, bytes_ = chosen.handle, chosen.workspace

    def run(m: int, k: int, a: int, b: int, bias: int | None, add: bool, out: Tensor) -> None:
        # From the allocator, call by call: calls on two streams, or in two graphs, never share it.
        space = torch.empty(bytes_, dtype=torch.uint8, device=out.device) if bytes_ else None
        status = launch(
            handle, m, k, a, b, bias, add, out.data_ptr(), None if space is None else space.data_ptr(), bytes_,
            stream_of(device),
        )  # fmt: skip
        if status:
            raise LaunchError(f"cuBLASLt ({chosen.algorithm}) failed at m = {m}, k = {k}: {_error()}")

    return run


def _product(s: Shape, rank: int) -> tuple[Callable[..., Tensor], str]:
    """(a, weight, bias) -> out of a forward or an input gradient through one algorithm, and which it is."""
    split = s.chunks > 1
    in_epilogue = s.bias and not split
    partial = torch.float32 if split else s.out
    span, b_by_n = s.k // s.chunks, s.form == "forward"
    chosen = plan(
        s.device, most_rows(s), s.n, span, s.chunks, s.k, s.weight[1], False, b_by_n, s.dtype, partial, in_epilogue,
        rank,
    )  # fmt: skip
    launch, n, out_dtype = launcher(s.device, chosen), s.n, s.out

    def run(a: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        m, a_at, weight_at = a.shape[0], a.data_ptr(), weight.data_ptr()
        with common.on_device(a):
            if out is None:
                out = torch.empty((m, n), dtype=out_dtype, device=a.device)
            if (a_at | weight_at) & 15:
                return anchor.gemm(a, weight.t() if b_by_n else weight, out, bias=bias, chunks=s.chunks)
            target = torch.empty((s.chunks, m, n), dtype=partial, device=a.device) if split else out
            if bias is not None:
                bias = _placed(bias)
            added = bias.to(out_dtype) if in_epilogue and bias is not None else None
            launch(m, span, a_at, weight_at, None if added is None else added.data_ptr(), False, target)
            while target is not out:
                target = anchor.fold_partials(target, bias, out)
        return out

    return _in_pieces(s, run), chosen.algorithm


def _head(s: Shape, rank: int) -> tuple[Callable[..., Tensor], str]:
    """(dy, weight) -> dx of a head, chunk after chunk onto one fp32 sum."""
    chosen = plan(
        s.device, most_rows(s), s.n, DGRAD_CHUNK, 1, s.k, s.n, False, False, s.dtype, torch.float32, False, rank
    )  # fmt: skip
    launch, n, size = launcher(s.device, chosen), s.n, s.dtype.itemsize

    def run(dy: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        m, a, b = dy.shape[0], dy.data_ptr(), weight.data_ptr()
        if (a | b) & 15:
            out = torch.empty((m, n), dtype=s.out, device=dy.device) if out is None else out
            return linear_grad.ascending(dy, weight, out, DGRAD_CHUNK)
        with common.on_device(dy):
            total = torch.empty((m, n), dtype=torch.float32, device=dy.device)
            for first in range(0, s.k, DGRAD_CHUNK):
                k = min(DGRAD_CHUNK, s.k - first)
                launch(m, k, a + first * size, b + first * n * size, None, first > 0, total)
            return total.to(s.out) if out is None else out.copy_(total)

    return _in_pieces(s, run), chosen.algorithm


def _wgrad(s: Shape, rank: int) -> tuple[Callable[[Tensor, Tensor, Tensor, bool], None], str]:
    """(grad, dy, x, fresh) -> None through one algorithm, and which it is."""
    n, k = s.weight
    chosen = plan(s.device, n, k, s.rows, 1, n, k, True, False, s.dtype, s.out, False, rank)
    launch = launcher(s.device, chosen)

    def run(grad: Tensor, dy: Tensor, x: Tensor, fresh: bool) -> None:
        dy_at, x_at = dy.data_ptr(), x.data_ptr()
        if (dy_at | x_at | grad.data_ptr()) & 15:
            return linear_grad.wgrad_(grad, dy, x, fresh)
        with common.on_device(dy):
            launch(n, dy.shape[0], dy_at, x_at, None, not fresh, grad)

    return run, chosen.algorithm


def _cublaslt_supports(key: Key) -> bool:
    s = _shape(key)
    return (
        s.device >= 0
        and not common.IS_HIP
        and s.dense
        and s.rows > 0
        and s.dtype in (torch.bfloat16, torch.float16)
        and (s.out == torch.float32 or (s.out == s.dtype and s.fresh))
        and all(d % 8 == 0 for d in s.weight)
        and not (s.is_head and s.rows <= 64)  # a launch a chunk, each short of rows
        and (s.form == "wgrad" or s.k % (8 * s.chunks) == 0)
    )


def _cublaslt(rank: int, form: str) -> Schedule:
    def bind(key: Key) -> Run:
        s = _shape(key)
        call: Any
        if form == "forward":
            run, algorithm = _product(s, rank)
            call = lambda x, weight, bias, chunks, dgrad_chunks, out_dtype: run(x, weight, bias)
        elif form == "wgrad":
            onto, algorithm = _wgrad(s, rank)
            call = lambda grad, dy, x, fresh: onto(grad, dy, x, fresh)
        elif s.is_head:
            head, algorithm = _head(s, rank)
            call = lambda dy, weight, chunks: head(dy, weight)
        else:
            run, algorithm = _product(s, rank)
            call = lambda dy, weight, chunks: run(dy, weight)
        call.note = f"; {algorithm}"
        return call

    return Schedule(f"cublaslt.{rank}", bind, _cublaslt_supports)


# ---- Triton tiles --------------------------------------------------------------------------------


def _tile(tile: Tile, dgrad: bool, head: bool = False) -> Schedule:
    offers = [offer for offer in (HEAD_OFFERS if head else OFFERS) if offer.tile == tile]

    def supports(key: Key) -> bool:
        s = _shape(key)
        return (
            s.device >= 0 and not common.IS_HIP and s.dense and s.chunks == 1 and s.dtype.itemsize == 2
            and s.is_head == head and any(o.least <= s.rows <= o.most and o.narrow <= s.n <= o.wide for o in offers)
        )  # fmt: skip

    def bind(key: Key) -> Run:
        s = _shape(key)
        split = -(-s.k // DGRAD_CHUNK) if s.rows <= SPLIT_ROWS else 1

        def run(a: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
            if out is None:
                out = torch.empty((a.shape[0], s.n), dtype=s.out, device=a.device)
            own = None if (a.data_ptr() | weight.data_ptr()) & 15 else tile  # None: the anchor's
            if head:
                own = own and own._replace(split=split)
                return linear_grad.ascending(a, weight, out, DGRAD_CHUNK, tile=own)
            if bias is not None:
                bias = _placed(bias)
            return anchor.gemm(a, weight if dgrad else weight.t(), out, bias=bias, tile=own)

        whole = _in_pieces(s, run)
        if dgrad:
            return lambda dy, weight, chunks: whole(dy, weight)
        return lambda x, weight, bias, chunks, dgrad_chunks, out_dtype: whole(x, weight, bias)

    return Schedule(f"triton.{'head.' * head}{tile.m}x{tile.n}x{tile.k}", bind, supports)


# ---- wgmma for few rows --------------------------------------------------------------------------


def _few_rows(columns: int) -> Schedule:
    def supports(key: Key) -> bool:
        s = _shape(key)
        return (
            0 < s.rows <= linear_rows.MOST_ROWS and s.dense and s.chunks == 1 and s.dtype.itemsize == 2
            and all(d % 8 == 0 for d in s.weight) and not s.is_head and linear_rows.supported(s.device)
        )  # fmt: skip

    def bind(key: Key) -> Run:
        s = _shape(key)
        launch = linear_rows.launcher(s.device, s.dtype, s.out, s.rows, columns)

        def run(dy: Tensor, weight: Tensor, chunks: int) -> Tensor:
            if (dy.data_ptr() | weight.data_ptr()) & 15:
                return anchor.linear_dgrad(dy, weight, chunks)
            return launch(dy, weight)

        return run

    return Schedule(f"rows.{columns}", bind, supports)


# ---- ops -----------------------------------------------------------------------------------------


def _schedules(form: str) -> tuple[Schedule, ...]:
    found = [_cublaslt(rank, form) for rank in range(RANKS)]
    if form != "wgrad":
        found += [_tile(tile, form == "dgrad") for tile in dict.fromkeys(offer.tile for offer in OFFERS)]
    if form == "dgrad":
        found += [_tile(offer.tile, True, head=True) for offer in HEAD_OFFERS]
        found += [_few_rows(columns) for columns in linear_rows.COLUMNS]
    return tuple(found)


_HERE = Path(__file__).resolve().parent


def _op(
    name: str, form: str, run: Run, key: Callable[..., Key], warm: Warm,
    sample: Callable[..., Any], mutates: tuple[int, ...] = (),
) -> ScheduledOp:  # fmt: skip
    sources = (
        Path(__file__).resolve(),
        *(Path(m.__file__) for m in (anchor, linear_grad, matrix, common, linear_rows, driver) if m.__file__),
        _HERE.parent.parent / "contract" / "orders.py",
        *(build.source_dir() / "cuda" / name for name in ("linear_cublaslt.cpp", linear_rows.SOURCE)),
    )
    return ScheduledOp(
        Family(
            name, run, key, _describe, _device, _rows, sample, _schedules(form), sources, versions=versions,
            mutates=mutates, warm=warm,
        )
    )  # fmt: skip


linear = _op("linear", "forward", anchor.linear, _linear_key, _linear_warm, _linear_sample)
linear_dgrad = _op("linear_dgrad", "dgrad", anchor.linear_dgrad, _dgrad_key, _dgrad_warm, _dgrad_sample)
wgrad_chunk = _op("linear_wgrad", "wgrad", linear_grad.wgrad_, _wgrad_key, _wgrad_warm, _wgrad_sample, mutates=(0,))


def wgrad_(
    grad: Tensor,  # [N, K] fp32; where fresh also the dtype of dy
    dy: Tensor,  # [T, N]
    x: Tensor,  # [T, K]
    fresh: bool,
) -> None:
    """grad += dy^T x, chunks of WGRAD_TOKENS added ascending; `fresh` ignores what grad holds, rounds once."""
    tokens = dy.shape[0]
    if tokens <= WGRAD_TOKENS:
        wgrad_chunk.call(grad, dy, x, fresh)
        return
    total = grad if grad.dtype == torch.float32 else torch.empty_like(grad, dtype=torch.float32)
    for first in range(0, tokens, WGRAD_TOKENS):
        last = first + WGRAD_TOKENS
        wgrad_chunk.call(total, dy[first:last], x[first:last], fresh and first == 0)
    if total is not grad:
        grad.copy_(total)


def linear_wgrad_(grad: Tensor, dy: Tensor, x: Tensor) -> None:
    wgrad_(grad, dy, x, False)


def linear_wgrad(dy: Tensor, x: Tensor) -> Tensor:
    grad = torch.empty(dy.shape[1], x.shape[1], dtype=dy.dtype, device=dy.device)
    wgrad_(grad, dy, x, True)
    return grad
