"""Dispatch of ops with certified schedules: a call runs the fastest implementation that equals the anchor bit for bit.

`ScheduledOp.__call__` maps the arguments to a callable: the anchor, or the function that `Schedule.bind` returned. The
first call of a shape class reads its verdict from disk (`verdicts.py`) or certifies the class (`certification.py`).
This module also contains strict mode, `without`, and the report of all verdicts.
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
from rlkernel.kernels.certification import OpSpec, Run, ShapeT, describe, device_of, identity, on_device, one_line
from rlkernel.kernels.switch import Switch
from rlkernel.kernels.verdicts import ANCHOR, Trial, Verdict


class UncertifiedError(RuntimeError):
    """An op without a verdict ran in strict mode; the message names op, shape class and reason."""


_lock = threading.RLock()
_ops: dict[str, ScheduledOp[Any]] = {}
MAX_CALLS = 1 << 14  # call keys that an op keeps before it drops all of them, because row counts are unbounded


@dataclass
class _ShapeClass:
    """State of a shape class: its verdict and the callables of its certified schedules, or the reason why it has no
    verdict. With neither, no schedule supports the class."""

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

    The overhead of a warm call is `OpSpec.call_key` and one dictionary lookup. Nothing is certified during a CUDA graph
    capture: a class without a verdict runs its anchor, with a warning. If a schedule cannot allocate memory, the anchor
    computes that call; any other error is raised to the caller.
    """

    def __init__(self, spec: OpSpec[ShapeT]) -> None:
        self.spec = spec
        self._call_key = spec.call_key or spec.shape
        self._runs: dict[Hashable, Run] = {}  # by call key: the anchor, or what `Schedule.bind` returned
        self._classes: dict[ShapeT, _ShapeClass] = {}
        self._warned: set[Hashable] = set()
        _ops[spec.name] = self

    def __call__(self, *args: Any) -> Any:
        key = self._call_key(*args)
        run = self._runs.get(key) or self._choose(key, args)
        try:
            return run(*args)
        except torch.OutOfMemoryError as error:
            if run is self.spec.anchor:
                raise
            reason = f"because memory was refused: {one_line(error)}"
            self._warn(self.spec.shape(*args), f"ran its anchor in a call, {reason}", reason)
        return self.spec.anchor(*args)  # outside the except block, whose traceback holds the schedule's memory

    def _choose(self, key: Hashable, args: tuple[Any, ...]) -> Run:
        """The callable of a call key that is not in `_runs`."""
        with _lock:  # a switch that changes meanwhile clears `_runs` afterwards
            shape = self.spec.shape(*args)
            known = self._class_of(shape)
            run = known.bound.get(known.chosen(), self.spec.anchor)
            if shape in self._classes:  # it is not if its first call is in a graph capture
                if len(self._runs) >= MAX_CALLS:
                    self._runs.clear()
                self._runs[key] = run
        return run

    def _warn(self, shape: ShapeT, text: str, once: Hashable) -> None:
        """Warns unless a warning with the same `once` was given."""
        if once not in self._warned:
            self._warned.add(once)
            warnings.warn(f"rlkernel: {self.spec.name} {describe(shape)} {text}", RuntimeWarning, stacklevel=4)

    def verdict(self, *args: Any) -> Verdict | None:
        """The verdict for the shape class of these arguments, certified now if necessary; None if no schedule supports
        the class or it cannot be certified."""
        return self.verdict_of(self.spec.shape(*args))

    def verdict_of(self, shape: ShapeT) -> Verdict | None:
        """`verdict` for a shape class, without arguments."""
        return self._class_of(shape).verdict

    def chosen(self, *args: Any) -> str:
        """Name of the schedule that computes these arguments at present, or ANCHOR."""
        return self._class_of(self.spec.shape(*args)).chosen()

    def verdicts(self) -> list[Verdict]:
        """All verdicts that this process has used."""
        return [known.verdict for known in list(self._classes.values()) if known.verdict]

    def failures(self) -> list[tuple[dict[str, Any], str]]:
        """Shape classes that could not be certified, with the reason."""
        return [(describe(shape), known.failure) for shape, known in list(self._classes.items()) if known.failure]

    def unsupported(self) -> list[dict[str, Any]]:
        """Shape classes called so far that no schedule supports: they run the anchor."""
        return [describe(shape) for shape, known in list(self._classes.items()) if known == _ShapeClass()]

    def _class_of(self, shape: ShapeT) -> _ShapeClass:
        """State of a shape class. The first call outside a graph capture determines it."""
        with _lock:
            known = self._classes.get(shape)
            if known is None and not any(schedule.supports(shape) for schedule in self.spec.schedules):
                known = self._classes[shape] = _ShapeClass()
            elif known is None and certification.capturing(device_of(shape)):
                known = _ShapeClass(failure="its first use was in a CUDA graph capture; run the shape once before")
                self._warn(shape, f"runs its anchor: {known.failure}", shape)
            elif known is None:
                known = self._classes[shape] = self._load_or_certify(shape)
            if _strict.now and (reason := known.uncertified()):
                raise UncertifiedError(f"{self.spec.name} {describe(shape)} is not certified: {reason}")
            return known

    def _load_or_certify(self, shape: ShapeT) -> _ShapeClass:
        """Reads the verdict of a class from its file, or certifies the class and writes the file."""
        try:
            with on_device(device_of(shape)):
                found = verdicts.load(identity(self.spec, shape))
                bound = None if found is None else self._bind(shape, found)
                if found is None or bound is None:
                    found, bound = certification.certify(self.spec, shape)
                    verdicts.store(found)
        except Exception as error:
            reason = f"certification failed: {one_line(error)}"
            self._warn(shape, f"runs its anchor, {reason}", (shape, reason))
            return _ShapeClass(failure=reason)
        for trial in found.trials:
            if trial.missing:
                self._warn(shape, f"runs without {trial.name}: {trial.reason}", trial.reason)
        return _ShapeClass(found, bound)

    def _bind(self, shape: ShapeT, verdict: Verdict) -> dict[str, Run] | None:
        """Callables of the certified schedules. None, after which the class is certified again, if one cannot be bound
        or has another note, because a library may now rank its algorithms differently."""
        notes = {trial.name: trial.note for trial in verdict.trials if trial.certified}
        try:
            bound = {s.name: s.bind(shape) for s in self.spec.schedules if s.name in notes}
        except Exception:
            return None
        return bound if notes == {name: getattr(run, "note", "") for name, run in bound.items()} else None


