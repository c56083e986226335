"""Certification: compares every schedule of an op with its anchor, bit for bit, and times the equal ones.

Random and adversarial data over several row counts; every byte of every result is compared. What an op contributes is
its `Family`; `schedule.py` decides which schedule then runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import secrets
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from rlkernel.contract.bitwise import compare_bitwise
from rlkernel.kernels import clock, verdicts
from rlkernel.kernels.errors import BuildError, LaunchError
from rlkernel.kernels.setting import Setting
from rlkernel.kernels.verdicts import ANCHOR, Trial, Verdict, machine, source_digest

KINDS = ("normal", "wide", "cancel", "zeros", "denormal")
NONFINITE = "nonfinite"  # a further kind, for an op whose result is defined there
SCALES = (1.0, 0.37, 0.02)  # of attention's scores, times D**-0.5: a call may have any
ENOUGH = 1 << 14  # elements to compare of each kind of values: samples of small results are repeated until then,
MOST_SAMPLES = 512  # but at most so often once `verdicts.LEAST` is reached, because each is a launch
SORTS = 6  # of rows, in what `values` draws
THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_INT_VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

ShapeT = TypeVar("ShapeT", bound=tuple[Any, ...])
"""A shape class: a NamedTuple whose `device` is a CUDA index, or -1 for the CPU."""
Run = Callable[..., Any]


# ---- what an op contributes ----------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule(Generic[ShapeT]):
    """One way to compute an op.

    Attributes:
        name: unique in its op; the part before the first dot is its group, which `without` accepts too.
        bind: makes the callable (the op's arguments -> its result) for one shape class; the callable's attribute
            `note`, where it has one, is added to the evidence.
        supports: whether the schedule computes this shape class at all.
    """

    name: str
    bind: Callable[[ShapeT], Run]
    supports: Callable[[ShapeT], bool] = lambda shape: True


@dataclass(frozen=True)
class Family(Generic[ShapeT]):
    """An op, its anchor and the schedules that may take the anchor's place.

    A schedule takes all memory that a call needs before it writes to an argument: where memory is refused, the anchor
    computes that call. Every other error is the caller's.

    Attributes:
        op: the op's name.
        anchor: the definition of the bits.
        shape: shape class of a call, from the op's arguments; M enters as a bucket.
        rows: row counts to compare, the last of which is timed.
        sample: arguments of the op for (shape class, rows, kind of values, generator). Every argument is part of the
            shape class or differs between samples: one that is neither is compared in one case only.
        schedules: the candidates.
        call_key: what decides the shape class of a call (with M as it is), from the op's arguments, as cheaply as
            possible: it is the cost of a warm call. Default: `shape`.
        unavailable: why nothing can be certified in this process, or None.
        versions: further library versions that a verdict depends on.
        mutates: positions of the arguments that the op writes (None among them is allowed). Every run of a comparison
            gets copies of its own, and they count as results, after those that the op returns.
        kinds: kinds of values of which samples are compared.
    """

    op: str
    anchor: Run
    shape: Callable[..., ShapeT]
    rows: Callable[[ShapeT], Sequence[int]]
    sample: Callable[[ShapeT, int, str, torch.Generator], tuple[Any, ...]]
    schedules: Sequence[Schedule[ShapeT]]
    call_key: Callable[..., Hashable] | None = None
    unavailable: Callable[[], str | None] = lambda: None
    versions: Callable[[], dict[str, str]] = dict
    mutates: Sequence[int] = ()
    kinds: Sequence[str] = KINDS


def describe(shape: Any) -> dict[str, Any]:
    """A shape class as plain data without the device's index; its own `describe`, where it has one."""
    if hasattr(shape, "describe"):
        own: dict[str, Any] = shape.describe()
        return own
    name = lambda part: str(part).removeprefix("torch.") if isinstance(part, torch.dtype) else part
    return {field: name(part) for field, part in shape._asdict().items() if field != "device"}


def device_of(shape: Any) -> torch.device:
    """Device of a shape class."""
    return torch.device("cuda", shape.device) if shape.device >= 0 else torch.device("cpu")


def values(
    kind: str, rows: int, k: int, dtype: torch.dtype, generator: torch.Generator, second: bool = False,
    narrow: bool = False,
) -> Tensor:  # fmt: skip  # [rows, k]
    """Values of one of `KINDS`, or NONFINITE, for an operand of a product over k.

    wide: exponents spread evenly. cancel: with an operand that has `second`, sums grow large, by another power of two
    in each row, and fall back to small ones half a row later, which the roundings before then show in. Both fill the
    range of the dtype unless they are `narrow`: products then stay below 2^20. zeros: zeros of both signs, whole rows
    of -0. denormal: the first operand holds denormal numbers of its dtype. nonfinite: a few rows whose sums overflow,
    or with infinities or a NaN in one place; those of the operand that has `second` hold an infinity, once beside a
    zero. Of what rows differ in, fewer than SORTS have some by chance.

    Raises:
        ValueError: the kind is unknown.
    """
    half_precision = dtype == torch.float16
    if rows < SORTS and not second and kind in ("zeros", NONFINITE):  # whose rows are of several sorts: any of them
        chosen = torch.randperm(SORTS, device=generator.device, generator=generator)[:rows]
        return values(kind, SORTS, k, dtype, generator)[chosen]
    x = torch.randn(rows, k, dtype=dtype, device=generator.device, generator=generator)
    if kind == "wide":
        low, high = (-4, 4) if narrow else (-13, 4) if half_precision else (-30, 30)  # fp16 results stay below 2^16
        powers = torch.randint(low, high + 1, (rows, k), dtype=torch.int8, device=x.device, generator=generator)
        x *= torch.exp2(powers.to(dtype))
    elif kind == "cancel":
        half = k // 2
        if second:
            x[:, half : 2 * half] = x[:, :half]
        else:
            low, high = (6, 6) if narrow else (8, 13) if half_precision else (10, 18)
            powers = torch.randint(low, high + 1, (rows, 1), dtype=torch.int8, device=x.device, generator=generator)
            for first in (1, 2):  # a third of the columns stays as it is, and is what remains of the sum
                x[:, first:half:3] *= torch.exp2(powers.to(dtype))
                x[:, half + first : 2 * half : 3] = -x[:, first:half:3]
    elif kind == "zeros":
        x *= torch.rand(rows, k, dtype=dtype, device=x.device, generator=generator) > 0.6
        if second:
            x[::3].abs_()
        else:
            x[::3] = -0.0  # all products of such a row with a positive one are -0: the sign of the chain's start shows
    elif kind == "denormal":
        if not second:
            x *= 2.0 ** (-17 if half_precision else -128)
    elif kind == NONFINITE:
        infinity, place = float("inf"), k // 3
        if second:
            x[1::64, place] = infinity
        else:
            x[0::64] *= 2.0 ** (13 if half_precision else 124)
            x[1::64, k // 2], x[2::64, k // 2], x[3::64, k // 2] = infinity, -infinity, float("nan")
            x[4::64, 0], x[4::64, k - 1] = infinity, -infinity
            x[5::64, place] = 0.0
    elif kind != "normal":
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join((*KINDS, NONFINITE))}")
    return x


def finite(kind: str) -> str:
    """The kind for an operand whose infinities and NaNs another one's zeros meet in some implementations alone."""
    return "normal" if kind == NONFINITE else kind


def circumstances(family: Family[Any], device: torch.device) -> dict[str, Any]:
    """What every verdict of an op holds for: machine, library versions, schedules, source."""
    return {
        **machine(device),
        **family.versions(),
        "op": family.op,
        "schedules": [schedule.name for schedule in family.schedules],
        "source": source_digest(),
    }


def identity(family: Family[ShapeT], shape: ShapeT) -> dict[str, Any]:
    """What the verdict on a shape class holds for."""
    found = {**circumstances(family, device_of(shape)), "shape": describe(shape)}
    plain: dict[str, Any] = json.loads(json.dumps(found))  # as it comes back from a file
    return plain


# ---- comparison ----------------------------------------------------------------------------------


def results(run: Run, arguments: tuple[Any, ...], mutates: Sequence[int]) -> list[Tensor]:
    """The tensors that a run returns, then those that it wrote, which are copies of the given ones."""
    own = list(arguments)
    for i in mutates:
        if (given := own[i]) is not None:  # a clone's rows might lie closer together
            copy = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device)
            own[i] = copy.copy_(given)
    returned = run(*own)
    returned = returned if isinstance(returned, (tuple, list)) else (returned,)
    return [t for t in (*returned, *(own[i] for i in mutates)) if t is not None]


