"""Certified schedules: an op runs through the fastest way that equals its anchor to the bit on this machine.

Here a call is dispatched: to the schedule that the verdict of its shape class names (`verdicts.py`), which is made
before the first use (`certification.py`). Strict mode, switching schedules off, and the report of all verdicts.
"""

from __future__ import annotations

import contextlib
import json
import threading
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any

import torch

from rlkernel.kernels import certification, verdicts
from rlkernel.kernels.certification import Family, Key, Run, Runs, current, identity, one_line
from rlkernel.kernels.errors import FinishedError, LaunchError
from rlkernel.kernels.setting import Switch
from rlkernel.kernels.verdicts import ANCHOR, Verdict, machine, read, verdict_path, write


class UncertifiedError(RuntimeError):
    """Strict mode met an op without a verdict; the message names op, shape class and reason."""


_lock = threading.RLock()
_ops: dict[str, ScheduledOp] = {}
_off: tuple[frozenset[str], ...] = ()  # one set a nested `without`; an empty set switches every schedule off
_MODULES = ("attention", "linear", "linear_logprob", "logprob", "policy_loss", "rms_norm")  # of kernels/cuda
MOST_CALLS = 1 << 14  # calls that an op remembers, beyond which it forgets all: row counts are without end


# Of CUDA's texts, as its driver, Triton and torch pass them on: what they say of the call's stream, of memory, or of an
# earlier kernel that has ended the process's use of the GPU.
NO_MEMORY = ("out of memory", "allocation failed")
BROKEN = (
    "captur", "illegal memory access", "illegal instruction", "misaligned address", "launch failure",
    "device-side assert",
)  # fmt: skip


def _says(error: Exception, texts: tuple[str, ...]) -> bool:
    said = str(error).lower()
    return any(text in said for text in texts)


def is_circumstance(error: Exception) -> bool:
    """Whether a call failed for what it met (a broken or another's graph capture, no memory) and not by itself."""
    return isinstance(error, torch.OutOfMemoryError) or _says(error, (*NO_MEMORY, *BROKEN))