def scheduled_ops() -> tuple[ScheduledOp[Any], ...]:
    """Every op with schedules whose module is loaded."""
    return tuple(_ops.values())


# ---- switches ------------------------------------------------------------------------------------


def _clear_runs() -> None:
    for op in scheduled_ops():
        op._runs.clear()


_strict = Switch(False, _lock, _clear_runs)
_off = Switch[frozenset[str]](frozenset(), _lock, _clear_runs)  # names of schedules and groups; "" is all of them


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
    """Strict mode inside a block. If blocks of several threads overlap, the one that began last applies."""
    _check_flag(on)
    return _strict.block(on)


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Switches schedules, or groups such as "cublaslt", off inside a block; without names, all. It changes no bit.

    Raises:
        TypeError: a name is not a string.
        ValueError: no op has a schedule or group of that name; checked once the first op with schedules has run.
    """
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"without takes names of schedules as strings, not {names!r}")
    known = {schedule.name for op in scheduled_ops() for schedule in op.spec.schedules}
    groups = {name.split(".", 1)[0] for name in known}
    if known and (unknown := [name for name in names if name not in known | groups]):
        there = ", ".join(sorted(groups))
        raise ValueError(f"no op has a schedule or group {unknown[0]!r}; there are {there}; doctor lists them")
    with _off.block(_off.now | frozenset(names or ("",))):
        yield


# ---- report --------------------------------------------------------------------------------------


def report(device: torch.device) -> list[dict[str, Any]]:
    """All verdicts that are valid on this machine now, of the ops whose module is loaded. One row per schedule: op,
    shape, schedule, certified, reason, first, ms, anchor_ms, speed (the anchor's time over the schedule's), chosen."""
    now = {op.spec.name: certification.op_identity(op.spec, device).items() for op in scheduled_ops()}
    valid = [v for v in verdicts.stored() if v.identity["op"] in now and now[v.identity["op"]] <= v.identity.items()]
    used = [verdict for op in scheduled_ops() for verdict in op.verdicts()]
    return [
        {
            "op": v.identity["op"], "shape": v.identity["shape"], "schedule": t.name, "certified": t.certified,
            "reason": t.reason, "first": t.first, "ms": t.ms, "anchor_ms": v.anchor_ms,
            "speed": v.anchor_ms / t.ms if t.ms else None, "chosen": t.name == v.fastest(_is_off),
        }
        for v in {json.dumps(v.identity, sort_keys=True): v for v in (*valid, *used)}.values()
        for t in (Trial(ANCHOR, True, "defines the bits", ms=v.anchor_ms), *v.trials)
    ]  # fmt: skip
