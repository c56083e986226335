"""`direct`: a decorator that shortens the host time of a Triton launch, which bounds small batches.

Triton binds and specialises the arguments at every launch. A kernel under `direct` caches the compiled kernel by what
Triton specialises on (types, alignment, constants) and calls its launcher with the arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

MEASURED = "3.6"
"""Triton version of the tests and of the recorded measurements."""

# The arguments of a compiled kernel's launcher are not a public API; they are known for this version, on CUDA.
KNOWN = triton.__version__.startswith(f"{MEASURED}.") and not (torch.version.hip or getattr(torch.version, "xpu", None))

_INT32_MIN, _INT32_MAX = -(1 << 31), (1 << 31) - 1
_listeners = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)


def _read(args: tuple[Any, ...], key: list[Any]) -> list[Any] | None:
    """The arguments with addresses in place of tensors. Appends what Triton may specialise on, per argument, to `key`.

    `key` starts with the device index. Returns None if an argument has another type, or if a tensor is on another
    device, which Triton reports.
    """
    values: list[Any] = []
    for arg in args:
        kind = type(arg)
        if kind is Tensor or kind is torch.nn.Parameter:
            value = arg.data_ptr()
            if arg.get_device() != key[0]:
                return None
            key.append(arg.dtype if value & 15 == 0 else (arg.dtype,))
            values.append(value)
            continue
        if kind is int:
            key.append(1 if arg == 1 else 2 + (arg & 15 == 0) + 2 * (not _INT32_MIN <= arg <= _INT32_MAX))
        elif kind is float or arg is None:
            key.append(kind)
        else:
            return None
        values.append(arg)
    return values


class DirectKernel(JITFunction):  # type: ignore[misc]
    """A kernel that takes run-time arguments by position, and constants and options by name."""

    compiled: dict[Any, Callable[..., None]]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **meta: Any) -> Any:
            device = args[0].get_device()
            parts: list[Any] = [device]
            values = None if _listeners[0].calls or _listeners[1].calls else _read(args, parts)
            if values is None:
                return self.run(*args, grid=grid, warmup=False, **meta)
            key = (*parts, *meta.items())
            known = self.compiled.get(key)
            if known is not None:
                known(*grid, *(1,) * (3 - len(grid)), device, values)
                return None
            found = self.run(*args, grid=grid, warmup=False, **meta)
            bound = None if found is None else self._bind(found, len(args), meta)
            if bound is not None:
                self.compiled[key] = bound
            return found

        return launch

    def _bind(self, found: Any, count: int, meta: dict[str, Any]) -> Callable[..., None] | None:
        """A launch (grid x, y, z, device, values) -> None on the current stream; None if only Triton can launch it."""
        launcher = found.run
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return None
        names = self.arg_names[count:]
        if any(name not in meta for name in names):
            return None
        constants = tuple(meta[name] for name in names)
        launch, function, packed = launcher.launch, found.function, found.packed_metadata
        cooperative, pdl = launcher.launch_cooperative_grid, launcher.launch_pdl
        stream_of = torch._C._cuda_getCurrentRawStream

        def run(x: int, y: int, z: int, device: int, values: list[Any]) -> None:
            launch(
                x, y, z, stream_of(device), function, cooperative, pdl, None, None, packed, None, None, None,
                *values, *constants,
            )  # fmt: skip

        return run


def direct(kernel: Any) -> Any:
    """The kernel as a `DirectKernel` if Triton's launcher is known, else unchanged."""
    if KNOWN and type(kernel) is JITFunction:
        kernel.__class__ = DirectKernel
        kernel.compiled = {}
    return kernel
