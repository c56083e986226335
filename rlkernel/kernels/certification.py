"""Certification: compares every schedule of an op with its anchor, byte for byte, and times the equal ones.

An op contributes its `OpSpec`: the anchor, the schedules, its shape classes and samples of arguments. `scheduled_op.py`
then runs the fastest certified schedule.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import secrets
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from rlkernel.contract.bitwise import bits, compare_bitwise
from rlkernel.kernels import clock
from rlkernel.kernels.errors import BuildError, LaunchError
from rlkernel.kernels.samples import KINDS
from rlkernel.kernels.verdicts import ANCHOR, Trial, Verdict, machine, source_digest

MIN_ELEMENTS = 1 << 12  # a schedule is certified only if this many elements of each kind of values were compared
ENOUGH_ELEMENTS = 1 << 14  # small results are sampled again until this many elements of each kind were compared,
MAX_SAMPLES = 512  # but at most this often once MIN_ELEMENTS is reached, because each sample is a launch

ShapeT = TypeVar("ShapeT", bound=tuple[Any, ...])
"""A shape class: a NamedTuple whose `device` is a CUDA index, or -1 for the CPU."""
Run = Callable[..., Any]


# ---- description of an op ------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule(Generic[ShapeT]):
    """One way to compute an op.

    Attributes:
        name: unique in its op; the part before the first dot is its group, which `without` accepts too.
        bind: makes the callable (the op's arguments -> its result) for one shape class. The callable's attribute
            `note`, if present, is recorded; it voids the verdict if it changes.
        supports: whether the schedule computes this shape class at all.
    """

    name: str
    bind: Callable[[ShapeT], Run]
    supports: Callable[[ShapeT], bool] = lambda shape: True


@dataclass(frozen=True)
class OpSpec(Generic[ShapeT]):
    """An op, its anchor and the schedules that may replace the anchor.

    A schedule allocates all memory of a call before it writes to an argument: if the allocation fails, the anchor
    computes that call. Every other error is raised to the caller.

    Attributes:
        name: the op's name.
        anchor: the implementation that defines the bits.
        shape: shape class of a call, from the op's arguments; the row count enters as a bucket.
        rows: row counts to compare, the last of which is timed.
        sample: arguments of the op for (shape class, rows, kind of values, generator). Every argument either belongs
            to the shape class or varies between samples.
        schedules: the candidates.
        call_key: key of a call, from the op's arguments: equal keys have equal shape classes. A key may hold the exact
            row count. Computing it is most of a warm call's overhead. Default: `shape`.
        versions: versions of the libraries and compilers that the schedules need, or their absence, so that installing
            one voids the verdict.
        mutates: positions of the arguments that the op writes; such an argument may be None. Every run of a comparison
            gets its own copies, which are compared after the returned results.
        kinds: kinds of values of the samples.
    """

    name: str
    anchor: Run
    shape: Callable[..., ShapeT]
    rows: Callable[[ShapeT], Sequence[int]]
    sample: Callable[[ShapeT, int, str, torch.Generator], tuple[Any, ...]]
    schedules: Sequence[Schedule[ShapeT]]
    call_key: Callable[..., Hashable] | None = None
    versions: Callable[[], dict[str, str]] = dict
    mutates: Sequence[int] = ()
    kinds: Sequence[str] = KINDS


def describe(shape: Any) -> dict[str, Any]:
    """A shape class as plain data without the device index, by its own `describe` if it has one."""
    if hasattr(shape, "describe"):
        return shape.describe()
    name = lambda part: str(part).removeprefix("torch.") if isinstance(part, torch.dtype) else part
    return {field: name(part) for field, part in shape._asdict().items() if field != "device"}


def device_of(shape: Any) -> torch.device:
    """Device of a shape class."""
    return torch.device("cuda", shape.device) if shape.device >= 0 else torch.device("cpu")


def op_identity(spec: OpSpec[Any], device: torch.device) -> dict[str, Any]:
    """Everything that all verdicts of an op depend on: machine, library versions, schedules, sources."""
    return {
        **machine(device),
        **spec.versions(),
        "op": spec.name,
        "schedules": [schedule.name for schedule in spec.schedules],
        "source": source_digest(),
    }


def identity(spec: OpSpec[ShapeT], shape: ShapeT) -> dict[str, Any]:
    """Everything that the verdict on a shape class depends on; a verdict file is valid if it has the same identity."""
    return {**op_identity(spec, device_of(shape)), "shape": describe(shape)}


# ---- comparison ----------------------------------------------------------------------------------


def results(run: Run, arguments: tuple[Any, ...], mutates: Sequence[int]) -> list[Tensor]:
    """The tensors that a run returns, then copies of the arguments that it writes, as it left them."""
    own = list(arguments)
    for i in mutates:
        if (given := own[i]) is not None:  # with the same strides, which clone() does not promise
            copy = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device)
            own[i] = copy.copy_(given)
    returned = run(*own)
    returned = returned if isinstance(returned, (tuple, list)) else (returned,)
    return [t for t in (*returned, *(own[i] for i in mutates)) if t is not None]


def first_difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, Any] | None:
    """`_difference` of the first result that differs, with its number as "result" if there are several."""
    form = lambda tensors: ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in tensors)
    if form(actual) != form(expected):
        return {"index": None, "actual": form(actual), "expected": form(expected), "ulps": None, "mismatches": None,
                "elements": None}  # fmt: skip
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        if (found := _difference(a, b)) is not None:
            return found if len(expected) == 1 else {"result": i, **found}
    return None


def _difference(actual: Tensor, expected: Tensor) -> dict[str, Any] | None:
    """The first differing element and the number of them, or None. Compares on the device.

    All NaNs count as equal, because hardware does not preserve their sign and payload.
    """
    a, b = actual.contiguous().view(-1), expected.contiguous().view(-1)
    if torch.equal(bits(a), bits(b)):
        return None
    differs = bits(a) != bits(b)
    if expected.is_floating_point():
        differs &= ~(a.isnan() & b.isnan())
        if not differs.any():
            return None
    at = int(differs.to(torch.uint8).argmax())
    report = compare_bitwise(a[at : at + 1], b[at : at + 1])
    index = [int(i) for i in torch.unravel_index(torch.tensor(at), expected.shape)]
    # repr, because JSON has no NaN
    return {"index": index, "actual": repr(report.actual), "expected": repr(report.expected), "ulps": report.ulps,
            "mismatches": int(differs.sum()), "elements": expected.numel()}  # fmt: skip


def poison(like: Sequence[Tensor]) -> None:
    """Fills the memory that the allocator will return next, because a schedule that writes nothing would otherwise
    find the anchor's results in it."""
    _ = [torch.full_like(t, float("nan") if t.is_floating_point() else -1) for t in like]


@contextlib.contextmanager
def warn_only_determinism() -> Iterator[None]:
    """Inside the block, `torch.use_deterministic_algorithms(True)` only warns, because certification compares every
    result anyway."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(min(before, 1))  # 0: off, 1: warn, 2: raise
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


class _Candidates(Generic[ShapeT]):
    """The schedules of one certification: a trial for each, and the callables of those that are not refused."""

    def __init__(self, spec: OpSpec[ShapeT], shape: ShapeT) -> None:
        self.spec, self.shape, self.rows = spec, shape, list(spec.rows(shape))
        self.trials: dict[str, Trial] = {}
        self.bound: dict[str, Run] = {}
        for schedule in spec.schedules:
            if schedule.supports(shape):
                self.trials[schedule.name] = Trial(schedule.name)
                try:
                    self.bound[schedule.name] = schedule.bind(shape)
                except (LaunchError, torch.OutOfMemoryError):  # may be transient, so it is not a refusal
                    raise
                except Exception as error:
                    self.refuse(schedule.name, f"not offered here: {one_line(error)}")
                    self.trials[schedule.name].missing = isinstance(error, BuildError)

    def refuse(self, name: str, reason: str, first: dict[str, Any] | None = None) -> None:
        trial = self.trials[name]
        trial.certified, trial.reason, trial.first = False, reason, first
        self.bound.pop(name, None)

    def compare_kind(self, kind: str, generator: torch.Generator) -> int:
        """Compares samples of all row counts, then more up to ENOUGH_ELEMENTS; returns the number of elements."""
        compared = sum(self._compare(rows, kind, generator) for rows in self.rows)
        for repeats, rows in enumerate(itertools.cycle(self.rows)):
            wanted = ENOUGH_ELEMENTS if repeats < MAX_SAMPLES else MIN_ELEMENTS
            if not self.bound or compared == 0 or compared >= wanted:
                break
            compared += self._compare(rows, kind, generator)
        return compared

    def _compare(self, rows: int, kind: str, generator: torch.Generator) -> int:
        """Compares one sample; returns the number of its elements."""
        arguments = self.spec.sample(self.shape, rows, kind, generator)
        expected = results(self.spec.anchor, arguments, self.spec.mutates)
        elements = sum(t.numel() for t in expected)
        for name, run in list(self.bound.items()):
            poison(expected)
            try:
                first = first_difference(results(run, arguments, self.spec.mutates), expected)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self.refuse(name, f"raised at {rows} rows, {kind}: {one_line(error)}")
                continue
            if first is None:
                self.trials[name].elements += elements
            else:
                self.refuse(name, "bits differ from the anchor's", {"kind": kind, "rows": rows, **first})
        return elements


@warn_only_determinism()
@torch.no_grad()
def certify(spec: OpSpec[ShapeT], shape: ShapeT, seed: int | None = None) -> tuple[Verdict, dict[str, Run]]:
    """Compares every schedule that supports the shape class with the anchor, and times the equal ones.

    Args:
        seed: seed of the samples, random by default and recorded in the verdict.

    Returns:
        The verdict and the bound callables of the certified schedules.

    Raises:
        Exception: the anchor raised, a schedule could not be loaded, or memory ran out. A schedule that raises anything
            else is refused.
    """
    seed = secrets.randbits(31) if seed is None else seed
    generator = torch.Generator(device_of(shape)).manual_seed(seed)
    candidates = _Candidates(spec, shape)
    bound, least = candidates.bound, sys.maxsize
    for number, kind in enumerate(spec.kinds):
        generator.manual_seed(seed + number)  # per kind, because a refusal can end the previous kind early
        least = min(least, candidates.compare_kind(kind, generator))
    for name in list(bound) if least < MIN_ELEMENTS else ():
        candidates.refuse(name, f"compared in {least} elements of a kind of values; {MIN_ELEMENTS} are needed")
    arguments = spec.sample(shape, candidates.rows[-1], KINDS[0], generator)
    timed = {name: functools.partial(run, *arguments) for name, run in {ANCHOR: spec.anchor, **bound}.items()}
    times = clock.milliseconds(timed, device_of(shape))
    for name, run in bound.items():
        trial = candidates.trials[name]
        trial.ms, trial.least, trial.note = times[name], least, getattr(run, "note", "")
        trial.reason = f"equal in {trial.elements} elements, at least {least} of a kind of values{trial.note}"
    trials = list(candidates.trials.values())
    return Verdict(identity(spec, shape), candidates.rows, list(spec.kinds), seed, times[ANCHOR], trials), bound


def one_line(error: BaseException) -> str:
    """Type and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes a GPU the current device inside a block; does nothing for the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def capturing(device: torch.device) -> bool:
    """Whether the device's current stream is being captured into a CUDA graph."""
    with on_device(device):
        return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