def first_difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, Any] | None:
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
    """The first differing element and the count, or None; compares on the device, copies two elements.

    NaNs are equal, whatever their sign and payload: hardware makes others than it passes on.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return {"index": None, "actual": f"{tuple(actual.shape)} {actual.dtype}",
                "expected": f"{tuple(expected.shape)} {expected.dtype}", "ulps": None,
                "mismatches": expected.numel(), "elements": expected.numel()}  # fmt: skip
    view = _INT_VIEW[expected.element_size()]
    a, b = actual.contiguous().view(-1), expected.contiguous().view(-1)
    if torch.equal(a.view(view), b.view(view)):
        return None
    differs = a.view(view) != b.view(view)
    if expected.is_floating_point():
        differs &= ~(a.isnan() & b.isnan())
        if not differs.any():
            return None
    at = int(differs.to(torch.uint8).argmax())
    report = compare_bitwise(a[at : at + 1], b[at : at + 1])
    index = [int(i) for i in torch.unravel_index(torch.tensor(at), expected.shape)]
    # Texts, because JSON has no NaN.
    return {"index": index, "actual": repr(report.actual), "expected": repr(report.expected), "ulps": report.ulps,
            "mismatches": int(differs.sum()), "elements": expected.numel()}  # fmt: skip


def _first_sample(actual: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]]) -> int | None:
    """Number of the first sample whose results differ, or None; waits for the device once where all are equal."""
    form = lambda results: [(t.shape, t.dtype) for t in results]
    if all(form(a) == form(b) and len(b) == len(expected[0]) for a, b in zip(actual, expected, strict=True)):
        joined = [[torch.cat([t.flatten() for t in of]) for of in zip(*r, strict=True)] for r in (actual, expected)]
        if first_difference(*joined) is None:
            return None
    pairs = enumerate(zip(actual, expected, strict=True))
    return next((i for i, (a, b) in pairs if first_difference(a, b) is not None), None)


def poison(like: Sequence[Tensor]) -> None:
    """Fills the blocks that the allocator hands out next: a schedule that writes nothing must not find old results."""
    _ = [torch.full_like(t, float("nan") if t.is_floating_point() else -1) for t in like]


def _tensors(x: Any) -> Iterator[Tensor]:
    """The tensors among arguments, those within tuples included."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for part in x:
            yield from _tensors(part)


