"""Named NVTX ranges for Nsight Systems around the phases of a training step and of an engine step.

They are off unless `RLKERNEL_NVTX=1` is set when this module is imported.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch

_OFF = contextlib.nullcontext()


def _wanted() -> bool:
    value = os.environ.get("RLKERNEL_NVTX", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"RLKERNEL_NVTX={value!r}; expected 1 (ranges on) or 0 (off)")
    if value == "1" and not torch.backends.cuda.is_built():
        raise RuntimeError("RLKERNEL_NVTX=1 needs a CUDA build of torch, and this is a CPU build; unset it")
    return value == "1"


_on = _wanted()


def range(name: str) -> contextlib.AbstractContextManager[Any]:
    """A block that a profiler shows as `name` on the calling thread; does nothing unless RLKERNEL_NVTX=1."""
    return torch.cuda.nvtx.range(name) if _on else _OFF
