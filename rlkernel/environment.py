"""Hardware, driver and library versions as data, for reports, metrics and benchmark results."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

_PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "tokenizers")


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of rlkernel, Python and the libraries that take part in a number."""
    from rlkernel import __version__

    found = {"rlkernel": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def environment() -> dict[str, Any]:
    """`{hardware, driver, versions}` of this machine; the GPU where torch sees one, else the CPU."""
    import torch

    if not torch.cuda.is_available():
        return {"hardware": _cpu_name(), "driver": None, "versions": versions()}
    driver = None
    try:
        import subprocess

        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        pass
    return {"hardware": torch.cuda.get_device_name(), "driver": driver, "versions": versions()}
