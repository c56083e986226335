"""Which implementation computes an op, decided once per (op, device type) and shown by `rlkernel doctor`.

CPU: the C++ kernel; without a compiler the readable reference, with one warning (a failed build is an error).
CUDA: certified schedules (`kernels/schedule.py`) where the op has some, else the Triton kernel. Other device types: the
functions that another package registered (`ops.register_backend`). `use(...)` forces one implementation inside a block,
for tests and certification.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from rlkernel.kernels import build
from rlkernel.kernels.errors import NoCompilerError
from rlkernel.kernels.setting import Switch

IMPLEMENTATIONS = ("cpp", "certified", "triton", "reference")
_PACKAGE = {"cpp": "cpu", "certified": "cuda", "triton": "triton", "reference": "reference"}


@dataclass(frozen=True)
class Choice:
    """One decision: the implementation of an op on a device type, the callable, and why it was chosen."""

    op: str
    device: str
    implementation: str
    reason: str
    fn: Callable[..., Any]


class NoImplementation(RuntimeError):
    """No implementation of the op exists for the device; the message names both and says what to do."""


_modules: dict[str, str] = {}
_backends: dict[str, tuple[dict[str, Callable[..., Any]], bool]] = {}  # of other packages, see `register`
_chosen: dict[tuple[str, str], Choice] = {}
_forced = Switch[str | None](None)  # of `use`
_warned = False


def declare(op: str, module: str) -> None:
    """Says in which module (of `kernels/{reference,cpu,cuda,triton}`) the functions of an op live."""
    _modules[op] = module


def declared() -> tuple[str, ...]:
    """Names of all declared ops, in order of declaration."""
    return tuple(_modules)


def register(device: str, functions: Mapping[str, Callable[..., Any]], reference: bool) -> None:
    """Takes another package's functions for a device type, and whether the reference computes the ops that it lacks.

    `ops.register_backend` calls it and tells torch.

    Raises:
        ValueError: the device type has implementations already, or a name is not that of a declared op.
        TypeError: a function cannot be called.
    """
    if device in ("cpu", "cuda") or device in _backends:
        raise ValueError(
            f"register_backend: device type {device!r} already has implementations; register a backend once, for a "
            "device type other than cpu and cuda"
        )
    for op, fn in functions.items():
        if op not in _modules:
            raise ValueError(
                f"register_backend: {op!r} is not an op; rlkernel.kernels.select.declared() lists the names"
            )
        if not callable(fn):
            raise TypeError(f"register_backend: {op} is of type {type(fn).__name__}; expected a function")
    _backends[device] = dict(functions), reference


def _find(op: str, implementation: str) -> Callable[..., Any] | None:
    name = f"rlkernel.kernels.{_PACKAGE[implementation]}.{_modules[op]}"
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return None
        raise
    found = getattr(module, op, None)
    return getattr(found, "call", found)  # an op with schedules: its function, not the object around it


def _why_no_cpp() -> str | None:
    try:
        build.cpu_library()
    except NoCompilerError as error:
        return str(error)
    return None


def choose(op: str, device: str) -> Choice:
    """The implementation of `op` on a device type: "cpu", "cuda" or that of a registered backend.

    Raises:
        NoImplementation: nothing can compute the op there.
        BuildError: a compiler is there, but the C++ kernels did not build.
    """
    if (name := _forced.now) is not None:
        fn = _find(op, name)
        if fn is None:
            raise NoImplementation(f"op {op!r} has no {name!r} implementation; leave the use({name!r}) block")
        return Choice(op, device, name, "forced by rlkernel.kernels.select.use", fn)
    key = (op, device)
    if key not in _chosen:
        _chosen[key] = _decide(op, device)
    return _chosen[key]


def _decide(op: str, device: str) -> Choice:
    global _warned
    if device in _backends:
        functions, reference = _backends[device]
        if op in functions:
            return Choice(op, device, "registered", "given to register_backend by another package", functions[op])
        fn = _find(op, "reference") if reference else None
        if fn is None:
            raise NoImplementation(
                f"op {op!r} has no implementation on {device!r}: its backend lacks it; give the function to "
                "register_backend, or pass reference=True"
            )
        return Choice(op, device, "reference", "the backend lacks it and was registered with reference=True", fn)
    if device == "cuda":
        fn = _find(op, "certified")
        if fn is not None:
            reason = "the fastest schedule that equals the Triton kernel to the bit on this machine"
            return Choice(op, device, "certified", reason, fn)
        fn = _find(op, "triton")
        if fn is not None:
            return Choice(op, device, "triton", "one Triton source serves CUDA and AMD GPUs", fn)
        fn = _find(op, "reference")
        if fn is not None:
            return Choice(
                op, device, "reference", "elementwise or index arithmetic: torch's own kernels keep the order", fn
            )
        raise NoImplementation(f"op {op!r} has no CUDA implementation; run it on the CPU or report this as a bug")
    compiled = _find(op, "cpp")
    problem = _why_no_cpp() if compiled is not None else None
    if compiled is not None and problem is None:
        return Choice(op, device, "cpp", "compiled C++ kernel", compiled)
    fn = _find(op, "reference")
    if fn is None:
        raise NoImplementation(f"op {op!r} has no CPU implementation here: {problem or 'none is written'}")
    if problem is not None and not _warned:
        _warned = True
        warnings.warn(
            f"rlkernel: the slow reference runs in place of the C++ CPU kernels: {problem.splitlines()[0]}",
            RuntimeWarning,
            stacklevel=3,
        )
    reason = problem.splitlines()[0] if problem else "no C++ kernel is needed: elementwise or index arithmetic"
    return Choice(op, device, "reference", reason, fn)


def forced() -> bool:
    """Whether a `use` block is active."""
    return _forced.now is not None


@contextlib.contextmanager
def use(implementation: str) -> Iterator[None]:
    """Forces one of `IMPLEMENTATIONS` for every op inside the block (tests, certification)."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"unknown implementation {implementation!r}; expected one of {', '.join(IMPLEMENTATIONS)}")
    with _forced.block(implementation):
        yield
