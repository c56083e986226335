"""Chooses the implementation of every op, once per (op, device type); `rlkernel doctor` shows the choices.

CPU: the C++ kernel; without a compiler the reference, with one warning. CUDA: a `ScheduledOp` (`scheduled_op.py`) for
ops that have schedules, else the Triton kernel. Other devices: see `ops.register_backend`.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlkernel.kernels import build
from rlkernel.kernels.errors import NoCompilerError
from rlkernel.kernels.switch import Switch

IMPLEMENTATIONS = ("cpu", "cuda", "triton", "reference")
"""The folders of `rlkernel/kernels` that hold implementations."""
Function = Callable[..., Any]


@dataclass(frozen=True)
class Choice:
    """The implementation of an op on a device type, the reason for it, and the function."""

    implementation: str
    reason: str
    fn: Function


class NoImplementation(RuntimeError):
    """No implementation of the op exists for the device; the message names both and says what to do."""


_declared: dict[str, dict[str, Callable[[], Function]]] = {}  # op -> implementation -> imports the function
_backends: dict[str, tuple[dict[str, Function], bool]] = {}  # of other packages, see `register`
_chosen: dict[tuple[str, str], Choice] = {}
_forced = Switch[str | None](None)  # by `use`


def declare(op: str, functions: Mapping[str, Callable[[], Function] | None]) -> None:
    """Registers an op's implementations. Each is a function that imports and returns the kernel; `ops.define` calls
    this."""
    _declared[op] = {name: get for name, get in functions.items() if get is not None}


def declared() -> tuple[str, ...]:
    """Names of all ops; none before `rlkernel.ops` is imported."""
    return tuple(_declared)


def functions(implementation: str) -> dict[str, Function]:
    """op -> function of one of `IMPLEMENTATIONS`; imports the entire folder, so that all its schedules are known."""
    return {op: found[implementation]() for op, found in _declared.items() if implementation in found}


def register(device: str, given: Mapping[str, Function], reference: bool) -> None:
    """Registers the functions of another package; see `ops.register_backend`."""
    if device in ("cpu", "cuda") or device in _backends:
        raise ValueError(
            f"register_backend: device type {device!r} already has implementations; register a backend once, for a "
            "device type other than cpu and cuda"
        )
    for op, fn in given.items():
        if op not in _declared:
            raise ValueError(
                f"register_backend: {op!r} is not an op; rlkernel.kernels.select.declared() lists the names"
            )
        if not callable(fn):
            raise TypeError(f"register_backend: {op} is of type {type(fn).__name__}; expected a function")
    _backends[device] = dict(given), reference


def choose(op: str, device: str) -> Choice:
    """The implementation of `op` on a device type: "cpu", "cuda" or that of a registered backend.

    Raises:
        NoImplementation: nothing can compute the op there.
        BuildError: a compiler is there, but the C++ kernels did not build.
    """
    if (name := _forced.now) is not None:
        if name not in _declared[op]:
            raise NoImplementation(f"op {op!r} has no {name!r} implementation; leave the use({name!r}) block")
        return Choice(name, "forced by rlkernel.kernels.select.use", _declared[op][name]())
    key = (op, device)
    if key not in _chosen:
        _chosen[key] = _decide(op, device)
    return _chosen[key]


def _decide(op: str, device: str) -> Choice:
    if device in _backends:
        own, reference = _backends[device]
        if op in own:
            return Choice("registered", "given to register_backend by another package", own[op])
        if not reference:
            raise NoImplementation(
                f"op {op!r} has no implementation on {device!r}: its backend lacks it; give the function to "
                "register_backend, or pass reference=True"
            )
        name, reason = "reference", "the backend lacks it and was registered with reference=True"
    elif device == "cuda" and "cuda" in _declared[op]:
        name, reason = "cuda", "the fastest schedule that equals the Triton kernel to the bit on this machine"
    elif device == "cuda":
        name, reason = "triton", "one Triton source serves CUDA and AMD GPUs"
    elif (problem := _no_compiler()) is None:
        name, reason = "cpu", "compiled C++ kernel"
    else:
        name, reason = "reference", problem
    return Choice(name, reason, functions(name)[op])


@functools.cache
def _no_compiler() -> str | None:
    """Why the C++ kernels cannot be built here, with a warning; None if they can."""
    try:
        build.cpu_library()
    except NoCompilerError as error:
        problem = str(error).splitlines()[0]
        text = f"rlkernel: the slow reference runs in place of the C++ CPU kernels: {problem}"
        warnings.warn(text, RuntimeWarning, stacklevel=4)
        return problem
    return None


def forced() -> bool:
    """Whether a `use` block is active."""
    return _forced.now is not None


def use(implementation: str) -> contextlib.AbstractContextManager[None]:
    """Forces one of `IMPLEMENTATIONS` for every op inside the block, for tests and comparisons."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"unknown implementation {implementation!r}; expected one of {', '.join(IMPLEMENTATIONS)}")
    return _forced.block(implementation)
