"""Certified schedules: an op runs through the fastest way that equals its anchor to the bit on this machine.

Before its first use in a shape class every schedule is compared with the anchor, on fresh random and adversarial data
over several row counts. The verdict, with its evidence, is kept on disk by machine, library versions and source.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import secrets
import statistics
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlkernel.contract.bitwise import compare_bitwise
from rlkernel.kernels import build
from rlkernel.kernels.errors import BuildError

FORMAT = 2  # of the files; another number means that a file is not read
KINDS = ("normal", "wide", "cancel", "zeros", "denormal")
ANCHOR = "anchor"
_INT_VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Key = tuple[Hashable, ...]
Run = Callable[..., Any]
Runs = dict[Key, Run]  # what computes a call, by what decides it
First = Callable[..., Run]  # (what decides the call, the op's arguments) -> what computes it


class UncertifiedError(RuntimeError):
    """Strict mode met an op without a verdict; the message names op, shape class and reason."""


# ---- what an op brings ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """One way to compute an op.

    Attributes:
        name: unique in its op; what stands before the first dot is its group, which `without` takes too.
        bind: makes the callable (the op's arguments -> its result) for one shape class; its attribute `note`, where it
            has one, is added to the evidence.
        supports: whether the schedule computes this shape class at all.
    """

    name: str
    bind: Callable[[Key], Run]
    supports: Callable[[Key], bool] = lambda key: True


@dataclass(frozen=True)
class Family:
    """An op, its anchor and the schedules that may take the anchor's place.

    Attributes:
        op: the op's name.
        anchor: the definition of the bits.
        key: shape class of a call, from the op's arguments; M enters as a bucket.
        describe: the shape class as plain data, without the device's index.
        device: the device of a shape class.
        rows: row counts to compare, the last of which is timed.
        sample: arguments of the op for (key, rows, kind of values, generator).
        schedules: the candidates.
        sources: files whose change voids a verdict.
        unavailable: why nothing can be certified in this process, or None.
        versions: further library versions that a verdict depends on.
        mutates: positions of the arguments that the op writes (None among them is allowed). Every run of a comparison
            gets copies of its own, and they count among its results, after what it returns.
        warm: makes the function that callers call, the whole cost of dispatch: it takes what decides the shape class
            of a call (M as it is) as cheaply as it can be had, looks it up, asks `first` where it is new, and calls
            what it found. Default: by `key`.
    """

    op: str
    anchor: Run
    key: Callable[..., Key]
    describe: Callable[[Key], dict[str, Any]]
    device: Callable[[Key], torch.device]
    rows: Callable[[Key], Sequence[int]]
    sample: Callable[[Key, int, str, torch.Generator], tuple[Any, ...]]
    schedules: Sequence[Schedule]
    sources: Sequence[Path] = ()
    unavailable: Callable[[], str | None] = lambda: None
    versions: Callable[[], dict[str, str]] = dict
    mutates: Sequence[int] = ()
    warm: Callable[[Runs, First], Run] | None = None

    def dispatcher(self, runs: Runs, first: First) -> Run:
        """`warm`, or its default."""
        if self.warm is not None:
            return self.warm(runs, first)
        key = self.key

        def call(*args: Any) -> Any:
            found = key(*args)
            return (runs.get(found) or first(found, *args))(*args)

        return call


def values(
    kind: str, rows: int, k: int, dtype: torch.dtype, generator: torch.Generator, second: bool = False
) -> Tensor:  # [rows, k]
    """Values of one of `KINDS` for an operand of a product over k.

    wide: exponents spread evenly. cancel: with an operand that has `second`, sums grow large and fall back to small
    ones half a row later. zeros: zeros of both signs, whole rows of -0. denormal: the first operand holds denormal
    numbers of its dtype.

    Raises:
        ValueError: the kind is unknown.
    """
    narrow = dtype == torch.float16
    x = torch.randn(rows, k, dtype=dtype, device=generator.device, generator=generator)
    if kind == "wide":
        reach = 4 if narrow else 30
        x *= torch.exp2(torch.randint(-reach, reach + 1, (rows, k), device=x.device, generator=generator).to(dtype))
    elif kind == "cancel":
        half = k // 2
        if second:
            x[:, half : 2 * half] = x[:, :half]
        else:
            for first in (1, 2):  # a third of the columns stays as it is, and is what remains of the sum
                x[:, first:half:3] *= 64 if narrow else 1024
                x[:, half + first : 2 * half : 3] = -x[:, first:half:3]
    elif kind == "zeros":
        x *= (torch.rand(rows, k, device=x.device, generator=generator) > 0.6).to(dtype)
        if second:
            x[::3].abs_()
        else:
            x[::3] = -0.0  # all products of such a row with a positive one are -0: the sign of the chain's start shows
    elif kind == "denormal":
        if not second:
            x *= 2.0 ** (-17 if narrow else -128)
    elif kind != "normal":
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join(KINDS)}")
    return x


# ---- verdicts ------------------------------------------------------------------------------------


@dataclass
class Trial:
    """What was found on one schedule.

    Attributes:
        certified: equal to the anchor in every comparison.
        reason: why not, else how much was compared.
        elements: number of elements compared.
        first: where it first differed: kind, rows, index, actual, expected, ulps, mismatches, elements; also `result`,
            the tensor's number, where the op has several.
        ms: milliseconds at the largest row count, None where refused.
        note: what the schedule says of itself (an algorithm's number); another one later voids the verdict.
        passing: refused for want of a compiler or by an error that may not come again: not kept on disk.
    """

    name: str
    certified: bool
    reason: str
    elements: int = 0
    first: dict[str, Any] | None = None
    ms: float | None = None
    note: str = ""
    passing: bool = False


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


def verdict_dir() -> Path:
    """Folder of the verdict files, one a shape class."""
    return build.cache_dir() / "schedules"


def verdict_path(identity: dict[str, Any]) -> Path:
    """File of the verdict on an identity."""
    text = json.dumps(identity, sort_keys=True)
    return verdict_dir() / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def load(path: Path, format: int | str) -> dict[str, Any] | None:
    """What `keep` put into a file; None where there is none of that format, or an unreadable one, with a warning."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        return data if data["format"] == format else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _ignore(path, error)
        return None


def _ignore(path: Path, error: Exception) -> None:
    warnings.warn(f"rlkernel: ignoring the unreadable verdict {path}: {error!r}", RuntimeWarning, stacklevel=3)


def _read(path: Path) -> Verdict | None:
    """The verdict in a file; None where there is none or it is unreadable, the latter with a warning."""
    data = load(path, FORMAT)
    if data is None:
        return None
    try:
        trials = [Trial(**trial) for trial in data["trials"]]
        return Verdict(
            dict(data["identity"]), list(data["rows"]), list(data["kinds"]), int(data["seed"]),
            float(data["anchor_ms"]), trials,
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _ignore(path, error)
        return None


def keep(path: Path, data: dict[str, Any]) -> None:
    """Puts the file in its place at once; a cache that cannot be written costs a repetition, nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            json.dump(data, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        warnings.warn(f"rlkernel: could not keep a verdict in {path}: {error}", RuntimeWarning, stacklevel=2)


def _write(verdict: Verdict) -> None:
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
    }


@functools.cache
def _source_hash(sources: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for path in (Path(__file__), *sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def identity(family: Family, key: Key) -> dict[str, Any]:
    """What a verdict holds for: machine, versions, op, shape class, source."""
    found = {
        **machine(family.device(key)),
        **family.versions(),
        "op": family.op,
        "shape": family.describe(key),
        "schedules": [schedule.name for schedule in family.schedules],
        "source": _source_hash(tuple(family.sources)),
    }
    plain: dict[str, Any] = json.loads(json.dumps(found))  # as it comes back from a file
    return plain


# ---- certification -------------------------------------------------------------------------------


def _results(run: Run, arguments: tuple[Any, ...], mutates: Sequence[int]) -> list[Tensor]:
    """The tensors that a run returns, then those that it wrote, which are copies of the given ones."""
    own = list(arguments)
    for i in mutates:
        own[i] = None if own[i] is None else own[i].clone(memory_format=torch.preserve_format)
    returned = run(*own)
    returned = returned if isinstance(returned, (tuple, list)) else (returned,)
    return [t for t in (*returned, *(own[i] for i in mutates)) if t is not None]


def _first_difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, Any] | None:
    """`_difference` of the first result that differs, with its number under "result" where there are several."""
    if len(actual) != len(expected):
        return {"index": None, "actual": f"{len(actual)} results", "expected": f"{len(expected)} results", "ulps": None,
                "mismatches": None, "elements": None}  # fmt: skip
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        found = _difference(a, b)
        if found is not None:
            return found if len(expected) == 1 else {"result": i, **found}
    return None


def _difference(actual: Tensor, expected: Tensor) -> dict[str, Any] | None:
    """The first differing element and the count, or None; compares on the device, copies two elements."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return {"index": None, "actual": f"{tuple(actual.shape)} {actual.dtype}",
                "expected": f"{tuple(expected.shape)} {expected.dtype}", "ulps": None,
                "mismatches": expected.numel(), "elements": expected.numel()}  # fmt: skip
    view = _INT_VIEW[expected.element_size()]
    a, b = actual.contiguous().view(-1), expected.contiguous().view(-1)
    if torch.equal(a.view(view), b.view(view)):
        return None
    differs = a.view(view) != b.view(view)
    at = int(differs.to(torch.uint8).argmax())
    report = compare_bitwise(a[at : at + 1], b[at : at + 1])
    index = [int(i) for i in torch.unravel_index(torch.tensor(at), expected.shape)]
    # Texts, because JSON has no NaN.
    return {"index": index, "actual": repr(report.actual), "expected": repr(report.expected), "ulps": report.ulps,
            "mismatches": int(differs.sum()), "elements": expected.numel()}  # fmt: skip


def _poison(like: Sequence[Tensor]) -> None:
    """Fills the blocks that the allocator hands out next: a schedule that writes nothing must not find old results."""
    _ = [torch.full_like(t, float("nan") if t.is_floating_point() else -1) for t in like]


def _time(candidates: dict[str, Callable[[], object]], device: torch.device, rounds: int = 7) -> dict[str, float]:
    """Median milliseconds of each candidate; they take turns, after a cache flush and behind a wait on CUDA."""
    cuda = device.type == "cuda"
    flush = torch.empty(32 << 20, dtype=torch.int32, device=device) if cuda else None
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(rounds + 2):
        for name, fn in candidates.items():
            if flush is not None:
                flush.zero_()
                torch.cuda._sleep(400_000)  # launches queue up meanwhile, so that only the device's time counts
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                fn()
                end.record()
                end.synchronize()
                ms = begin.elapsed_time(end)
            else:
                start = time.perf_counter()
                fn()
                ms = (time.perf_counter() - start) * 1e3
            if turn >= 2:
                taken[name].append(ms)
    return {name: statistics.median(ms) for name, ms in taken.items()}


def certify(family: Family, key: Key, seed: int | None = None) -> tuple[Verdict, dict[str, Run]]:
    """Compares every schedule that supports the shape class with the anchor, and times the equal ones.

    Args:
        seed: of the data; fresh by default, and part of the evidence.

    Returns:
        The verdict and the bound callables of the certified schedules.

    Raises:
        Exception: whatever the anchor raises, and running out of memory; a schedule that raises is refused.
    """
    device = family.device(key)
    seed = secrets.randbits(31) if seed is None else seed
    generator = torch.Generator(device).manual_seed(seed)
    rows = list(family.rows(key))
    trials: dict[str, Trial] = {}
    bound: dict[str, Run] = {}

    def refuse(name: str, reason: str, first: dict[str, Any] | None = None, passing: bool = False) -> None:
        trials[name].certified, trials[name].reason, trials[name].first = False, reason, first
        trials[name].passing = passing
        bound.pop(name, None)

    for schedule in family.schedules:
        if schedule.supports(key):
            trials[schedule.name] = Trial(schedule.name, True, "")
            try:
                bound[schedule.name] = schedule.bind(key)
            except Exception as error:
                refuse(schedule.name, f"not offered here: {_short(error)}", passing=isinstance(error, BuildError))
    with torch.no_grad():
        for kind in KINDS:
            for m in rows:
                arguments = family.sample(key, m, kind, generator)
                expected = _results(family.anchor, arguments, family.mutates)
                for name in list(bound):
                    _poison(expected)
                    try:
                        first = _first_difference(_results(bound[name], arguments, family.mutates), expected)
                    except torch.OutOfMemoryError:
                        raise
                    except Exception as error:
                        refuse(name, f"raised at {m} rows, {kind}: {_short(error)}", passing=True)
                        continue
                    if first is not None:
                        refuse(name, "bits differ from the anchor's", {"kind": kind, "rows": m, **first})
                    else:
                        trials[name].elements += sum(t.numel() for t in expected)
        arguments = family.sample(key, rows[-1], KINDS[0], generator)
        candidates = {name: functools.partial(run, *arguments) for name, run in bound.items()}
        times = _time({ANCHOR: functools.partial(family.anchor, *arguments), **candidates}, device)
    for name in bound:
        trials[name].ms = times[name]
        trials[name].note = getattr(bound[name], "note", "")
        trials[name].reason = f"equal in {trials[name].elements} elements{trials[name].note}"
    found = Verdict(identity(family, key), rows, list(KINDS), seed, times[ANCHOR], list(trials.values()))
    return found, bound


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


# ---- dispatch ------------------------------------------------------------------------------------

_lock = threading.RLock()
_ops: dict[str, ScheduledOp] = {}
_strict = False
_off: tuple[frozenset[str], ...] = ()  # one set a nested `without`; an empty set switches every schedule off
MOST_CALLS = 1 << 14  # calls that an op remembers, beyond which it forgets all: row counts are without end


def _is_off(name: str) -> bool:
    return any(not names or name in names or name.split(".", 1)[0] in names for names in _off)


def _capturing(device: torch.device) -> bool:
    with _on(device):
        return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class ScheduledOp:
    """An op that calls the schedule chosen for the shape class of its arguments; callable like the op.

    Warm, a call costs what decides it and one dictionary lookup; `call` is the function that does both, without the
    cost of an object's call. The first call of a class certifies or reads the verdict. Under graph capture nothing is
    certified: a class that is not settled yet runs its anchor there.
    """

    def __init__(self, family: Family) -> None:
        self.family = family
        self._runs: Runs = {}
        self.call = family.dispatcher(self._runs, self._first)
        self._verdicts: dict[Key, Verdict] = {}
        self._bound: dict[Key, dict[str, Run]] = {}
        self._failed: dict[Key, str] = {}
        _ops[family.op] = self

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def _first(self, call: Key, *args: Any) -> Run:
        run, settled = self._settle(self.family.key(*args))
        if settled:
            if len(self._runs) >= MOST_CALLS:
                self._runs.clear()
            self._runs[call] = run
        return run

    def forget(self, verdicts: bool = False) -> None:
        """Decides anew at the next call; with `verdicts` also what this process knows of the files."""
        with _lock:
            self._runs.clear()
            self._failed.clear()
            if verdicts:
                self._verdicts.clear()
                self._bound.clear()

    def verdict(self, *args: Any) -> Verdict | None:
        """The verdict for the shape class of these arguments, certified now where there is none yet; None where no
        schedule computes the class or nothing can be certified."""
        key = self.family.key(*args)
        self._settle(key)
        return self._verdicts.get(key)

    def chosen(self, *args: Any) -> str:
        """Name of the schedule that computes these arguments at present, ANCHOR included."""
        key = self.family.key(*args)
        run, _ = self._settle(key)
        bound = self._bound.get(key, {})
        return next((name for name, fn in bound.items() if fn is run), ANCHOR)

    def verdicts(self) -> list[Verdict]:
        """All verdicts that this process has used."""
        return list(self._verdicts.values())

    def failures(self) -> list[tuple[dict[str, Any], str]]:
        """Shape classes that could not be certified, with the reason."""
        return [(self.family.describe(key), reason) for key, reason in self._failed.items()]

    def unsupported(self) -> list[dict[str, Any]]:
        """Shape classes met so far that no schedule computes on their device: they run the anchor."""
        return [self.family.describe(key) for key in self._bound if key not in self._verdicts]

    def _settle(self, key: Key) -> tuple[Run, bool]:
        """What computes a shape class, and whether that stays so."""
        with _lock:
            family = self.family
            if key not in self._bound:
                reason = self._failed.get(key) or family.unavailable()
                capturing = False
                if reason is None and any(schedule.supports(key) for schedule in family.schedules):
                    capturing = _capturing(family.device(key))
                    if capturing:
                        reason = "its first use fell into a CUDA graph capture; run the shape once before"
                    else:
                        reason = self._judge(key)
                elif reason is None:
                    self._bound[key] = {}
                if reason is not None:
                    if _strict:
                        raise UncertifiedError(f"{family.op} {family.describe(key)} is not certified: {reason}")
                    return family.anchor, not capturing
            if key not in self._verdicts:
                return family.anchor, True
            return self._bound[key].get(self._verdicts[key].fastest(_is_off), family.anchor), True

    def _judge(self, key: Key) -> str | None:
        """Reads or makes the verdict of a class; returns why there is none."""
        family = self.family
        wanted = identity(family, key)
        found = _read(verdict_path(wanted))
        try:
            with _on(family.device(key)):
                if found is not None and found.identity == wanted:
                    bound = self._rebind(key, found)
                    if bound is not None:
                        self._verdicts[key], self._bound[key] = found, bound
                        return None
                self._verdicts[key], self._bound[key] = certify(family, key)
        except Exception as error:
            reason = self._failed[key] = f"certification failed: {_short(error)}"
            warnings.warn(
                f"rlkernel: {family.op} {family.describe(key)} runs its anchor, {reason}", RuntimeWarning, stacklevel=5
            )
            return reason
        if not any(trial.passing for trial in self._verdicts[key].trials):
            _write(self._verdicts[key])
        return None

    def _rebind(self, key: Key, verdict: Verdict) -> dict[str, Run] | None:
        """Callables of the certified schedules; None, so that the verdict is void, where one is no longer offered or
        would be something else: a library may rank its algorithms anew."""
        certified = {trial.name: trial for trial in verdict.trials if trial.certified}
        try:
            bound = {s.name: s.bind(key) for s in self.family.schedules if s.name in certified}
        except Exception:
            return None
        same = all(getattr(run, "note", "") == certified[name].note for name, run in bound.items())
        return bound if same else None


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def scheduled_ops() -> tuple[ScheduledOp, ...]:
    """Every op with schedules whose module is loaded."""
    return tuple(_ops.values())


def _decide_anew() -> None:
    for op in _ops.values():
        with _lock:
            op._runs.clear()


def set_strict(on: bool) -> None:
    """Whether an op with schedules but no verdict raises `UncertifiedError` in place of running its anchor."""
    global _strict
    _strict = on
    _decide_anew()


@contextlib.contextmanager
def strict(on: bool = True) -> Iterator[None]:
    """`set_strict` for a block."""
    before = _strict
    set_strict(on)
    try:
        yield
    finally:
        set_strict(before)


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Switches schedules (or groups of them, "cublaslt") off in a block; without names, all. No bit changes by it."""
    global _off
    before = _off
    _off = (*before, frozenset(names))
    _decide_anew()
    try:
        yield
    finally:
        _off = before
        _decide_anew()


def report(device: torch.device) -> list[dict[str, Any]]:
    """Every verdict on this machine, a row a schedule: op, shape, schedule, certified, reason, first, ms, anchor_ms,
    speed (the anchor's time over the schedule's) and whether it is the chosen one."""
    here = machine(device)
    found: dict[str, Verdict] = {}
    current = {op.family.op: _source_hash(tuple(op.family.sources)) for op in _ops.values()}
    for path in sorted(verdict_dir().glob("*.json")) if verdict_dir().is_dir() else ():
        verdict = _read(path)
        if verdict is not None and here.items() <= verdict.identity.items():
            found[json.dumps(verdict.identity, sort_keys=True)] = verdict
    for op in _ops.values():
        for verdict in op.verdicts():
            found[json.dumps(verdict.identity, sort_keys=True)] = verdict
    rows = []
    for verdict in found.values():
        op_name = verdict.identity["op"]
        if verdict.identity["source"] != current.get(op_name, verdict.identity["source"]):
            continue
        chosen = verdict.fastest(_is_off)
        common = {"op": op_name, "shape": verdict.identity["shape"], "anchor_ms": verdict.anchor_ms}
        rows.append({**common, "schedule": ANCHOR, "certified": True, "reason": "defines the bits", "first": None,
                     "ms": verdict.anchor_ms, "speed": 1.0, "chosen": chosen == ANCHOR})  # fmt: skip
        for t in verdict.trials:
            speed = verdict.anchor_ms / t.ms if t.ms else None
            rows.append({**common, "schedule": t.name, "certified": t.certified, "reason": t.reason, "first": t.first,
                         "ms": t.ms, "speed": speed, "chosen": chosen == t.name})  # fmt: skip
    return rows
