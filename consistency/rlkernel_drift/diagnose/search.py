"""The search: changes of the declared computation, simple ones first, then two at a time, within a number of seconds.

A change has a value that is scanned over a grid on a few sequences and refined by golden sections. It is accepted only
if it leaves nothing but noise, and if no other change that predicts other numbers leaves about as little.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlkernel_drift.capsule import Floor
from rlkernel_drift.diagnose.context import Computation, Context, Residual, residual
from rlkernel_drift.profiles import raise_floor
from rlkernel_drift.scoring.semantics import golden
from rlkernel_drift.verdict import Scalar

_FEW = 2
_PROMISING = 0.9
_REFINED = 6
_COARSE_STEPS, _FINE_STEPS, _NEWTON = 8, 16, 8
_PAIRED, _LEADING = 4, 0.45
_REFUSED = (ValueError, TypeError, AttributeError, KeyError, RuntimeError, IndexError)
"""What transformers and torch raise where a change does not exist for a model."""


@dataclass(frozen=True)
class Change:
    """One production of the grammar.

    Attributes:
        name: shown to the user. cause: key of `knowledge.CAUSES`. stage: of the search.
        apply: the computation with the change at a value; None where it does not apply.
        values: the grid; continuous: whether values between them exist. shown: the parameter of a value.
        start: the value of the declared computation, near which the prediction is nearly linear in the value.
        fit: finds the value directly, in place of the grid; None where nothing fits.
        operator: the operator or tensor that it changes, if it is one.
        effort: simpler changes have less; a change that contains another has more.
        implies: causes that it contains.
        rounds: whether it rounds noisy values: noise near the middle of two roundings moves a token by a whole step.
        dtype: of the layers, if they are in another one; the noise of that dtype may remain.
        whole: whether it depends on all sequences, so that it cannot be tried on a few.
    """

    name: str
    cause: str
    stage: str
    apply: Callable[[Computation, Any], Computation | None]
    values: tuple[Any, ...] = (None,)
    continuous: bool = False
    start: float | None = None
    parameter: str = ""
    shown: Callable[[Any], Scalar] = lambda x: x
    fit: Callable[[Context, Computation], Any] | None = None
    operator: str = ""
    effort: int = 1
    implies: frozenset[str] = frozenset()
    rounds: bool = False
    dtype: str = "float32"
    whole: bool = False


@dataclass(frozen=True)
class Trial:
    """A computation that was tried.

    Attributes:
        prediction: [N]. residual: what it leaves over the region. scope: the part of the tokens that it explains, while
            the others are as declared; "" means all.
    """

    changes: tuple[Change, ...]
    values: tuple[Any, ...]
    parameters: dict[str, Scalar]
    computation: Computation
    prediction: Tensor
    residual: Residual
    scope: str = ""
    noise: float = 1.0

    @property
    def name(self) -> str:
        """The changes in words."""
        return ", and ".join(change.name for change in self.changes)

    @property
    def cause(self) -> str:
        """The cause of the change, of two that of the larger one."""
        return self.changes[0].cause

    @property
    def causes(self) -> frozenset[str]:
        """Its causes and those that they contain."""
        return frozenset().union(*({c.cause} | c.implies for c in self.changes))

    @property
    def effort(self) -> tuple[int, int, int]:
        """Simpler trials come first."""
        return len(self.changes), int(bool(self.scope)), sum(c.effort for c in self.changes)

    @property
    def generic(self) -> bool:
        """Whether it has a free number that also fits other changes in part."""
        return any(c.effort > 1 for c in self.changes)

    def near(self, floor: Floor) -> bool:
        """Whether what is left is noise."""
        left = self.residual
        for change in self.changes:
            floor = raise_floor(floor, change.dtype)
        mean, tail = (ROUNDED_FLOOR, ROUNDED_TAIL) if any(c.rounds for c in self.changes) else (NEAR_FLOOR, NEAR_TAIL)
        return left.usable and left.mean <= mean * self.noise * floor.mean and left.p99 <= tail * self.noise * floor.p99


# What may remain under an accepted change, in multiples of the noise floor's mean and 99% quantile.
NEAR_FLOOR, NEAR_TAIL = 2.0, 6.0
ROUNDED_FLOOR, ROUNDED_TAIL = 4.0, 24.0
# How far it must be below the runner-up; closer ones need a difference of so many standard errors.
BELOW_RUNNER_UP = 0.5
CLOSEST, CLOSEST_FILTERS, SIGMAS = 0.85, 0.94, 4.0
_FILTERS = frozenset({"top-p", "top-k", "min-p"})
_DECISIVE, _CLEAN = 8.0, 1.3
_SAME = 0.25
_AMBIGUOUS = 5.0


@dataclass
class Outcome:
    """What a search found.

    Attributes:
        accepted: the named trial, or None; equal: names of other changes that predict the same numbers.
        rivals: two trials that both leave noise and predict other numbers, so that neither is proven.
        tried: stage -> number of changes; causes: theirs. complete: whether the time sufficed.
    """

    accepted: Trial | None
    runner_up: Trial | None
    why: str
    trials: list[Trial] = field(default_factory=list)
    equal: list[str] = field(default_factory=list)
    rivals: list[Trial] = field(default_factory=list)
    tried: dict[str, int] = field(default_factory=dict)
    causes: set[str] = field(default_factory=set)
    complete: bool = True


@dataclass(frozen=True)
class _Screened:
    """A change at the best value of its grid on a few sequences: what it leaves of `before`, where to look closer."""

    change: Change
    base: Trial | None
    value: Any
    error: float
    before: float
    brackets: tuple[tuple[float, float], ...] = ()


class _OutOfTimeError(Exception):
    """The seconds of the search are used up."""


class Search:
    """Tries changes of one side's computation.

    Args:
        as_is: [N] prediction of the declared computation.
        region: [N] tokens to explain, and its name; the others are healthy.
        seconds: of this thread's processor time, after which no further change is tried; a busy machine takes longer
            and finds the same.
    """

    def __init__(
        self, context: Context, as_is: Tensor, seconds: float, region: Tensor | None = None, scope: str = ""
    ) -> None:
        assert context.floor is not None
        self.full, self.as_is, self.floor, self.scope = context, as_is, context.floor, scope
        self.region = torch.ones_like(as_is, dtype=torch.bool) if region is None else region
        self.context = replace(context, target=torch.where(self.region, context.target, torch.nan), _hidden={})
        self.left = self._residual(as_is)
        worst = self.context.residual(as_is).sequences.nan_to_num(-1).argsort(descending=True)[:_FEW]
        self.few = self.context.part(sorted(worst.tolist()))
        self.few_as_is = self.few.error(self.few.declared)
        self.deadline = time.thread_time() + seconds
        self.trials: list[Trial] = []
        self.tried: dict[str, int] = {}
        self._rounding: float | None = None

    def run(self, stages: Iterable[tuple[str, Iterable[Change]]]) -> Outcome:
        """Tries the stages in order, then pairs; stops at the first stage that leaves no doubt."""
        complete, known = True, []
        try:
            for stage, changes in stages:
                each = list(changes)
                known += each
                self._stage(stage, [(change, None) for change in each])
                outcome = self._decide()
                if stage == "operators and tensors" and self._leading():
                    self._pairs(known, 0.2)
                    outcome = self._decide()
                cheap = stage in ("records", "logits")  # which are tried together, because they explain alike
                if not cheap and outcome.accepted is not None and self._decisive(outcome.accepted):
                    return replace(outcome, tried=self.tried, causes={c.cause for c in known})
            if not any(trial.near(self.floor) for trial in self.trials):
                self._pairs(known)
        except _OutOfTimeError:
            complete = False
        return replace(self._decide(), tried=self.tried, causes={c.cause for c in known}, complete=complete)

    def _stage(self, stage: str, changes: Iterable[tuple[Change, Trial | None]]) -> None:
        """Screens changes, each alone or on top of a trial; fits and scores those that explain most."""
        found = []
        for change, base in changes:
            self._check_time()
            self.tried[stage] = self.tried.get(stage, 0) + 1
            with contextlib.suppress(*_REFUSED):
                screened = self._screened(change, base)
                if screened is not None:
                    found.append(screened)
        found.sort(key=lambda s: s.error)
        for screened in found[:_REFINED]:
            self._check_time()
            with contextlib.suppress(*_REFUSED):
                self._keep(screened)

    # ---- one change ------------------------------------------------------------------------------------------------

    def _screened(self, change: Change, base: Trial | None) -> _Screened | None:
        """The best value of the grid, on a few sequences; None if it explains nothing of their difference."""
        few = self.context if change.fit is not None else self._tokens((*(base.changes if base else ()), change))
        computation = few.declared if base is None else reapplied(base, few)
        before = few.error(computation)
        limit = _PROMISING * min(before, self.left.mean if few is self.context else self.few_as_is)
        if change.fit is not None:
            value = change.fit(few, computation)
            error = float("inf") if value is None else self._error(few, (change,), (value,), computation)
            return _Screened(change, base, value, error, before) if error < limit else None
        errors = []
        for value in change.values:
            self._check_time()
            errors.append(self._error(few, (change,), (value,), computation))
        order = sorted(range(len(errors)), key=errors.__getitem__)
        best = _Screened(change, base, change.values[order[0]], errors[order[0]], before)
        if change.continuous and len(order) > 1:
            best = replace(best, brackets=tuple(_around(change.values, i) for i in order[:2]))
        if not best.error < 0.5 * limit and change.start is not None:
            near = self._linear(few, change, computation, change.start)
            if near is not None and near[1] < min(best.error, limit):
                width = abs(near[0] - change.start)
                bracket = (near[0] - 0.5 * width, near[0] + 0.5 * width)
                best = replace(best, value=near[0], error=near[1], brackets=(bracket,))
        return best if best.error < limit else None

    def _tokens(self, changes: tuple[Change, ...]) -> Context:
        """A few sequences, or all where a change depends on all."""
        return self.context if any(change.whole for change in changes) else self.few

    def _keep(self, screened: _Screened) -> None:
        """Fits the value, scores all sequences, and keeps the trial."""
        change, base = screened.change, screened.base
        value = self._fitted(screened) if screened.brackets else screened.value
        changes, values = ((), ()) if base is None else (base.changes, base.values)
        trial = self._trial((*changes, change), (*values, value))
        if trial is not None and base is not None and base.changes[0].fit is not None:
            trial = self._refitted(trial)
        if trial is not None and base is not None and trial.residual.mean < 0.7 * base.residual.mean:
            fitted = self._polished(self._tokens(trial.changes), trial.changes, trial.values)
            again = None if fitted == trial.values else self._trial(trial.changes, fitted)
            trial = again if again is not None and again.residual.mean < trial.residual.mean else trial
        if trial is not None:
            self.trials.append(trial)

    def _refitted(self, trial: Trial) -> Trial:
        """The first change fitted again behind the second one."""
        (first, second), (_, value) = trial.changes, trial.values
        computation = second.apply(self.full.declared, value)
        again = None if computation is None or first.fit is None else first.fit(self.context, computation)
        found = None if again is None else self._trial((second, first), (value, again))
        return found if found is not None and found.residual.mean < trial.residual.mean else trial

    def _trial(self, changes: tuple[Change, ...], values: tuple[Any, ...]) -> Trial | None:
        computation = _applied(self.full, changes, values)
        if computation is None:
            return None
        prediction = self.full.score(computation)
        parameters: dict[str, Scalar] = {}
        for change, value in zip(changes, values, strict=True):
            if change.parameter:
                parameters[change.parameter] = change.shown(value)
            elif isinstance(value, dict):
                parameters |= value
        trial = Trial(changes, values, parameters, computation, prediction, self.full.residual(prediction))
        trial = replace(trial, noise=self._noise(trial))
        if self.scope and not trial.near(self.floor):
            trial = replace(trial, residual=self._residual(prediction), scope=self.scope)
        return trial

    def _error(
        self, few: Context, changes: tuple[Change, ...], values: tuple[Any, ...], base: Computation | None = None
    ) -> float:
        try:
            computation = _applied(few, changes, values, base)
            found = float("inf") if computation is None else few.error(computation)
        except _REFUSED:
            return float("inf")
        return found if found == found else float("inf")

    def _linear(self, few: Context, change: Change, base: Computation, start: float) -> tuple[float, float] | None:
        """The value at which a linear extrapolation from the declared one leaves least, and what it leaves."""
        value = min((v for v in change.values if v != start), key=lambda v: abs(v - start))
        computation = change.apply(base, value)
        if computation is None:
            return None
        before = few.score(base)
        slope, rest = (few.score(computation) - before) / (value - start), few.target - before
        step = _step([slope], rest)[0]
        promising = float((rest - step * slope).abs().nanmean()) < _PROMISING * float(rest.abs().nanmean())
        if not promising or not 0 < abs(step) < 2 * abs(value - start):
            return None
        return start + step, self._error(few, (change,), (start + step,), base)

    def _fitted(self, screened: _Screened) -> Any:
        """Golden sections around the best points of the grid, because the error is bumpy away from its minimum, then
        Gauss-Newton steps; a function that is not smooth needs more golden sections."""
        change, base = screened.change, screened.base
        few = self._tokens((*(base.changes if base else ()), change))
        declared = few.declared if base is None else reapplied(base, few)
        error = lambda x: self._error(few, (change,), (x,), declared)
        place, left, width = screened.value, screened.error, 0.0
        for low, high in screened.brackets:
            self._check_time()
            found = golden(error, low, high, _COARSE_STEPS)
            if not width or found[1] < left:
                width = (high - low) * 0.618**_COARSE_STEPS
            if found[1] < left:
                place, left = found
            if left < 0.5 * screened.before:
                break
        if left > 0.8 * screened.before:
            return place
        (polished,) = self._polished(few, (change,), (place,), declared)
        if not NEAR_FLOOR * self.floor.mean < min(left, error(polished)) < 0.4 * screened.before:
            return polished
        for _ in range(2):
            place, left = golden(error, place - 3 * width, place + 3 * width, _FINE_STEPS)
            width *= 0.618**_FINE_STEPS * 2
        return polished if error(polished) < left else place

    def _polished(
        self, few: Context, changes: tuple[Change, ...], values: tuple[Any, ...], base: Computation | None = None
    ) -> tuple[Any, ...]:
        """Gauss-Newton steps in all numbers that are continuous, as long as they gain."""
        free = [i for i, change in enumerate(changes) if change.continuous]
        found, left = list(values), self._error(few, changes, values, base)
        sizes = {i: 0.02 * max(abs(a - b) for a, b in itertools.pairwise(changes[i].values)) for i in free}
        for _ in range(_NEWTON if free else 0):
            self._check_time()
            now = self._scored(few, changes, tuple(found), base)
            slopes = []
            for i in free:
                moved = tuple(v + sizes[i] if k == i else v for k, v in enumerate(found))
                slopes.append((self._scored(few, changes, moved, base) - now) / sizes[i])
            steps = _step(slopes, few.target - now)
            tried = found.copy()
            for i, step in zip(free, steps, strict=True):
                tried[i] += step
                sizes[i] = min(sizes[i], max(abs(step), 1e-3 * sizes[i]))
            error = self._error(few, changes, tuple(tried), base)
            if not error < left:
                break
            gained, found, left = error / left, tried, error
            if gained > 0.95:
                break
        return tuple(found)

    def _scored(
        self, few: Context, changes: tuple[Change, ...], values: tuple[Any, ...], base: Computation | None
    ) -> Tensor:
        computation = _applied(few, changes, values, base)
        return few.score(computation) if computation is not None else torch.full_like(few.target, torch.nan)

    # ---- two changes -----------------------------------------------------------------------------------------------

    def _pairs(self, changes: list[Change], explained: float = 0.8) -> None:
        """A second change on the trials that leave at most a share: of the output on any, the others on each other.

        A change of the output also precedes every other change that is known, if it explains most.
        """
        ranked = sorted(self.trials, key=lambda t: t.residual.mean)
        output = ("records", "logits")  # changes behind the model, which a change of the model may precede
        bests = _one_per_cause([t for t in ranked if len(t.changes) == 1 and t.residual.mean < explained * self.left.mean])
        for base in bests[:_PAIRED]:
            first = base.changes[0]
            behind = first.stage in output and base.residual.mean < _LEADING * self.left.mean
            second = [c for c in changes if c.cause != first.cause and (behind or c.stage in (*output, "precision"))]
            second += [t.changes[0] for t in bests if t.cause != base.cause and t.changes[0] not in second]
            self._stage("pairs", [(c, base) for c in second])
            if any(trial.near(self.floor) for trial in self.trials):
                return

    def _leading(self) -> bool:
        """Whether no trial leaves noise only, but one explains most: then a second change comes before single tensors."""
        least = min((trial.residual.mean for trial in self.trials), default=torch.inf)
        return least < _LEADING * self.left.mean and not any(trial.near(self.floor) for trial in self.trials)

    # ---- acceptance ------------------------------------------------------------------------------------------------

    def _residual(self, prediction: Tensor) -> Residual:
        return residual(prediction, self.context.target, self.full.sequences.owner, len(self.full.sequences))

    def _noise(self, trial: Trial) -> float:
        """The noise of the changed computation in multiples of the declared one's, where it may decide."""
        temperature = trial.parameters.get("temperature")
        factor = max(1.0, 1.0 / temperature) if isinstance(temperature, float) and temperature > 0 else 1.0
        body, mean = trial.computation.body, self.left.mean
        if (
            body.dtype == torch.float32
            or not NEAR_FLOOR < trial.residual.mean / self.floor.mean < 12
            or trial.residual.mean > 0.3 * mean
        ):
            return factor
        exact = lambda c: self.full.score(c.with_body(dtype=torch.float32))
        if self._rounding is None:
            self._rounding = float((exact(self.full.declared) - self.as_is).abs().nanmean())
        mine = float((exact(trial.computation) - trial.prediction).abs().nanmean())
        return max(factor, mine / max(self._rounding, 1e-12))

    def _check_time(self) -> None:
        if time.thread_time() > self.deadline:
            raise _OutOfTimeError

    def _decisive(self, accepted: Trial) -> bool:
        clean = accepted.residual.mean <= _CLEAN * accepted.noise * self.floor.mean
        return self.left.mean > _DECISIVE * accepted.residual.mean and (clean or not accepted.generic)

    def _decide(self) -> Outcome:
        return decide(self.trials, self.left, self.floor)


