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
from rlkernel.kernels.switch import Switch
from rlkernel.kernels.verdicts import ANCHOR, Trial, Verdict


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

    def chosen(self) -> str:
        """Name of the schedule that computes the class at present, or ANCHOR."""
        return self.verdict.fastest(_is_off) if self.verdict else ANCHOR

    def uncertified(self) -> str | None:
        """Why strict mode refuses the class; None if it does not."""
        return self.failure or (self.verdict.missing() if self.verdict else None)


class ScheduledOp(Generic[ShapeT]):
    """An op that runs the schedule chosen for the shape class of its arguments.

    A warm call costs its `call_key` and one dictionary lookup. During CUDA graph capture nothing is certified: a class
    without a verdict runs its anchor, with a warning. If a schedule cannot allocate memory, the anchor computes that
    call; any other error is raised to the caller.
    """

    def __init__(self, family: Family[ShapeT]) -> None:
        self.family = family
        self._call_key = family.call_key or family.shape
        self._runs: dict[Hashable, Run] = {}  # by call key
        self._classes: dict[ShapeT, _Class] = {}
        self._warned: set[Hashable] = set()
        _ops[family.op] = self

    def __call__(self, *args: Any) -> Any:
        key = self._call_key(*args)
        run = self._runs.get(key) or self._first(key, args)
        try:
            return run(*args)
        except torch.OutOfMemoryError as error:
            if run is self.family.anchor:
                raise
            reason = f"because memory was refused: {one_line(error)}"
            self._warn(self.family.shape(*args), f"ran its anchor in a call, {reason}", reason)
        return self.family.anchor(*args)  # outside the except block, whose traceback holds the schedule's memory

    def _first(self, key: Hashable, args: tuple[Any, ...]) -> Run:
        with _lock:  # a switch that changes meanwhile clears `_runs` afterwards
            shape = self.family.shape(*args)
            known = self._settle(shape)
            run = known.bound.get(known.chosen(), self.family.anchor)
            if shape in self._classes:  # otherwise its first call is in a graph capture, and it stays undecided
                if len(self._runs) >= MOST_CALLS:
                    self._runs.clear()
                self._runs[key] = run
        return run

    def _warn(self, shape: ShapeT, text: str, once: Hashable) -> None:
        """Warns unless a warning with the same `once` was given."""
        if once not in self._warned:
            self._warned.add(once)
            warnings.warn(f"rlkernel: {self.family.op} {describe(shape)} {text}", RuntimeWarning, stacklevel=4)

    def verdict(self, *args: Any) -> Verdict | None:
        """The verdict for the shape class of these arguments, certified now if necessary; None if no schedule supports
        the class or it cannot be certified."""
        return self.verdict_of(self.family.shape(*args))

    def verdict_of(self, shape: ShapeT) -> Verdict | None:
        """`verdict` for a shape class, without arguments."""
        return self._settle(shape).verdict

    def chosen(self, *args: Any) -> str:
        """Name of the schedule that computes these arguments at present, or ANCHOR."""
        return self._settle(self.family.shape(*args)).chosen()

    def verdicts(self) -> list[Verdict]:
        """All verdicts that this process has used."""
        return [known.verdict for known in list(self._classes.values()) if known.verdict]

    def failures(self) -> list[tuple[dict[str, Any], str]]:
        """Shape classes that could not be certified, with the reason."""
        return [(describe(shape), known.failure) for shape, known in list(self._classes.items()) if known.failure]

    def unsupported(self) -> list[dict[str, Any]]:
        """Shape classes met so far that no schedule supports: they run the anchor."""
        return [describe(shape) for shape, known in list(self._classes.items()) if known == _Class()]

    def _settle(self, shape: ShapeT) -> _Class:
        """What is known of a shape class. It is decided and kept at the first call that is not in a graph capture."""
        with _lock:
            known = self._classes.get(shape)
            if known is None and not any(schedule.supports(shape) for schedule in self.family.schedules):
                known = self._classes[shape] = _Class()
            elif known is None and certification.capturing(device_of(shape)):
                known = _Class(failure="its first use was in a CUDA graph capture; run the shape once before")
                self._warn(shape, f"runs its anchor: {known.failure}", shape)
            elif known is None:
                known = self._classes[shape] = self._decide(shape)
            if _strict.now and (reason := known.uncertified()):
                raise UncertifiedError(f"{self.family.op} {describe(shape)} is not certified: {reason}")
            return known

    def _decide(self, shape: ShapeT) -> _Class:
        """Reads the verdict of a class from its file, or makes and writes it."""
        try:
            with current(device_of(shape)):
                found = verdicts.load(identity(self.family, shape))
                bound = None if found is None else self._bind(shape, found)
                if found is None or bound is None:
                    found, bound = certification.certify(self.family, shape)
                    verdicts.store(found)
        except Exception as error:
            reason = f"certification failed: {one_line(error)}"
            self._warn(shape, f"runs its anchor, {reason}", (shape, reason))
            return _Class(failure=reason)
        for trial in found.trials:
            if trial.missing:
                self._warn(shape, f"runs without {trial.name}: {trial.reason}", trial.reason)
        return _Class(found, bound)

    def _bind(self, shape: ShapeT, verdict: Verdict) -> dict[str, Run] | None:
        """Callables of the certified schedules. None, after which they are compared again, if one is not offered now or
        has another note, because a library may rank its algorithms differently."""
        notes = {trial.name: trial.note for trial in verdict.trials if trial.certified}
        try:
            bound = {s.name: s.bind(shape) for s in self.family.schedules if s.name in notes}
        except Exception:
            return None
        return bound if notes == {name: getattr(run, "note", "") for name, run in bound.items()} else None


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


