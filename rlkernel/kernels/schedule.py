"""Certified schedules: an op runs through the fastest implementation that equals its anchor bit for bit here.

This module dispatches calls: to the schedule that the verdict of their shape class names (`verdicts.py`), which is made
before the first use (`certification.py`). It also holds strict mode, `without`, and the report of all verdicts.
"""

from __future__ import annotations

import contextlib
import json
import threading
import warnings
from collections.abc import Hashable, Iterable, Iterator
from importlib import import_module
from typing import Any, Generic

import torch

from rlkernel.kernels import certification, verdicts
from rlkernel.kernels.certification import Family, Run, ShapeT, current, describe, device_of, identity, one_line
from rlkernel.kernels.errors import LaunchError
from rlkernel.kernels.setting import Switch
from rlkernel.kernels.verdicts import ANCHOR, Verdict, machine, read, verdict_path, write


class UncertifiedError(RuntimeError):
    """Strict mode met an op without a verdict; the message names op, shape class and reason."""


_lock = threading.RLock()
_ops: dict[str, ScheduledOp[Any]] = {}
_MODULES = ("attention", "linear", "linear_logprob", "logprob", "policy_loss", "rms_norm")  # of kernels/cuda
MOST_CALLS = 1 << 14  # calls that an op remembers before it forgets all: row counts are without end


