"""Matrix products through cuBLASLt without split-K: `plan` selects an algorithm, `launcher` returns its launch.

Both call the bridge csrc/cuda/linear_cublaslt.cpp, which is built on first use and calls the cuBLASLt that torch has
loaded.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.kernels import build
from rlkernel.kernels.cuda import driver
from rlkernel.kernels.errors import BuildError, LaunchError

SOURCE = "linear_cublaslt.cpp"
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
RANKS = 4  # number of the heuristic's answers that become schedules
MAX_WORKSPACE = 32 << 20
# Constants of cublasLt.h: the Hopper algorithm, its stages, tiles (output columns x rows), clusters (tiles).
HOPPER, STAGES = 66, 35
TILES = {
    (16, 64): 47, (32, 64): 12,
    (64, 16): 312, (64, 24): 313, (64, 32): 13, (64, 40): 314, (64, 48): 315, (64, 56): 316, (64, 64): 15,
    (64, 80): 318, (64, 96): 26, (64, 112): 321, (64, 128): 17,
    (128, 16): 394, (128, 24): 395, (128, 32): 16, (128, 40): 396, (128, 48): 397, (128, 56): 398, (128, 64): 18,
    (128, 80): 400, (128, 96): 33, (128, 112): 403, (128, 128): 20,
}  # fmt: skip
CLUSTERS = {"1x1": 2, "2x1": 3, "4x1": 4, "1x2": 5, "4x2": 7}
TRANSIENT = {1, 3, 11, 13, 14}
"""Transient statuses: not initialised, allocation, mapping or execution failed, internal error."""

_P, _L, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


@functools.cache
def _function(name: str, result: Any, *arguments: Any) -> Any:
    fn = getattr(build.cublaslt_library(), name)
    fn.argtypes, fn.restype = arguments, result
    return fn


def _error() -> str:
    return str(_function("rlk_lt_error", ctypes.c_char_p)().decode())


@functools.cache  # a failed build is not repeated for every shape class
def unavailable() -> str | None:
    """Why cuBLASLt cannot be called from this process, or None."""
    try:
        build.cublaslt_library()
    except (BuildError, OSError) as error:
        return str(error).splitlines()[0]
    return None


def versions() -> dict[str, str]:
    """Versions of the cuBLASLt that torch has loaded and of the CUDA compiler."""
    library = {} if unavailable() else {"cublaslt": str(_function("rlk_lt_version", _L)())}
    return {**library, **driver.versions()}


class Algorithm(NamedTuple):
    """An explicit algorithm: its number and configuration in the numbering of cublasLt.h; 0 is the default."""

    number: int
    tile: int
    stages: int
    cluster: int
    custom: int = 0
    swizzle: int = 0
    inner: int = 0


class Plan(NamedTuple):
    """One algorithm for a shape class: handle of the bridge's plan, workspace in bytes, description."""

    handle: int
    workspace: int
    algorithm: str


@functools.cache
def plan(
    device: int, m: int, n: int, k: int, batch: int, a_row: int, b_row: int, a_by_k: bool, b_by_n: bool,
    dtype: torch.dtype, out: torch.dtype, bias: bool, which: int | Algorithm,
) -> Plan:  # fmt: skip
    """An algorithm of cuBLASLt without split-K for out [batch, m, n] on a device.

    Args:
        k: length of each of the `batch` consecutive pieces of the contraction.
        a_row, b_row: elements from one stored row of an operand to the next.
        a_by_k: a is stored [K, m], else [m, K].
        b_by_n: b is stored [n, K], else [K, n].
        which: rank among the heuristic's answers, or an explicit algorithm.

    Raises:
        RuntimeError: cuBLASLt has no such algorithm; the message ends with its status.
        LaunchError: the status is one of TRANSIENT, so a later call may succeed.
        BuildError: cuBLASLt cannot be called from this process.
    """
    if (reason := unavailable()) is not None:
        raise BuildError(reason)
    make = _function("rlk_lt_plan", _P, _I, _L, _L, _L, _L, _L, _L, _I, _I, _I, _I, _I, _I, _P, _L)
    rank, settings = (-1, (_I * len(which))(*which)) if isinstance(which, Algorithm) else (which, None)
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # creates the device's context
        handle = make(
            device, m, n, k, batch, a_row, b_row, a_by_k, b_by_n, DTYPE_CODES[dtype], DTYPE_CODES[out], bias, rank,
            settings, MAX_WORKSPACE,
        )  # fmt: skip
    if not handle:
        kind = LaunchError if _function("rlk_lt_status", _I)() in TRANSIENT else RuntimeError
        raise kind(f"cuBLASLt, [{m}, {k}] x [{k}, {n}], batch {batch}, {dtype} to {out}: {_error()}")
    text = _function("rlk_lt_describe", ctypes.c_char_p, _P)(handle).decode()
    return Plan(handle, _function("rlk_lt_workspace", _L, _P)(handle), text)


def workspace(chosen: Plan, device: torch.device) -> Tensor | None:
    """Workspace of one call, or None. Allocated per call, because concurrent streams or graphs must not share it."""
    return torch.empty(chosen.workspace, dtype=torch.uint8, device=device) if chosen.workspace else None


def launcher(device: int, chosen: Plan) -> Callable[..., None]:
    """A function (m, k, a, b, bias, add, out, space=None) that launches a plan on the current stream.

    a, b and bias are addresses, `add` adds to `out` instead of overwriting it, and `space` is a `workspace` shared by
    the launches of one call.

    Raises:
        LaunchError: by the function, if cuBLASLt returns an error.
    """
    launch = _function("rlk_lt_run", _I, _P, _L, _L, _P, _P, _P, _I, _P, _P, _L, _P)
    stream_of = torch._C._cuda_getCurrentRawStream
    handle, bytes_ = chosen.handle, chosen.workspace

    def run(
        m: int, k: int, a: int, b: int, bias: int | None, add: bool, out: Tensor, space: Tensor | None = None
    ) -> None:
        if bytes_ and space is None:
            space = torch.empty(bytes_, dtype=torch.uint8, device=out.device)
        status = launch(
            handle, m, k, a, b, bias, add, out.data_ptr(), None if space is None else space.data_ptr(), bytes_,
            stream_of(device),
        )  # fmt: skip
        if status:
            raise LaunchError(f"cuBLASLt ({chosen.algorithm}) failed at m = {m}, k = {k}: {_error()}")

    return run
