"""Hardware, driver and library versions as data, for reports, metrics and benchmark results."""

from __future__ import annotations

import contextlib
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M):
            return found[1].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of rlkernel, Python and the libraries that take part in a number."""
    from rlkernel import __version__

    found = {"rlkernel": __version__, "python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "numpy", "safetensors", "tokenizers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def environment() -> dict[str, Any]:
    """`{hardware, driver, versions}` of this machine; the hardware is the GPU if torch sees one, else the CPU."""
    import torch

    from rlkernel.kernels.verdicts import driver_version

    gpu = torch.cuda.is_available()
    hardware = torch.cuda.get_device_name() if gpu else _cpu_name()
    return {"hardware": hardware, "driver": driver_version() if gpu else None, "versions": versions()}
