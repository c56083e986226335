"""Dispatch of ops with certified schedules: the fastest implementation whose bytes equal the anchor's on this machine.

The verdict of a call's shape class names it; the first call of a class reads the verdict from disk (`verdicts.py`) or
makes it (`certification.py`). This module also holds strict mode, `without`, and the report of all verdicts.
"""

from __future__ import annotations

import contextlib
import json
import threading
import warnings
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic

import torch

from rlkernel.kernels import certification, verdicts
from rlkernel.kernels.certification import Family, Run, ShapeT, current, describe, device_of, identity, one_line
from rlkernel.kernels.errors import LaunchError
from rlkernel.kernels.switch import Switch
from rlkernel.kernels.verdicts import ANCHOR, Verdict, read, verdict_path, write


class UncertifiedError(RuntimeError):
    """An op without a verdict ran in strict mode; the message names op, shape class and reason."""


_lock = threading.RLock()
_ops: dict[str, ScheduledOp[Any]] = {}
MOST_CALLS = 1 << 14  # calls that an op remembers before it forgets all, because row counts are unbounded


@dataclass
class _Class:
    """What is known of a shape class: its verdict and the callables of its certified schedules, or why there is none.
    Without both, no schedule supports the class."""

    verdict: Verdict | None = None
    bound: dict[str, Run] = field(default_factory=dict)
    failure: str | None = None


class ScheduledOp(Generic[ShapeT]):
    """An op that runs the schedule chosen for the shape class of its arguments.

    A warm call costs its `call_key` and one dictionary lookup. During CUDA graph capture nothing is certified: a class
    without a verdict runs its anchor, with a warning. If a schedule cannot allocate memory, the anchor computes that
    call; any other error is raised to the caller.

    Attributes:
        call: the op as a function, cheaper to call than the object.
    """

    def __init__(self, family: Family[ShapeT]) -> None:
        self.family = family
        self._runs: dict[Hashable, Run] = {}  # by `call_key`
        self._classes: dict[ShapeT, _Class] = {}
        self._warned: set[Hashable] = set()
        self.call = self._dispatcher()
        _ops[family.op] = self

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def _dispatcher(self) -> Run:
        runs, first, anchor = self._runs, self._first, self.family.anchor
        call_key = self.family.call_key or self.family.shape

        def dispatch(*args: Any) -> Any:
            key = call_key(*args)
            run = runs.get(key) or first(key, args)
            try:
                return run(*args)
            except torch.OutOfMemoryError as error:
                if run is anchor:
                    raise
                reason = f"because memory was refused: {one_line(error)}"
                self._warn(self.family.shape(*args), f"ran its anchor in a call, {reason}", reason)
            return anchor(*args)  # outside the except block, whose traceback holds the schedule's memory

        return dispatch

    def _first(self, key: Hashable, args: tuple[Any, ...]) -> Run:
        with _lock:  # a switch that changes meanwhile clears `_runs` afterwards
            run, final = self._settle(self.family.shape(*args))
            if final:
                if len(self._runs) >= MOST_CALLS:
                    self._runs.clear()
                self._runs[key] = run
        return run

    def _warn(self, shape: ShapeT, text: str, once: Hashable) -> None:
        """Warns unless a warning with the same `once` was given."""
        if once not in self._warned:
            self._warned.add(once)
            warnings.warn(f"rlkernel: {self.family.op} {describe(shape)} {text}", RuntimeWarning, stacklevel=4)

    def forget(self) -> None:
        """Decides again at the next call, from the files."""
        with _lock:
            self._runs.clear()
            self._classes.clear()

    def verdict(self, *args: Any) -> Verdict | None:
        """The verdict for the shape class of these arguments, certified now if necessary; None if no schedule supports
        the class or it cannot be certified."""
        return self.verdict_of(self.family.shape(*args))

    def verdict_of(self, shape: ShapeT) -> Verdict | None:
        """`verdict` for a shape class, without arguments."""
        self._settle(shape)
        return self._classes.get(shape, _Class()).verdict

    def chosen(self, *args: Any) -> str:
        """Name of the schedule that computes these arguments at present, or ANCHOR."""
        shape = self.family.shape(*args)
        run, _ = self._settle(shape)
        bound = self._classes.get(shape, _Class()).bound
        return next((name for name, fn in bound.items() if fn is run), ANCHOR)

    def verdicts(self) -> list[Verdict]:
        """All verdicts that this process has used."""
        return [known.verdict for known in list(self._classes.values()) if known.verdict]

    def failures(self) -> list[tuple[dict[str, Any], str]]:
        """Shape classes that could not be certified, with the reason."""
        return [(describe(shape), known.failure) for shape, known in list(self._classes.items()) if known.failure]

    def unsupported(self) -> list[dict[str, Any]]:
        """Shape classes met so far that no schedule supports: they run the anchor."""
        return [describe(shape) for shape, known in list(self._classes.items()) if known == _Class()]

    def _settle(self, shape: ShapeT) -> tuple[Run, bool]:
        """What computes a shape class, and whether that is final."""
        with _lock:
            known = self._classes.get(shape)
            new = known is None and any(schedule.supports(shape) for schedule in self.family.schedules)
            undecided = new and certification.capturing(device_of(shape))
            if undecided:
                known = _Class(failure="its first use was in a CUDA graph capture; run the shape once before")
                self._warn(shape, f"runs its anchor: {known.failure}", shape)
            elif known is None:
                known = self._classes[shape] = self._decide(shape) if new else _Class()
            if _strict.now and (reason := known.failure or (known.verdict and known.verdict.missing())):
                raise UncertifiedError(f"{self.family.op} {describe(shape)} is not certified: {reason}")
            name = known.verdict.fastest(_is_off) if known.verdict else ANCHOR
            return known.bound.get(name, self.family.anchor), not undecided

    def _decide(self, shape: ShapeT) -> _Class:
        """Reads the verdict of a class from its file, or makes and writes it."""
        try:
            with current(device_of(shape)):
                wanted = identity(self.family, shape)
                found = read(verdict_path(wanted))
                bound = self._bind(shape, found) if found is not None and found.identity == wanted else None
                if found is None or bound is None:
                    found, bound = certification.certify(self.family, shape)
                    write(found)
        except Exception as error:
            reason = f"certification failed: {one_line(error)}"
            self._warn(shape, f"runs its anchor, {reason}", (shape, reason))
            return _Class(failure=reason)
        for trial in found.trials:
            if trial.missing:
                self._warn(shape, f"runs without {trial.name}: {trial.reason}", trial.reason)
        return _Class(found, bound)

    def _bind(self, shape: ShapeT, verdict: Verdict) -> dict[str, Run] | None:
        """Callables of the certified schedules. None, which voids the verdict, if one is no longer offered or has
        another note, because a library may rank its algorithms differently.

        Raises:
            LaunchError, torch.OutOfMemoryError: the GPU has no memory to load one; the verdict stays valid.
        """
        certified = {trial.name: trial.note for trial in verdict.trials if trial.certified}
        bound: dict[str, Run] = {}
        for schedule in self.family.schedules:
            if schedule.name in certified:
                try:
                    run = schedule.bind(shape)
                except (LaunchError, torch.OutOfMemoryError):
                    raise
                except Exception:
                    return None
                if getattr(run, "note", "") != certified[schedule.name]:
                    return None
                bound[schedule.name] = run
        return bound