def reapplied(trial: Trial, context: Context) -> Computation:
    """The computation of a trial for the tokens of a context."""
    found = _applied(context, trial.changes, trial.values)
    assert found is not None
    return found


def _applied(
    context: Context, changes: tuple[Change, ...], values: tuple[Any, ...], base: Computation | None = None
) -> Computation | None:
    found: Computation | None = context.declared if base is None else base
    for change, value in zip(changes, values, strict=True):
        found = None if found is None else change.apply(found, value)
    return found


def each_request(
    context: Context, base: Computation, change: Callable[[Computation, Any], Computation], values: Iterable[Any], none: Any
) -> list[Any] | None:
    """For each request the value that explains most; None if no request needs one."""
    left = context.residual(context.score(base)).sequences.clone()
    found = [none] * len(left)
    for value in values:
        tried = context.residual(context.score(change(base, value))).sequences
        better = tried < 0.9 * left
        left = torch.where(better, tried, left)
        found = [value if b else f for b, f in zip(better.tolist(), found, strict=True)]
    return found if any(value != none for value in found) else None


def _around(values: tuple[Any, ...], i: int) -> tuple[float, float]:
    """The neighbours of a point of a grid."""
    return values[max(0, i - 1)], values[min(len(values) - 1, i + 1)]


def _step(slopes: list[Tensor], rest: Tensor) -> list[float]:
    """The step of least absolute values along slopes [N], by least squares that are weighted twice."""
    x = torch.stack(slopes, 1).double()
    there = x.isfinite().all(1) & rest.isfinite()
    x, y = x[there], rest[there].double()
    weight = torch.ones_like(y)
    step = torch.zeros(x.shape[1], dtype=torch.float64)
    for _ in range(3):
        gram = (x * weight[:, None]).t() @ x
        gram += 1e-12 * gram.diagonal().mean().clamp(min=1e-30) * torch.eye(len(gram))
        step = torch.linalg.solve(gram, (x * weight[:, None]).t() @ y)
        size = (y - x @ step).abs()
        weight = 1 / (size + 0.1 * size.mean()).clamp(min=1e-12)
    return [float(v) for v in step]


