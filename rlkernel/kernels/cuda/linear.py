"""linear and linear_dgrad on CUDA: cuBLASLt without split-K, and further Triton tiles, where they equal the anchor.

The anchor is kernels/triton/linear.py. One cuBLASLt algorithm serves a whole bucket of row counts: what was certified
is what runs. With chunks = P, one batched call makes the P partial products and the anchor's own fold adds them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.kernels import build
from rlkernel.kernels.schedule import Family, Key, Run, Schedule, ScheduledOp, values
from rlkernel.kernels.triton import common
from rlkernel.kernels.triton import linear as anchor

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
RANKS = 4  # answers of cuBLASLt's heuristic that compete
MOST_WORKSPACE = 32 << 20
LARGEST_BUCKET = 16384
SAMPLE_BYTES = 3 << 29  # limit on the result that certification compares, 1.5 GiB
# Decode-size tiles beside the anchor's own choice.
TILES = (
    anchor.Tile(16, 32, 128, 4, 4),
    anchor.Tile(16, 64, 128, 4, 4),
    anchor.Tile(16, 128, 128, 4, 3),
    anchor.Tile(64, 32, 128, 4, 4),
)


class Shape(NamedTuple):
    """Shape class of a product out [M, n] = a [M, k] b [k, n]."""

    device: int  # index, -1 for the CPU
    rows: int  # bucket of M
    weight: torch.Size
    dtype: torch.dtype
    out_dtype: torch.dtype | None  # None: dtype
    bias: bool
    chunks: int
    dense: bool  # contiguous operands at 16-byte addresses
    dgrad: bool

    @property
    def n(self) -> int:
        return self.weight[1 if self.dgrad else 0]

    @property
    def k(self) -> int:
        return self.weight[0 if self.dgrad else 1]

    @property
    def out(self) -> torch.dtype:
        return self.out_dtype or self.dtype


def bucket(m: int) -> int:
    """Bucket of a row count: 0, 1, 16, 32, 64, ..., LARGEST_BUCKET, which holds all above too."""
    if m <= 1:
        return m
    return min(max(16, 1 << (m - 1).bit_length()), LARGEST_BUCKET)


def _linear_key(
    x: Tensor, weight: Tensor, bias: Tensor | None, chunks: int, dgrad_chunks: int, out_dtype: torch.dtype | None
) -> Key:
    dense = not (x.data_ptr() | weight.data_ptr()) & 15 and x.is_contiguous() and weight.is_contiguous()
    if bias is not None:
        dense = dense and bias.is_contiguous() and not bias.data_ptr() & 15
    return (
        x.get_device(), bucket(x.shape[0]), weight.shape, x.dtype, out_dtype, bias is not None, chunks, dense, False,
    )  # fmt: skip


def _dgrad_key(dy: Tensor, weight: Tensor, chunks: int) -> Key:
    dense = not (dy.data_ptr() | weight.data_ptr()) & 15 and dy.is_contiguous() and weight.is_contiguous()
    return (dy.get_device(), bucket(dy.shape[0]), weight.shape, dy.dtype, None, False, chunks, dense, True)


def _shape(key: Key) -> Shape:
    return Shape(*key)  # type: ignore[arg-type]


def _describe(key: Key) -> dict[str, Any]:
    s = _shape(key)
    name = lambda dtype: str(dtype).removeprefix("torch.")
    return {
        "M": s.rows, "N": s.n, "K": s.k, "dtype": name(s.dtype), "out": name(s.out), "bias": s.bias,
        "chunks": s.chunks, "dense": s.dense,
    }  # fmt: skip


def _device(key: Key) -> torch.device:
    index = _shape(key).device
    return torch.device("cpu") if index < 0 else torch.device("cuda", index)


def _rows(key: Key) -> list[int]:
    s = _shape(key)
    most = max(1, SAMPLE_BYTES // (s.n * 4))
    low = {1: 1, 16: 2}.get(s.rows, s.rows // 2 + 1)
    return sorted({min(m, most) for m in (low, (low + s.rows) // 2 | 1, s.rows)})


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
    """Version of the cuBLASLt that torch has loaded."""
    return {"cublaslt": str(_function("rlk_lt_version", _L)())}


class Plan(NamedTuple):
    """One algorithm of cuBLASLt for a shape class: the C handle, its workspace in bytes, and which it is."""

    handle: int
    workspace: int
    algorithm: str


@functools.cache
def plan(
    device: int, rows: int, n: int, k: int, chunks: int, dgrad: bool, dtype: torch.dtype, out: torch.dtype, bias: bool,
    rank: int,
) -> Plan:  # fmt: skip
    """The algorithm that cuBLASLt's heuristic ranks `rank`-th, split-K excluded, for out [rows, n] on a device.

    Args:
        k: length of the contraction, of which each of the `chunks` products gets an equal piece.
        dgrad: the weight is [k, n], else [n, k].

    Raises:
        RuntimeError: cuBLASLt has no such algorithm; the message ends with its status.
    """
    make = _function("rlk_lt_plan", _P, _I, _L, _L, _L, _L, _I, _I, _I, _I, _I, _L)
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # the device's context exists from here on
        handle = make(
            device, rows, n, k // chunks, chunks, not dgrad, DTYPE_CODES[dtype], DTYPE_CODES[out], bias, rank,
            MOST_WORKSPACE,
        )  # fmt: skip
    if not handle:
        raise RuntimeError(f"cuBLASLt, [{rows}, {k}] x [{k}, {n}], {dtype} to {out}: {_error()}")
    text = _function("rlk_lt_describe", ctypes.c_char_p, _P)(handle).decode()
    return Plan(handle, _function("rlk_lt_workspace", _L, _P)(handle), text)


def _product(s: Shape, rank: int) -> tuple[Callable[[Tensor, Tensor, Tensor | None], Tensor], str]:
    """(a, weight, bias) -> out through one algorithm, and which it is."""
    split = s.chunks > 1
    in_epilogue = s.bias and not split
    partial = torch.float32 if split else s.out
    chosen = plan(s.device, s.rows, s.n, s.k, s.chunks, s.dgrad, s.dtype, partial, in_epilogue, rank)
    launch = _function("rlk_lt_run", _I, _P, _L, _P, _P, _P, _P, _P, _L, _P)
    stream_of = torch._C._cuda_getCurrentRawStream
    handle, bytes_, index, n, out_dtype = chosen.handle, chosen.workspace, s.device, s.n, s.out

    def run(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        m = a.shape[0]
        with common.on_device(a):
            out = torch.empty((m, n), dtype=out_dtype, device=a.device)
            target = torch.empty((s.chunks, m, n), dtype=partial, device=a.device) if split else out
            added = bias.to(out_dtype) if in_epilogue and bias is not None else None
            # From the allocator, call by call: calls on two streams, or in two graphs, never share it.
            space = torch.empty(bytes_, dtype=torch.uint8, device=a.device) if bytes_ else None
            status = launch(
                handle, m, a.data_ptr(), weight.data_ptr(), None if added is None else added.data_ptr(),
                target.data_ptr(), None if space is None else space.data_ptr(), bytes_, stream_of(index),
            )  # fmt: skip
            if status:
                raise RuntimeError(f"cuBLASLt ({chosen.algorithm}) failed at [{m}, {s.k}] x [{s.k}, {n}]: {_error()}")
            while target is not out:
                target = anchor.fold_partials(target, bias, out)
        return out

    return run, chosen.algorithm


def _cublaslt_supports(key: Key) -> bool:
    s = _shape(key)
    return (
        s.device >= 0
        and s.dense
        and s.rows > 0
        and s.dtype in (torch.bfloat16, torch.float16)
        and s.out in (s.dtype, torch.float32)
        and s.n % 8 == 0
        and s.k % (8 * s.chunks) == 0
    )


def _cublaslt(rank: int, dgrad: bool) -> Schedule:
    def bind(key: Key) -> Run:
        run, algorithm = _product(_shape(key), rank)
        call: Any = lambda x, weight, bias, chunks, dgrad_chunks, out_dtype: run(x, weight, bias)
        if dgrad:
            call = lambda dy, weight, chunks: run(dy, weight, None)
        call.note = f"; {algorithm}"
        return call

    return Schedule(f"cublaslt.{rank}", bind, _cublaslt_supports)


# ---- Triton tiles --------------------------------------------------------------------------------


def _tile(tile: anchor.Tile, dgrad: bool) -> Schedule:
    def supports(key: Key) -> bool:
        s = _shape(key)
        small = s.rows <= 16 if tile.m == 16 else 16 < s.rows <= 64
        return s.device >= 0 and s.dense and s.rows > 0 and small and s.chunks == 1 and s.dtype.itemsize == 2

    def bind(key: Key) -> Run:
        s = _shape(key)

        def run(a: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any) -> Tensor:
            out = torch.empty((a.shape[0], s.n), dtype=s.out, device=a.device)
            return anchor.gemm(a, weight if dgrad else weight.t(), out, bias=bias, tile=tile)

        return (lambda dy, weight, chunks: run(dy, weight)) if dgrad else run

    return Schedule(f"triton.{tile.m}x{tile.n}x{tile.k}", bind, supports)


# ---- ops -----------------------------------------------------------------------------------------


def _schedules(dgrad: bool) -> tuple[Schedule, ...]:
    return (*(_cublaslt(rank, dgrad) for rank in range(RANKS)), *(_tile(tile, dgrad) for tile in TILES))


_HERE = Path(__file__).resolve().parent
_SOURCES = (
    Path(__file__).resolve(),
    _HERE.parent / "triton" / "linear.py",
    _HERE.parent / "triton" / "common.py",
    build.source_dir() / "cuda" / "linear_cublaslt.cpp",
)

linear = ScheduledOp(
    Family("linear", anchor.linear, _linear_key, _describe, _device, _rows, _linear_sample, _schedules(False),
           _SOURCES, unavailable, versions)
)  # fmt: skip
linear_dgrad = ScheduledOp(
    Family("linear_dgrad", anchor.linear_dgrad, _dgrad_key, _describe, _device, _rows, _dgrad_sample, _schedules(True),
           _SOURCES, unavailable, versions)
)  # fmt: skip
