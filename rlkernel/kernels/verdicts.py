"""Verdicts of certification and their files: one for each shape class, machine, library versions and source digest.

An unreadable file is ignored with a warning; a folder that cannot be written only means that certification is repeated.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
import subprocess
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
LEAST = 1 << 12  # elements of each kind of values that must have been compared before a schedule is certified
ANCHOR = "anchor"  # name of the implementation that defines the bits, in a verdict


@dataclass
class Trial:
    """What certification found about one schedule.

    Attributes:
        certified: equal to the anchor in every comparison.
        reason: why not, else how much was compared.
        elements: number of elements compared.
        least: the smallest number of elements compared of one kind of values; 0 where refused.
        first: where it first differed: kind, rows, index, actual, expected, ulps, mismatches, elements; also `result`,
            the number of the tensor, where the op returns several.
        ms: milliseconds at the largest row count, None where refused.
        note: what the schedule says about itself (an algorithm's number); a different note later voids the verdict.
        missing: it could not be built or loaded here; a later process certifies the class anew once it can be.
    """

    name: str
    certified: bool
    reason: str
    elements: int = 0
    least: int = 0
    first: dict[str, Any] | None = None
    ms: float | None = None
    note: str = ""
    missing: bool = False


@dataclass
class Verdict:
    """Outcome of the certification of one shape class; `identity` is what it holds for."""

    identity: dict[str, Any]
    rows: list[int]
    kinds: list[str]
    seed: int
    anchor_ms: float
    trials: list[Trial] = field(default_factory=list)

    def fastest(self, off: Callable[[str], bool] = lambda name: False) -> str:
        """The fastest certified schedule for which `off` is false; ANCHOR where none is faster than the anchor."""
        best, best_ms = ANCHOR, self.anchor_ms
        for trial in self.trials:
            if trial.certified and trial.ms is not None and trial.ms < best_ms and not off(trial.name):
                best, best_ms = trial.name, trial.ms
        return best

    def missing(self) -> str | None:
        """The first schedule that could not be built or loaded, with the reason; None where there is none."""
        return next((f"{trial.name} {trial.reason}" for trial in self.trials if trial.missing), None)


def verdict_dir() -> Path:
    """Folder of the verdict files."""
    return build.cache_dir() / "schedules"


def files() -> list[Path]:
    """All verdict files; none where there is no cache, or its folder cannot be read."""
    try:
        return sorted(path for path in verdict_dir().iterdir() if path.suffix == ".json")
    except (OSError, BuildError):
        return []


def verdict_path(identity: dict[str, Any]) -> Path | None:
    """File of the verdict on an identity; None where there is no cache."""
    try:
        return verdict_dir() / f"{_sha256(identity)[:24]}.json"
    except BuildError:
        return None


def _sha256(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def load(path: Path | None, format: int | str) -> dict[str, Any] | None:
    """The data that `keep` wrote; None where there is none of that format, or with a warning where it is damaged."""
    if path is None:
        return None
    try:
        found = json.loads(path.read_text())
        if found["format"] != format:
            return None
        data: dict[str, Any] = found["data"]
        if found["sha256"] != _sha256(data):
            raise ValueError("its checksum does not match")
        return data
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        warnings.warn(f"rlkernel: ignoring the unreadable verdict {path}: {error!r}", RuntimeWarning, stacklevel=3)
        return None


def read(path: Path | None) -> Verdict | None:
    """The verdict in a file; None where there is none, or with a warning where it is damaged."""
    data = load(path, FORMAT)
    return None if data is None else Verdict(**{**data, "trials": [Trial(**trial) for trial in data["trials"]]})


def keep(path: Path | None, data: dict[str, Any], format: int | str) -> None:
    """Writes the file atomically, or warns."""
    if path is None:
        warnings.warn(f"rlkernel: could not keep a verdict: {build.NO_CACHE}", RuntimeWarning, stacklevel=2)
        return
    content = {"format": format, "sha256": _sha256(data), "data": data}
    try:
        build.put(path, json.dumps(content, indent=1).encode())
    except OSError as error:
        warnings.warn(f"rlkernel: could not keep a verdict in {path}: {error}", RuntimeWarning, stacklevel=2)


def write(verdict: Verdict) -> None:
    """Keeps a verdict under its identity."""
    keep(verdict_path(verdict.identity), asdict(verdict), FORMAT)


def _driver() -> str | None:
    """Version of NVIDIA's kernel driver; None where there is none."""
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text())
        if found:
            return found[0]
    except OSError:
        pass
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def _ptxas(device: torch.device) -> str | None:
    """Version of the assembler that Triton's kernels go through, which a user may replace; None where it is unknown."""
    try:
        from triton.backends.nvidia.compiler import get_ptxas  # no stable interface

        major, minor = torch.cuda.get_device_capability(device)
        program = get_ptxas(10 * major + minor).path
        printed = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
        return re.findall(r"\bV(\d[\d.]*)", printed)[-1]
    except Exception:
        return None


@functools.cache
def machine(device: torch.device) -> dict[str, Any]:
    """Device name, driver and library versions that decide what a kernel computes."""
    cuda = device.type == "cuda"
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "driver": _driver() if cuda else None,
        "torch": torch.__version__,
        "triton": triton,
        "ptxas": _ptxas(device) if cuda and torch.version.hip is None else None,
    }


@functools.cache
def source_digest() -> str:
    """First 16 hex digits of the SHA-256 over everything that a GPU op's bits come from: `rlkernel/kernels`,
    `rlkernel/contract` and `csrc/cuda`."""
    kernels = Path(__file__).parent
    folders = {"kernels": kernels, "contract": kernels.parent / "contract", "cuda": build.source_dir() / "cuda"}
    digest = hashlib.sha256()
    for name, folder in folders.items():
        for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".cu", ".cuh", ".cpp", ".h")):
            digest.update(f"{name}/{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