def _one_per_cause(trials: list[Trial]) -> list[Trial]:
    found: dict[str, Trial] = {}
    for trial in trials:
        found.setdefault(trial.cause, trial)
    return list(found.values())


def decide(trials: list[Trial], as_is: Residual, floor: Floor) -> Outcome:
    """Accepts a trial, or none."""
    usable = [t for t in trials if t.residual.usable or t.scope]
    mean = lambda t: t.residual.mean
    near = sorted((t for t in usable if t.near(floor)), key=lambda t: (*t.effort, mean(t)))
    if not near:
        best = min(usable, key=mean, default=None)
        if best is None:
            return Outcome(None, None, "no change explains a part of it", trials)
        ratio = mean(best) / floor.mean
        why = f"the best change, {best.name}, leaves {ratio:.1f} times the noise floor"
        return Outcome(None, best, why, trials)
    clearly = [t for t in near if mean(t) < 0.6 * mean(near[0]) and t.effort[0] <= 2]
    accepted = min(clearly, key=mean, default=near[0])
    same = lambda t: _alike(t, accepted, as_is, floor)
    equal = [t for t in near if t is not accepted and same(t)]
    simplest = min([accepted, *equal], key=lambda t: (t.effort, mean(t)))
    if simplest.effort < accepted.effort:
        accepted = simplest
    rivals = [t for t in usable if t is not accepted and not _related(accepted, t) and not same(t)]
    runner_up = min(rivals, key=mean, default=None)
    limit = as_is.mean if runner_up is None else min(as_is.mean, mean(runner_up))
    if mean(accepted) <= BELOW_RUNNER_UP * limit or _surely_better(accepted, runner_up, as_is):
        names = list(dict.fromkeys(t.name for t in equal if t is not accepted and t.cause != accepted.cause))
        return Outcome(accepted, runner_up, "", trials, names)
    if runner_up is not None and mean(runner_up) < as_is.mean:
        why = f"{accepted.name} and {runner_up.name} explain it about equally well"
    else:
        why = "the difference is too close to the noise floor to tell causes apart"
    both = runner_up is not None and runner_up.near(floor) and as_is.mean > _AMBIGUOUS * mean(runner_up)
    return Outcome(None, runner_up, why, trials, rivals=[accepted, runner_up] if both and runner_up else [])


