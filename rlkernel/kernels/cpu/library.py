"""Calls into the C++ library: functions, pointers, dtype codes and the number of threads."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from rlkernel.kernels import build

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

CPU = torch.device("cpu")
FLOATS: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
"""Dtype and device of fp32 allocations, explicit because users may change torch's defaults."""

_LETTERS = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float}


@functools.cache
def function(name: str, signature: str) -> Any:
    """C function of the CPU library. `signature`, one letter per argument: p pointer, l int64, i int32, f float."""
    fn = getattr(build.cpu_library(), name)
    fn.argtypes = [_LETTERS[letter] for letter in signature]
    fn.restype = None
    return fn


def pointer(t: Tensor | None) -> int | None:
    """Address of a contiguous tensor, or null."""
    return None if t is None else t.data_ptr()


def code(dtype: torch.dtype) -> int:
    """dtype code of the C interface.

    Raises:
        TypeError: the CPU kernels do not support the dtype.
    """
    try:
        return DTYPE_CODES[dtype]
    except KeyError:
        raise TypeError(f"rlkernel's CPU kernels take float32, bfloat16 and float16, not {dtype}") from None


threads = torch.get_num_threads
