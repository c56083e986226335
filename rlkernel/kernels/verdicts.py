"""Verdicts of certification and their files: one a shape class, kept by machine, library versions and source.

An unreadable file is ignored with a warning; a folder that cannot be written costs a repetition, nothing else.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import platform
import re
import subprocess
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from rlkernel.kernels import build
from rlkernel.kernels.errors import BuildError

FORMAT = 3  # of the files; another number means that a file is not read
LEAST = 1 << 12  # elements compared of each kind of values, below which nothing is certified or believed
ANCHOR = "anchor"  # name of what defines the bits, in a verdict


@dataclass
class Trial:
    """What was found on one schedule.

    Attributes:
        certified: equal to the anchor in every comparison.
        reason: why not, else how much was compared.
        elements: number of elements compared.
        least: the same of the kind of values of which fewest were; 0 where refused.
        first: where it first differed: kind, rows, index, actual, expected, ulps, mismatches, elements; also `result`,
            the tensor's number, where the op has several.
        ms: milliseconds at the largest row count, None where refused.
        note: what the schedule says of itself (an algorithm's number); another one later voids the verdict.
        passing: why a refusal may not last: "build", no compiler or library for it, or "run", it raised; else "".
            Such a schedule is tried again by the next process.
    """

    name: str
    certified: bool
    reason: str
    elements: int = 0
    least: int = 0
    first: dict[str, Any] | None = None
    ms: float | None = None
    note: str = ""
    passing: str = ""


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
        """The fastest certified schedule for which `off` does not hold; ANCHOR where none beats it."""
        best, best_ms = ANCHOR, self.anchor_ms
        for trial in self.trials:
            if trial.certified and trial.ms is not None and trial.ms < best_ms and not off(trial.name):
                best, best_ms = trial.name, trial.ms
        return best

    def lacking(self) -> str | None:
        """Why strict mode refuses the class: a schedule that could not be built, or nothing certified beside one that
        raised; None where nothing is missing."""
        some = any(trial.certified for trial in self.trials)
        missing = (t for t in self.trials if t.passing == "build" or (t.passing and not some))
        return next((f"{t.name} {t.reason}" for t in missing), None)


def verdict_dir() -> Path:
    """Folder of the verdict files, one a shape class."""
    return build.cache_dir() / "schedules"


def files() -> list[Path]:
    """The verdict files that there are; none where there is no cache, or its folder cannot be entered."""
    try:
        return sorted(path for path in verdict_dir().iterdir() if path.suffix == ".json")
    except (OSError, BuildError):
        return []


def verdict_path(identity: dict[str, Any]) -> Path | None:
    """File of the verdict on an identity; None where there is no cache."""
    text = json.dumps(identity, sort_keys=True)
    try:
        return verdict_dir() / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    except BuildError:
        return None


def load(path: Path | None, format: int | str) -> dict[str, Any] | None:
    """What `keep` put into a file; None where there is none of that format, or an unreadable one, with a warning."""
    if path is None:
        return None
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        return data if data["format"] == format else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _ignore(path, error)
        return None


def _ignore(path: Path | None, error: Exception) -> None:
    warnings.warn(f"rlkernel: ignoring the unreadable verdict {path}: {error!r}", RuntimeWarning, stacklevel=3)


def read(path: Path | None) -> Verdict | None:
    """The verdict in a file; None where there is none or it is unreadable, the latter with a warning."""
    data = load(path, FORMAT)
    if data is None:
        return None
    try:
        trials = [Trial(**trial) for trial in data["trials"]]
        for trial in trials:
            _of_type(asdict(trial), _TRIAL)
            _of_type(trial.first or _FIRST, {name: object for name in _FIRST})
            trial.ms = None if trial.ms is None else _time(trial.ms)
            if trial.certified and trial.least < LEAST:
                raise ValueError(f"{trial.name} is certified by {trial.least} elements of a kind of values")
            if trial.certified and (trial.first is not None or trial.ms is None):
                raise ValueError(f"{trial.name} is certified with first={trial.first} and ms={trial.ms}")
        identity = dict(data["identity"])
        _of_type(identity, {"op": str, "shape": dict})
        _of_type(data, {"rows": list, "kinds": list, "seed": int})
        if not 0 <= data["seed"] < 1 << 62:
            raise ValueError(f"seed is {data['seed']}")
        return Verdict(identity, data["rows"], data["kinds"], data["seed"], _time(data["anchor_ms"]), trials)
    except (ArithmeticError, ValueError, KeyError, TypeError, AttributeError) as error:
        _ignore(path, error)
        return None


_TRIAL: dict[str, Any] = {
    "name": str, "certified": bool, "reason": str, "elements": int, "least": int, "first": dict | None,
    "ms": float | int | None, "note": str, "passing": str,
}  # fmt: skip
_FIRST = dict.fromkeys(("kind", "rows", "index", "actual", "expected", "mismatches", "elements"))


def _of_type(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises where a field lacks or is of another type: what reads a verdict later does not ask."""
    for name, kind in wanted.items():
        if not isinstance(found[name], kind):
            raise TypeError(f"{name} is {found[name]!r}")


def _time(ms: Any) -> float:
    """Milliseconds as a finite number, not below 0; an integer may be larger than any float."""
    if isinstance(ms, bool) or not isinstance(ms, (int, float)) or not 0.0 <= float(ms) < math.inf:
        raise ValueError(f"a time is {ms!r}")
    return float(ms)


def keep(path: Path | None, data: dict[str, Any]) -> None:
    """Puts the file in its place at once, or warns."""
    if path is None:
        warnings.warn(f"rlkernel: could not keep a verdict: {build.NO_CACHE}", RuntimeWarning, stacklevel=2)
        return
    try:
        build.put(path, json.dumps(data, indent=1).encode())
    except OSError as error:
        warnings.warn(f"rlkernel: could not keep a verdict in {path}: {error}", RuntimeWarning, stacklevel=2)


def write(verdict: Verdict) -> None:
    """Keeps a verdict under its identity."""
    keep(verdict_path(verdict.identity), {"format": FORMAT, **asdict(verdict)})


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
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
        return re.findall(r"\bV(\d[\d.]*)", said)[-1]
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


_loaded: dict[Path, bytes] = {}  # digests of the sources as this process first met them


def _content(path: Path) -> bytes:
    """SHA-256 of a file; of one that cannot be read, nothing."""
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return b""


def remember(sources: Iterable[Path]) -> None:
    """Takes what sources hold now for what this process runs, but for those that it knows: called at import, before
    an update can put others in their place."""
    for path in sources:
        if path not in _loaded:
            _loaded[path] = _content(path)


def changed(sources: Iterable[Path]) -> list[Path]:
    """Those of remembered sources that hold something else now, or cannot be read."""
    return [path for path in sources if _content(path) != _loaded[path] or not _loaded[path]]


@functools.cache
def source_hash(sources: tuple[Path, ...]) -> str:
    """First 16 hex digits of the SHA-256 over names and contents of files, as this process first met them."""
    remember(sources)
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.name.encode() + b"\0" + _loaded[path])
    return digest.hexdigest()[:16]