def _alike(trial: Trial, accepted: Trial, as_is: Residual, floor: Floor) -> bool:
    """Whether two trials predict the same numbers, as a scale of queries and one of the scores do."""
    apart = (trial.prediction - accepted.prediction).abs().nanmean()
    return bool(apart <= max(_SAME * floor.mean, 1e-3 * as_is.mean))


def _surely_better(accepted: Trial, runner_up: Trial | None, as_is: Residual) -> bool:
    """Whether the accepted trial is closer token by token; noise in both residuals can hide the ratio of means."""
    if runner_up is None or accepted.residual.mean > BELOW_RUNNER_UP * as_is.mean:
        return False
    # Filters renormalise over nearly the same tokens and therefore leave similar residuals.
    similar = {accepted.cause, runner_up.cause} <= _FILTERS
    if accepted.residual.mean > (CLOSEST_FILTERS if similar else CLOSEST) * runner_up.residual.mean:
        return False
    gain = runner_up.residual.tokens - accepted.residual.tokens
    gain = gain[gain.isfinite()]
    error = float(gain.std()) / max(1, len(gain)) ** 0.5
    return float(gain.mean()) > SIGMAS * error


def _related(a: Trial, b: Trial) -> bool:
    return a.causes <= b.causes or b.causes <= a.causes