def scheduled_ops() -> tuple[ScheduledOp[Any], ...]:
    """Every op with schedules whose module is loaded."""
    return tuple(_ops.values())


# ---- switches ------------------------------------------------------------------------------------


def _decide_anew() -> None:
    for op in scheduled_ops():
        op._runs.clear()


_strict = Switch(False, _lock, _decide_anew)
_off = Switch[frozenset[str]](frozenset(), _lock, _decide_anew)  # names of schedules and groups; "" is all of them


def _is_off(name: str) -> bool:
    return not _off.now.isdisjoint(("", name, name.split(".", 1)[0]))


def _check_flag(on: bool) -> None:
    if not isinstance(on, bool):
        raise TypeError(f"strict mode is True or False, not {on!r}")


def set_strict(on: bool) -> None:
    """Sets strict mode, also inside open blocks of `strict`: an op that has schedules but no verdict raises
    `UncertifiedError` instead of running its anchor.

    Raises:
        TypeError: `on` is not a bool.
    """
    _check_flag(on)
    _strict.set(on)


@contextlib.contextmanager
def strict(on: bool = True) -> Iterator[None]:
    """Strict mode inside a block; where blocks of several threads overlap, the last one to begin decides."""
    _check_flag(on)
    with _strict.block(on):
        yield


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Switches schedules, or groups such as "cublaslt", off inside a block; without names, all. No bit depends on it.

    Raises:
        TypeError: a name is not a string.
        ValueError: no op has a schedule or group of that name; checked once the ops with schedules are loaded, which
            the first op on a GPU does.
    """
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"without takes names of schedules as strings, not {names!r}")
    known = {schedule.name for op in scheduled_ops() for schedule in op.family.schedules}
    groups = {name.split(".", 1)[0] for name in known}
    for name in names:
        if known and name not in known | groups:
            there = ", ".join(sorted(groups))
            raise ValueError(f"no op has a schedule or group {name!r}; there are {there}; doctor lists them")
    with _off.block(_off.now | frozenset(names or ("",))):
        yield


# ---- report --------------------------------------------------------------------------------------


def report(device: torch.device) -> list[dict[str, Any]]:
    """Every verdict that holds on this machine now, one row per schedule: op, shape, schedule, certified, reason,
    first, ms, anchor_ms, speed (the anchor's time over the schedule's) and chosen."""
    held = (verdict for verdict in map(read, verdicts.files()) if verdict is not None and _holds(verdict, device))
    used = (verdict for op in scheduled_ops() for verdict in op.verdicts())
    found = {json.dumps(verdict.identity, sort_keys=True): verdict for verdict in (*held, *used)}
    rows = []
    for verdict in found.values():
        chosen = verdict.fastest(_is_off)
        anchor = verdicts.Trial(ANCHOR, True, "defines the bits", ms=verdict.anchor_ms)
        for t in (anchor, *verdict.trials):
            rows.append({
                "op": verdict.identity["op"], "shape": verdict.identity["shape"], "anchor_ms": verdict.anchor_ms,
                "schedule": t.name, "certified": t.certified, "reason": t.reason, "first": t.first, "ms": t.ms,
                "speed": verdict.anchor_ms / t.ms if t.ms else None, "chosen": chosen == t.name,
            })  # fmt: skip
    return rows


def _holds(verdict: Verdict, device: torch.device) -> bool:
    """Whether a verdict on disk has the current libraries, sources and schedules, of an op whose module is loaded."""
    op = _ops.get(verdict.identity["op"])
    return op is not None and certification.circumstances(op.family, device).items() <= verdict.identity.items()