def release(error: BaseException) -> None:
    """Frees what the frames of an error hold: a schedule's own memory is not to be in its anchor's way."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__


def _is_off(name: str) -> bool:
    return any(not names or name in names or name.split(".", 1)[0] in names for names in _off)


class ScheduledOp:
    """An op that calls the schedule chosen for the shape class of its arguments; callable like the op.

    Warm, a call costs what decides it and one dictionary lookup; `call` is the function that does both, without the
    cost of an object's call. The first call of a class certifies or reads the verdict. Under graph capture nothing is
    certified: a class that is not settled yet runs its anchor there, with a warning. A schedule that fails in a call
    gives way to the anchor, in that call and for good; where its launch lacked memory, in that call alone. What else a
    call met, a broken capture or no memory for its result, is the caller's, and changes nothing.
    """

    def __init__(self, family: Family) -> None:
        self.family = family
        self._runs: Runs = {}
        self.met: set[Hashable] = set()  # of `settle_before`
        self.call = family.dispatcher(self._runs, self._first, self._instead)
        self._verdicts: dict[Key, Verdict] = {}
        self._bound: dict[Key, dict[str, Run]] = {}
        self._failed: dict[Key, str] = {}
        self._told: set[str] = set()  # reasons that were warned of
        self._captured: set[Key] = set()  # classes that were warned of because a capture met them first
        self._short: set[Key] = set()  # those in which a launch lacked memory
        _ops[family.op] = self

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def _first(self, call: Key, *args: Any) -> Run:
        with _lock:  # what is stored was decided after the last switch, or is cleared by it
            run, settled = self._settle_with_others(*args)
            if settled:
                if len(self._runs) >= MOST_CALLS:
                    self._decide_anew()
                self._runs[call] = run
        return run

    def _settle_with_others(self, *args: Any) -> tuple[Run, bool]:
        """`_settle` of the class of these arguments, and of those that later calls come with."""
        found = self._settle(self.family.key(*args))
        if found[1]:
            for key in self.family.beside(*args):
                self._settle(key)
        return found

    def _decide_anew(self) -> None:
        self._runs.clear()
        self.met.clear()

    def _instead(self, error: Exception, run: Run, *args: Any) -> Any:
        """The anchor's result of a call in which a schedule failed; the anchor computes its class from here on, but
        where memory lacked. None where the call is done all the same: raised, its caller would add it once more."""
        family, finished = self.family, isinstance(error, FinishedError)
        refused = isinstance(error, LaunchError)  # else an argument may be written in part
        passing = is_circumstance(error)
        mine = refused and not _says(error, BROKEN) if passing else refused or not family.mutates
        if not finished and (run is family.anchor or not mine):
            raise error
        key = family.key(*args)
        with _lock:
            name = next((name for name, fn in self._bound.get(key, {}).items() if fn is run), "a schedule")
            if passing:
                what = f"ran its anchor in a call for which {name} met {one_line(error)}"
                new = key not in self._short
                self._short.add(key)
            else:
                reason = f"{name} was certified and failed in a call: {one_line(error)}"
                what, new = f"runs its anchor: {reason}", self._failed.setdefault(key, reason) is reason
                self._decide_anew()
        if _strict.now and not passing and not finished:
            raise UncertifiedError(f"{family.op} {family.describe(key)}: {reason}") from error
        if new:  # raised, where warnings are errors, it would leave a sum behind that was added to in part
            with contextlib.suppress(*([RuntimeWarning] if finished or family.mutates else [])):
                self._warn(key, what)
        if finished:
            return None
        release(error)
        return family.anchor(*args)

    def _warn(self, key: Key, what: str) -> None:
        shape = self.family.describe(key)
        warnings.warn(f"rlkernel: {self.family.op} {shape} {what}", RuntimeWarning, stacklevel=5)

    def forget(self, verdicts: bool = False) -> None:
        """Decides anew at the next call; with `verdicts` also what this process knows of the files."""
        with _lock:
            self._decide_anew()
            self._failed.clear()
            self._short.clear()
            if verdicts:
                self._verdicts.clear()
                self._bound.clear()

    def verdict(self, *args: Any) -> Verdict | None:
        """The verdict for the shape class of these arguments, certified now where there is none yet; None where no
        schedule computes the class or nothing can be certified."""
        return self.verdict_of(self.family.key(*args))

    def verdict_of(self, key: Key) -> Verdict | None:
        """`verdict` for a shape class itself: before there are arguments, as an engine does that starts."""
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
        return [(self.family.describe(key), reason) for key, reason in list(self._failed.items())]

    def unsupported(self) -> list[dict[str, Any]]:
        """Shape classes met so far that no schedule computes on their device: they run the anchor."""
        return [self.family.describe(key) for key in list(self._bound) if key not in self._verdicts]

    def _settle(self, key: Key) -> tuple[Run, bool]:
        """What computes a shape class, and whether that stays so."""
        with _lock:
            family = self.family
            reason, capturing = self._failed.get(key), False
            if reason is None and key not in self._bound:
                if not any(schedule.supports(key) for schedule in family.schedules):
                    self._bound[key] = {}
                elif (reason := family.unavailable()) is None:
                    capturing = certification.capturing(family.device(key))
                    if capturing:
                        reason = "its first use fell into a CUDA graph capture; run the shape once before"
                    else:
                        reason = self._judge(key)
            verdict = self._verdicts.get(key)
            if _strict.now and (why := reason or (verdict and verdict.lacking())):
                raise UncertifiedError(f"{family.op} {family.describe(key)} is not certified: {why}")
            if capturing and key not in self._captured:
                self._captured.add(key)
                self._warn(key, f"runs its anchor: {reason}")
            if reason is not None or verdict is None:
                return family.anchor, not capturing
            return self._bound[key].get(verdict.fastest(_is_off), family.anchor), True

    def _judge(self, key: Key) -> str | None:
        """Reads or makes the verdict of a class; returns why there is none."""
        family = self.family
        if (reason := certification.stale(family)) is not None:
            return self._without(key, reason)
        try:
            wanted = identity(family, key)
            found = read(verdict_path(wanted))
            with current(family.device(key)), certification.beside_captures(family.device(key)):
                bound = self._rebind(key, found) if found is not None and found.identity == wanted else None
                if found is None or bound is None:
                    verdict, bound = certification.certify(family, key)
                else:
                    verdict, more = certification.retry(family, key, found)
                    bound |= more
        except Exception as error:
            return self._without(key, f"certification failed: {one_line(error)}")
        if verdict is not found and (reason := certification.stale(family)) is not None:  # it took a while
            return self._without(key, reason)
        self._verdicts[key], self._bound[key] = verdict, bound
        if verdict is not found:
            write(verdict)
        for trial in verdict.trials:
            if trial.passing and trial.reason not in self._told:
                self._told.add(trial.reason)
                self._warn(key, f"runs without {trial.name}: {trial.reason}")
        return None

    def _without(self, key: Key, reason: str) -> str:
        """The reason, by which a class has no verdict in this process."""
        self._failed[key] = reason
        self._warn(key, f"runs its anchor, {reason}")
        return reason

    def _rebind(self, key: Key, verdict: Verdict) -> dict[str, Run] | None:
        """Callables of the certified schedules; None, so that the verdict is void, where one is no longer offered or
        would be something else: a library may rank its algorithms anew. One that the GPU refuses to load, or has no
        memory for, raises: the next process may have better luck with the file."""
        certified = {trial.name: trial for trial in verdict.trials if trial.certified}
        try:
            bound = {s.name: s.bind(key) for s in self.family.schedules if s.name in certified}
        except Exception as error:
            if isinstance(error, LaunchError) or is_circumstance(error):
                raise
            return None
        same = all(getattr(run, "note", "") == certified[name].note for name, run in bound.items())
        return bound if same else None


def scheduled_ops() -> tuple[ScheduledOp, ...]:
    """Every op with schedules whose module is loaded."""
    return tuple(_ops.values())


def settle_before(ops: Sequence[ScheduledOp], call: Hashable, meet: Callable[..., None]) -> None:
    """What the first call of each class does, certification and strict mode's error, but for the calls: before an
    operation in many launches, of which a refusal should find none done.

    Args:
        call: describes the operation; once its classes are settled, nothing is done until something decides anew.
        meet: takes a function for each op, and hands it the arguments of a call of every class that will come.
    """
    if all(call in op.met for op in ops):
        return
    with _lock:  # as in `_first`
        stays: list[bool] = []
        meet(*(lambda *args, op=op: stays.append(op._settle_with_others(*args)[1]) for op in ops))
        for op in ops if all(stays) else ():
            if len(op.met) >= MOST_CALLS:
                op.met.clear()
            op.met.add(call)


def _decide_anew() -> None:
    for op in scheduled_ops():
        op._decide_anew()


def _check_switch(on: bool) -> None:
    if not isinstance(on, bool):
        raise TypeError(f"strict mode is True or False, not {on!r}")


_strict = Switch(False, _lock, _decide_anew)


def set_strict(on: bool) -> None:
    """Whether an op with schedules but no verdict raises `UncertifiedError` in place of running its anchor; from here
    on, in blocks of `strict` that are open too.

    Raises:
        TypeError: `on` is no bool.
    """
    _check_switch(on)
    _strict.set(on)


@contextlib.contextmanager
def strict(on: bool = True) -> Iterator[None]:
    """Strict mode in a block; where blocks of several threads overlap, that of the last to begin."""
    _check_switch(on)
    with _strict.block(on):
        yield


def _names(ops: Iterable[ScheduledOp]) -> set[str]:
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
    except ImportError:  # no Triton: nobody knows the names, and nothing runs that could be switched off
        return
    known |= _names(op for module in modules for op in vars(module).values() if isinstance(op, ScheduledOp))
    for name in names:
        if name not in known:
            groups = ", ".join(sorted(x for x in known if "." not in x))
            raise ValueError(f"no op has a schedule or group {name!r}; there are {groups}; doctor lists them")


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Switches schedules (or groups of them, "cublaslt") off in a block; without names, all. No bit changes by it.

    Raises:
        TypeError: a name is no string.
        ValueError: no op has a schedule or group of that name.
    """
    global _off
    _check_known(names)
    switched = frozenset(names)
    with _lock:
        _off = (*_off, switched)
        _decide_anew()
    try:
        yield
    finally:
        with _lock:  # another thread's block may have begun or ended meanwhile
            at = _off.index(switched)
            _off = _off[:at] + _off[at + 1 :]
            _decide_anew()


def report(device: torch.device) -> list[dict[str, Any]]:
    """Every verdict that holds on this machine now, a row a schedule: op, shape, schedule, certified, reason, first,
    ms, anchor_ms, speed (the anchor's time over the schedule's) and whether it is the chosen one, which is the anchor
    where a schedule has failed in a call of this process."""
    found: dict[str, Verdict] = {}
    failed: set[str] = set()
    for path in verdicts.files():
        verdict = read(path)
        if verdict is not None and _holds(verdict, device):
            found[json.dumps(verdict.identity, sort_keys=True)] = verdict
    for op in scheduled_ops():
        for key, verdict in list(op._verdicts.items()):  # another thread may certify meanwhile
            name = json.dumps(verdict.identity, sort_keys=True)
            found[name] = verdict
            if key in op._failed:
                failed.add(name)
    rows = []
    for name, verdict in found.items():
        chosen = ANCHOR if name in failed else verdict.fastest(_is_off)
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
