"""Checks of arguments that the ops share. An error names the op, the argument and what was expected."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the ops support."""
FP32_MIN, FP32_MAX = 2.0**-149, torch.finfo(torch.float32).max
"""Smallest and largest positive number of fp32."""


def check(condition: bool, message: Callable[[], str], error: type[Exception] = ValueError) -> None:
    """Raises `error(message())` unless `condition` holds; the message is built only then."""
    if not condition:
        raise error(message())


def check_tensors(op: str, **arguments: Any) -> None:
    """Raises TypeError unless each argument is a tensor."""
    for value in arguments.values():
        if not isinstance(value, Tensor):
            raise not_tensor(op, **arguments)


def check_optional(op: str, **arguments: Any) -> None:
    """Raises TypeError unless each argument is a tensor or None."""
    for value in arguments.values():
        if not (value is None or isinstance(value, Tensor)):
            raise not_tensor(op, **{name: v for name, v in arguments.items() if v is not None})


def not_tensor(op: str, **arguments: Any) -> TypeError:
    """The error for the first of the arguments that is not a tensor."""
    name, value = next((n, a) for n, a in arguments.items() if not isinstance(a, Tensor))
    return TypeError(f"{op}: {name} is of type {type(value).__name__}; it must be a torch.Tensor")


def check_dense(op: str, names: tuple[str, ...], args: tuple[Any, ...]) -> None:
    """Raises TypeError for a sparse tensor."""
    for name, a in zip(names, args, strict=False):
        if isinstance(a, Tensor) and a.layout != torch.strided:
            raise TypeError(f"{op}: {name} is {a.layout}; expected a dense tensor, pass {name}.to_dense()") from None


def check_one_device(op: str, *tensors: Tensor) -> None:
    """Raises ValueError unless the tensors are on one device; for kernel calls that bypass `define`."""
    first = tensors[0].device
    for other in tensors:
        if other.device != first:
            raise device_error(op, first, other.device)


def device_error(op: str, first: torch.device, other: torch.device) -> ValueError:
    """The error for tensors on two devices."""
    return ValueError(f"{op}: tensors lie on {first} and on {other}; move them to one device")


def check_float(op: str, name: str, x: Tensor) -> None:
    """Raises TypeError unless the argument `name` has one of the dtypes that the ops compute in."""
    if x.dtype not in FLOATS:
        raise TypeError(f"{op}: {name} is {x.dtype}; expected float32, bfloat16 or float16, cast it")


def check_number(op: str, name: str, value: Any, expected: str, low: float = FP32_MIN, high: float = FP32_MAX) -> float:
    """The argument `name` as a float.

    The default limits are those of fp32, in which kernels compute: a larger number would become infinite, a smaller one
    zero.

    Raises:
        ValueError: it is outside [low, high]. TypeError: it is not a number.
    """
    try:
        if isinstance(value, bool):  # would pass for 0 or 1
            raise TypeError
        fits = low <= value <= high
    except (TypeError, RuntimeError):  # RuntimeError: a tensor of several numbers
        raise TypeError(f"{op}: {name}={value!r} is not a number; it must be {expected}") from None
    if not fits:
        raise ValueError(f"{op}: {name}={value} must be {expected}")
    return float(value)


def check_flag(op: str, name: str, value: Any) -> None:
    """Raises TypeError unless the argument `name` is a bool: a string such as "no" would pass for True."""
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name}={value!r} must be True or False")


def is_int(value: Any) -> bool:
    """Whether a value is an int, and not a bool, which would pass for 0 or 1."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def check_int(op: str, name: str, value: Any, expected: str, low: int, high: int) -> int:
    """The argument `name` as an int; a symbolic integer is returned unchecked, because its range may be unknown.

    Raises:
        ValueError: it is outside [low, high]. TypeError: it is not an integer.
    """
    number: int = value
    if isinstance(value, torch.SymInt) or (is_int(value) and torch.compiler.is_compiling()):
        return number
    try:
        if isinstance(value, bool):  # would pass for 0 or 1
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{op}: {name}={value!r} is not an integer; it must be {expected}") from None
    if not low <= number <= high:
        raise ValueError(f"{op}: {name}={value} must be {expected}")
    return number


def flatten_rows(x: Tensor) -> Tensor:  # [..., n] -> [rows, n]
    """Flattens all dimensions except the last; works if a dimension is 0."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]
