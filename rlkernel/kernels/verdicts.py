"""Verdicts of certification and their files: one per shape class, machine, library versions and source digest.

A damaged file is ignored with a warning. Without a writable cache every process certifies again.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import platform
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from rlkernel.kernels import build
from rlkernel.kernels.errors import BuildError

FORMAT = 4  # of the files; files of another format are not read
ANCHOR = "anchor"  # name of the implementation that defines the bits, in a verdict


@dataclass
class Trial:
    """What certification found about one schedule.

    Attributes:
        certified: equal to the anchor in every comparison.
        reason: why it was refused, or how much was compared.
        elements: number of elements compared.
        least: the smallest number of elements compared of one kind of values; 0 if refused.
        first: the first difference: kind, rows, index, actual, expected, ulps, mismatches, elements, and `result`, the
            number of the tensor, for an op with several results.
        ms: milliseconds at the largest row count, None if refused.
        note: the schedule's description of itself, such as an algorithm's number; a new note voids the verdict.
        missing: it could not be built on this machine.
    """

    name: str
    certified: bool = True
    reason: str = ""
    elements: int = 0
    least: int = 0
    first: dict[str, Any] | None = None
    ms: float | None = None
    note: str = ""
    missing: bool = False


@dataclass
class Verdict:
    """Outcome of the certification of one shape class.

    Attributes:
        identity: everything that the outcome depends on, `certification.identity`.
        rows, kinds, seed: row counts, kinds of values and seed of the compared samples.
        anchor_ms: milliseconds of the anchor at the largest row count.
        trials: one per schedule that supports the class.
    """

    identity: dict[str, Any]
    rows: list[int]
    kinds: list[str]
    seed: int
    anchor_ms: float
    trials: list[Trial] = field(default_factory=list)

    def fastest(self, off: Callable[[str], bool] = lambda name: False) -> str:
        """The fastest certified schedule for which `off` is false; ANCHOR if none is faster than the anchor."""
        times = {t.name: t.ms for t in self.trials if t.certified and t.ms is not None and not off(t.name)}
        return min(times, key=times.__getitem__) if times and min(times.values()) < self.anchor_ms else ANCHOR

    def missing(self) -> str | None:
        """The first schedule that could not be built, with the reason; None if all were built."""
        return next((f"{trial.name} {trial.reason}" for trial in self.trials if trial.missing), None)


def verdict_dir() -> Path:
    """Folder of the verdict files."""
    return build.cache_dir() / "schedules"


def _sha256(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _file_name(identity: dict[str, Any]) -> str:
    return f"{_sha256(identity)[:24]}.json"


def _read(path: Path) -> Verdict | None:
    """The verdict in a file; None if it has another format, or with a warning if it is damaged."""
    try:
        found = json.loads(path.read_text())
        if found["format"] != FORMAT:
            return None
        data = found["data"]
        if found["sha256"] != _sha256(data) or path.name != _file_name(data["identity"]):
            raise ValueError("its checksum or its name does not match")
        return Verdict(**{**data, "trials": [Trial(**trial) for trial in data["trials"]]})
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"rlkernel: ignoring the unreadable verdict {path}: {error!r}", RuntimeWarning, stacklevel=2)
        return None


def stored(file_name: str = "*.json") -> list[Verdict]:
    """All stored verdicts, or that of one file; none without a readable cache."""
    try:
        paths = sorted(verdict_dir().glob(file_name))
    except (OSError, BuildError):
        return []
    return [verdict for verdict in map(_read, paths) if verdict is not None]


def load(identity: dict[str, Any]) -> Verdict | None:
    """The stored verdict with this identity; None if there is none."""
    return next(iter(stored(_file_name(identity))), None)


def store(verdict: Verdict) -> None:
    """Writes a verdict to its file atomically, or warns."""
    data = asdict(verdict)
    content = json.dumps({"format": FORMAT, "sha256": _sha256(data), "data": data}, indent=1)
    try:
        build.put(verdict_dir() / _file_name(verdict.identity), content.encode())
    except (OSError, BuildError) as error:
        place = f" in {verdict_dir()}" if isinstance(error, OSError) else ""
        warnings.warn(f"rlkernel: could not keep a verdict{place}: {error}", RuntimeWarning, stacklevel=2)


def driver_version() -> str | None:
    """Version of NVIDIA's kernel driver, from NVML; None without one."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(80)
    found = nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0
    return text.value.decode() if found else None


def _ptxas(device: torch.device) -> str | None:
    """Build of the assembler of Triton's kernels, which TRITON_PTXAS_PATH replaces; None if it is unknown."""
    try:
        from triton.backends.nvidia.compiler import get_ptxas_version  # no stable interface

        major, minor = torch.cuda.get_device_capability(device)
        return get_ptxas_version(10 * major + minor).split()[-1]
    except Exception:
        return None


@functools.cache
def machine(device: torch.device) -> dict[str, Any]:
    """Device name, driver and library versions that decide what a kernel computes."""
    found: dict[str, Any] = {"device": platform.machine(), "torch": torch.__version__}
    if device.type == "cuda":
        found |= {"device": torch.cuda.get_device_name(device), "driver": driver_version(), "ptxas": _ptxas(device)}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["triton"] = metadata.version("triton")
    return found


@functools.cache
def source_digest() -> str:
    """First 16 hex digits of the SHA-256 over every file that decides the bits of a GPU op: `rlkernel/kernels`,
    `rlkernel/contract` and `csrc/cuda`."""
    kernels = Path(__file__).parent
    folders = {"kernels": kernels, "contract": kernels.parent / "contract", "cuda": build.source_dir() / "cuda"}
    digest = hashlib.sha256()
    for name, folder in folders.items():
        for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".cu", ".cuh", ".cpp", ".h")):
            digest.update(f"{name}/{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