class ScheduledOp(Generic[ShapeT]):
    """An op that runs the schedule chosen for the shape class of its arguments.

    A warm call costs its `call_key` and one dictionary lookup. The first call of a class reads the verdict or
    certifies. Under graph capture nothing is certified: a class without a verdict runs its anchor there, with a
    warning. Where a schedule is refused memory, the anchor computes that call; any other error is the caller's.

    Attributes:
        call: the op as a function, cheaper to call than the object.
    """

    def __init__(self, family: Family[ShapeT]) -> None:
        self.family = family
        self._runs: dict[Hashable, Run] = {}  # what computes a call, by its `call_key`
        self.call = self._dispatcher()
        self._verdicts: dict[ShapeT, Verdict] = {}
        self._bound: dict[ShapeT, dict[str, Run]] = {}  # the certified schedules of a class
        self._failed: dict[ShapeT, str] = {}  # why a class could not be certified
        self._captured: set[ShapeT] = set()  # classes whose first call fell into a graph capture
        self._warned: set[str] = set()
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
                self._warn_once(args, f"ran its anchor in a call, because memory was refused: {one_line(error)}")
            return anchor(*args)  # after the error and its frames, which hold the schedule's memory, are gone

        return dispatch

    def _first(self, key: Hashable, args: tuple[Any, ...]) -> Run:
        with _lock:  # a switch clears what was decided before it
            run, settled = self._settle(self.family.shape(*args))
            if settled:
                if len(self._runs) >= MOST_CALLS:
                    self._runs.clear()
                self._runs[key] = run
        return run

    def _warn_once(self, args: tuple[Any, ...], text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._warn(self.family.shape(*args), text)

    def _warn(self, shape: ShapeT, text: str) -> None:
        warnings.warn(f"rlkernel: {self.family.op} {describe(shape)} {text}", RuntimeWarning, stacklevel=5)

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
        return self.verdict_of(self.family.shape(*args))

    def verdict_of(self, shape: ShapeT) -> Verdict | None:
        """`verdict` for a shape class itself: an engine that starts has no arguments yet."""
        self._settle(shape)
        return self._verdicts.get(shape)

    def chosen(self, *args: Any) -> str:
        """Name of the schedule that computes these arguments at present, ANCHOR included."""
        shape = self.family.shape(*args)
        run, _ = self._settle(shape)
        bound = self._bound.get(shape, {})
        return next((name for name, fn in bound.items() if fn is run), ANCHOR)

    def verdicts(self) -> list[Verdict]:
        """All verdicts that this process has used."""
        return list(self._verdicts.values())

    def failures(self) -> list[tuple[dict[str, Any], str]]:
        """Shape classes that could not be certified, with the reason."""
        return [(describe(shape), reason) for shape, reason in list(self._failed.items())]

    def unsupported(self) -> list[dict[str, Any]]:
        """Shape classes met so far that no schedule computes on their device: they run the anchor."""
        return [describe(shape) for shape in list(self._bound) if shape not in self._verdicts]

    def _settle(self, shape: ShapeT) -> tuple[Run, bool]:
        """What computes a shape class, and whether that is final."""
        with _lock:
            family = self.family
            reason, capturing = self._failed.get(shape), False
            if reason is None and shape not in self._bound:
                if not any(schedule.supports(shape) for schedule in family.schedules):
                    self._bound[shape] = {}
                elif (reason := family.unavailable()) is None:
                    capturing = certification.capturing(device_of(shape))
                    if capturing:
                        reason = "its first use fell into a CUDA graph capture; run the shape once before"
                    else:
                        reason = self._judge(shape)
            verdict = self._verdicts.get(shape)
            if _strict.now and (why := reason or (verdict and verdict.missing())):
                raise UncertifiedError(f"{family.op} {describe(shape)} is not certified: {why}")
            if capturing and shape not in self._captured:
                self._captured.add(shape)
                self._warn(shape, f"runs its anchor: {reason}")
            if reason is not None or verdict is None:
                return family.anchor, not capturing
            return self._bound[shape].get(verdict.fastest(_is_off), family.anchor), True

    def _judge(self, shape: ShapeT) -> str | None:
        """Reads or makes the verdict of a class; returns why there is none."""
        device = device_of(shape)
        try:
            wanted = identity(self.family, shape)
            found = read(verdict_path(wanted))
            with current(device), certification.beside_captures(device):
                bound = self._rebind(shape, found) if found is not None and found.identity == wanted else None
                if found is None or bound is None:
                    found, bound = certification.certify(self.family, shape)
                    write(found)
        except Exception as error:
            self._failed[shape] = reason = f"certification failed: {one_line(error)}"
            self._warn(shape, f"runs its anchor, {reason}")
            return reason
        self._verdicts[shape], self._bound[shape] = found, bound
        for trial in found.trials:
            if trial.missing and trial.reason not in self._warned:
                self._warned.add(trial.reason)
                self._warn(shape, f"runs without {trial.name}: {trial.reason}")
        return None

    def _rebind(self, shape: ShapeT, verdict: Verdict) -> dict[str, Run] | None:
        """Callables of the certified schedules; None, which voids the verdict, where one is no longer offered or has
        another note (a library may rank its algorithms anew), or where a missing one can be loaded by now.

        Raises:
            LaunchError, torch.OutOfMemoryError: the GPU has no memory to load one; the verdict remains.
        """
        bound: dict[str, Run] = {}
        trials = {trial.name: trial for trial in verdict.trials}
        for schedule in self.family.schedules:
            trial = trials.get(schedule.name)
            if trial is None or not (trial.certified or trial.missing):
                continue
            try:
                run = schedule.bind(shape)
            except Exception as error:
                if trial.missing:
                    continue
                if isinstance(error, (LaunchError, torch.OutOfMemoryError)):
                    raise
                return None
            if trial.missing or getattr(run, "note", "") != trial.note:
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


def _check_switch(on: bool) -> None:
    if not isinstance(on, bool):
        raise TypeError(f"strict mode is True or False, not {on!r}")


def set_strict(on: bool) -> None:
    """Sets whether an op with schedules but no verdict raises `UncertifiedError` instead of running its anchor, also in
    open blocks of `strict`.

    Raises:
        TypeError: `on` is no bool.
    """
    _check_switch(on)
    _strict.set(on)


@contextlib.contextmanager
def strict(on: bool = True) -> Iterator[None]:
    """Strict mode in a block; where blocks of several threads overlap, the last one to begin decides."""
    _check_switch(on)
    with _strict.block(on):
        yield


def _names(ops: Iterable[ScheduledOp[Any]]) -> set[str]:
    """Their schedules, and the groups of these."""
    found = {schedule.name for op in ops for schedule in op.family.schedules}
    return found | {name.split(".", 1)[0] for name in found}


def _check_known(names: tuple[str, ...]) -> None:
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"without takes names of schedules as strings, not {name!r}")
    known = _names(scheduled_ops())
    if known.issuperset(names):
        return
    try:  # a process without a GPU has not loaded them
        modules = [import_module(f"{__package__}.cuda.{module}") for module in _MODULES]
    except ImportError:  # without Triton no schedule runs that could be switched off
        return
    known |= _names(op for module in modules for op in vars(module).values() if isinstance(op, ScheduledOp))
    for name in names:
        if name not in known:
            groups = ", ".join(sorted(x for x in known if "." not in x))
            raise ValueError(f"no op has a schedule or group {name!r}; there are {groups}; doctor lists them")


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Switches schedules (or groups of them, "cublaslt") off in a block; without names, all. No bit depends on it.

    Raises:
        TypeError: a name is no string.
        ValueError: no op has a schedule or group of that name.
    """
    _check_known(names)
    with _off.block(_off.now | frozenset(names or ("",))):
        yield


# ---- report --------------------------------------------------------------------------------------


def report(device: torch.device) -> list[dict[str, Any]]:
    """Every verdict that holds on this machine now, one row for each schedule: op, shape, schedule, certified, reason,
    first, ms, anchor_ms, speed (the anchor's time over the schedule's) and chosen."""
    found: dict[str, Verdict] = {}
    held = (verdict for verdict in map(read, verdicts.files()) if verdict is not None and _holds(verdict, device))
    for verdict in (*held, *(verdict for op in scheduled_ops() for verdict in op.verdicts())):
        found[json.dumps(verdict.identity, sort_keys=True)] = verdict
    rows = []
    for verdict in found.values():
        chosen = verdict.fastest(_is_off)
        common = {"op": verdict.identity["op"], "shape": verdict.identity["shape"], "anchor_ms": verdict.anchor_ms}
        rows.append({**common, "schedule": ANCHOR, "certified": True, "reason": "defines the bits", "first": None,
                     "ms": verdict.anchor_ms, "speed": 1.0, "chosen": chosen == ANCHOR})  # fmt: skip
        for t in verdict.trials:
            speed = verdict.anchor_ms / t.ms if t.ms else None
            rows.append({**common, "schedule": t.name, "certified": t.certified, "reason": t.reason, "first": t.first,
                         "ms": t.ms, "speed": speed, "chosen": chosen == t.name})  # fmt: skip
    return rows


def _holds(verdict: Verdict, device: torch.device) -> bool:
    """Whether a verdict from disk would be believed: made by the same libraries, sources and schedules. Of an op whose
    module is not loaded only the machine is known."""
    op = _ops.get(verdict.identity["op"])
    if op is None:
        now = machine(device)
    elif op.family.unavailable() is None:
        now = certification.circumstances(op.family, device)
    else:
        return False
    return now.items() <= verdict.identity.items()