def _sums(arguments: tuple[Any, ...], mutates: Sequence[int]) -> list[list[int]]:
    """Numbers for each tensor that a run must leave as it is: the sum of its elements' bits as integers, and for every
    dimension the same weighted by the place in it, so that elements cannot change places unseen."""
    found = []
    for t in _tensors(tuple(a for i, a in enumerate(arguments) if i not in mutates)):
        bits = t.view(_INT_VIEW[t.element_size()])
        numbers = [bits.sum(dtype=torch.int64)]
        for d, n in enumerate(t.shape):
            others = [i for i in range(t.dim()) if i != d]
            across = bits.sum(others, dtype=torch.int64) if others else bits
            numbers.append((across * torch.arange(n, device=t.device)).sum(dtype=torch.int64))
        found.append(torch.stack(numbers).tolist())
    return found


def _share_memory(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    places = [{t.untyped_storage().data_ptr() for t in tensors if t.numel()} for tensors in (some, others)]
    return not places[0].isdisjoint(places[1])


_deterministic = Setting(
    read=lambda: (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    ),
    write=lambda mode: torch.use_deterministic_algorithms(mode[0], warn_only=mode[1]),
    inside=lambda mode: (True, True) if mode == (True, False) else mode,
)


@contextlib.contextmanager
def tolerant() -> Iterator[None]:
    """A block in which ops without a deterministic implementation warn instead of raising, although
    torch.use_deterministic_algorithms(True) is set: certification compares results bit for bit anyway.

    The mode belongs to the process, so it is not switched off: other threads' ops stay deterministic.
    """
    with _deterministic.changed():
        yield


class _Candidates(Generic[ShapeT]):
    """The schedules of one certification: a trial each, and the callables of those that are not refused."""

    def __init__(self, family: Family[ShapeT], shape: ShapeT) -> None:
        self.family, self.shape = family, shape
        self.trials: dict[str, Trial] = {}
        self.bound: dict[str, Run] = {}
        for schedule in family.schedules:
            if schedule.supports(shape):
                self.trials[schedule.name] = Trial(schedule.name, True, "")
                try:
                    self.bound[schedule.name] = schedule.bind(shape)
                except Exception as error:
                    self.refuse(schedule.name, f"not offered here: {one_line(error)}")
                    missing = isinstance(error, (BuildError, LaunchError, torch.OutOfMemoryError))
                    self.trials[schedule.name].missing = missing
        self._called_twice: set[str] = set()

    def refuse(self, name: str, reason: str, first: dict[str, Any] | None = None) -> None:
        trial = self.trials[name]
        trial.certified, trial.reason, trial.first = False, reason, first
        self.bound.pop(name, None)

    def compare(self, rows: int, kind: str, generator: torch.Generator) -> int:
        """Compares one sample with care: old results cannot pass for new ones, and writing an argument that is not the
        op's to write, or returning the memory of an earlier result, is refused. Returns the elements compared."""
        mutates = self.family.mutates
        state = generator.get_state()
        arguments = self.family.sample(self.shape, rows, kind, generator)
        expected = results(self.family.anchor, arguments, mutates)
        elements = sum(t.numel() for t in expected)
        sums = _sums(arguments, mutates)
        returns = len(expected) > sum(arguments[i] is not None for i in mutates)
        for name, run in list(self.bound.items()):
            poison(expected)
            try:
                given = results(run, arguments, mutates)
                again = results(run, arguments, mutates) if returns and name not in self._called_twice else []
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self.refuse(name, f"raised at {rows} rows, {kind}: {one_line(error)}")
            else:
                self._called_twice.add(name)
                first = first_difference(given, expected)
                if first is not None:
                    self.refuse(name, "bits differ from the anchor's", {"kind": kind, "rows": rows, **first})
                elif _share_memory(given, again):
                    self.refuse(name, "returns the memory of an earlier result")
                else:
                    self.trials[name].elements += elements
                del given, again
            if _sums(arguments, mutates) != sums:
                if name in self.bound:
                    self.refuse(name, f"writes an argument that is not its to write, at {rows} rows, {kind}")
                generator.set_state(state)  # the others get the sample as it was
                arguments = self.family.sample(self.shape, rows, kind, generator)
        return elements

    def compare_more(self, rows: Sequence[int], kind: str, generator: torch.Generator, compared: int) -> int:
        """Further samples of a kind of which `compared` elements were compared; queued first, then compared. Returns
        the elements compared in all."""
        if not compared:
            return 0
        drawn: list[int] = []  # row counts
        expected: list[list[Tensor]] = []
        given: dict[str, list[list[Tensor]]] = {name: [] for name in self.bound}
        for m in itertools.cycle(rows):
            if not self.bound or compared >= (verdicts.LEAST if len(drawn) >= MOST_SAMPLES else ENOUGH):
                break
            arguments = self.family.sample(self.shape, m, kind, generator)
            drawn.append(m)
            expected.append(results(self.family.anchor, arguments, self.family.mutates))
            for name, run in list(self.bound.items()):
                try:
                    given[name].append(results(run, arguments, self.family.mutates))
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    self.refuse(name, f"raised at {m} rows, {kind}: {one_line(error)}")
            compared += sum(t.numel() for t in expected[-1])
        for name in list(self.bound):
            at = _first_sample(given[name], expected)
            if at is None:
                self.trials[name].elements += sum(t.numel() for of in expected for t in of)
            else:
                first = first_difference(given[name][at], expected[at]) or {}
                self.refuse(name, "bits differ from the anchor's", {"kind": kind, "rows": drawn[at], **first})
        return compared


@tolerant()
@torch.no_grad()
def certify(family: Family[ShapeT], shape: ShapeT, seed: int | None = None) -> tuple[Verdict, dict[str, Run]]:
    """Compares every schedule that supports the shape class with the anchor, and times the equal ones.

    Where results are small, samples of every kind of values are drawn until ENOUGH elements of it were compared.

    Args:
        seed: of the data; fresh by default, and part of the evidence.

    Returns:
        The verdict and the bound callables of the certified schedules.

    Raises:
        Exception: what the anchor raises, and running out of memory; a schedule that raises is refused.
    """
    device = device_of(shape)
    seed = secrets.randbits(31) if seed is None else seed
    generator = torch.Generator(device).manual_seed(seed)
    rows = list(family.rows(shape))
    candidates = _Candidates(family, shape)
    least = sys.maxsize  # elements compared of one kind
    for number, kind in enumerate(family.kinds):
        generator.manual_seed(seed + number)  # refusals end repetition early: no kind depends on another's draws
        compared = sum(candidates.compare(m, kind, generator) for m in rows)
        least = min(least, candidates.compare_more(rows, kind, generator, compared))
    bound, trials = candidates.bound, candidates.trials
    for name in list(bound) if least < verdicts.LEAST else ():
        candidates.refuse(name, f"compared in {least} elements of a kind of values; {verdicts.LEAST} are needed")
    arguments = family.sample(shape, rows[-1], KINDS[0], generator)
    timed = {name: functools.partial(run, *arguments) for name, run in {ANCHOR: family.anchor, **bound}.items()}
    times = clock.milliseconds(timed, device)
    for name, run in bound.items():
        trial = trials[name]
        trial.ms, trial.least, trial.note = times[name], least, getattr(run, "note", "")
        trial.reason = f"equal in {trial.elements} elements, at least {least} of a kind of values{trial.note}"
    identified = identity(family, shape)
    return Verdict(identified, rows, list(family.kinds), seed, times[ANCHOR], list(trials.values())), bound


def one_line(error: BaseException) -> str:
    """Type and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes a GPU the current device for a block; nothing for the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def beside_captures(device: torch.device) -> Iterator[None]:
    """Lets this thread allocate, load and wait for a block while another one captures a CUDA graph: in CUDA's mode
    "global", torch's default, these would end that capture. In mode "thread local" they are no matter of its."""
    mode, code = ctypes.c_int(THREAD_LOCAL), -1
    if device.type == "cuda" and torch.version.cuda is not None:
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
        code = exchange(ctypes.byref(mode))  # from here on the mode that there was
    try:
        yield
    finally:
        if code == 0:
            exchange(ctypes.byref(mode))


def capturing(device: torch.device) -> bool:
    """Whether the device's current stream is being captured into a CUDA graph."""
    with current(device):
        return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