def strict(on: bool = True) -> contextlib.AbstractContextManager[None]:
    """Strict mode inside a block; where blocks of several threads overlap, the last one to begin decides."""
    _check_flag(on)
    return _strict.block(on)


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Switches schedules, or groups such as "cublaslt", off inside a block; without names, all. No bit depends on it.

    Raises:
        TypeError: a name is not a string.
        ValueError: no op has a schedule or group of that name; checked once the first op with schedules has run.
    """
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"without takes names of schedules as strings, not {names!r}")
    known = {schedule.name for op in scheduled_ops() for schedule in op.family.schedules}
    groups = {name.split(".", 1)[0] for name in known}
    if known and (unknown := [name for name in names if name not in known | groups]):
        there = ", ".join(sorted(groups))
        raise ValueError(f"no op has a schedule or group {unknown[0]!r}; there are {there}; doctor lists them")
    with _off.block(_off.now | frozenset(names or ("",))):
        yield


# ---- report --------------------------------------------------------------------------------------


def report(device: torch.device) -> list[dict[str, Any]]:
    """Every verdict that holds on this machine now, of the ops whose module is loaded. One row per schedule: op, shape,
    schedule, certified, reason, first, ms, anchor_ms, speed (the anchor's time over the schedule's) and chosen."""
    now = {op.family.op: certification.circumstances(op.family, device).items() for op in scheduled_ops()}
    held = [v for v in verdicts.stored() if v.identity["op"] in now and now[v.identity["op"]] <= v.identity.items()]
    used = [verdict for op in scheduled_ops() for verdict in op.verdicts()]
    return [
        {
            "op": v.identity["op"], "shape": v.identity["shape"], "schedule": t.name, "certified": t.certified,
            "reason": t.reason, "first": t.first, "ms": t.ms, "anchor_ms": v.anchor_ms,
            "speed": v.anchor_ms / t.ms if t.ms else None, "chosen": t.name == v.fastest(_is_off),
        }
        for v in {json.dumps(v.identity, sort_keys=True): v for v in (*held, *used)}.values()
        for t in (Trial(ANCHOR, True, "defines the bits", ms=v.anchor_ms), *v.trials)
    ]  # fmt: skip
