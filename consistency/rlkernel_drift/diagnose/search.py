"""The search: changes of the declared computation, simple ones first, then two at a time, within a number of seconds.

A change has a value that is scanned over a grid on a few sequences; the best changes of a stage are refined by golden
sections and Gauss-Newton steps, and scored on all sequences.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlkernel_drift.diagnose.context import Computation, Context, Residual, residual
from rlkernel_drift.diagnose.helper import Helper
from rlkernel_drift.diagnose.trials import (
    CLEAN,
    DECISIVE,
    NEAR_FLOOR,
    Change,
    Outcome,
    Trial,
    applied,
    decide,
    reapplied,
)
from rlkernel_drift.errors import DriftError
from rlkernel_drift.scoring.semantics import around, golden
from rlkernel_drift.verdict import Scalar

_FEW = 2  # sequences on which a grid is scanned
_MANY = 12  # values of a grid, beyond which one sequence selects half as many
_PROMISING = 0.9  # share of the difference that a screened change may leave
_REFINED = 6  # changes of a stage that are refined
_GRACE = 0.05  # share of the seconds by which refining may exceed the limit
_COARSE_STEPS, _FINE_STEPS, _NEWTON = 8, 16, 8
_PAIRED = 4  # trials that get a second change
_LEADING, _MOSTLY = 0.45, 0.25  # share that a trial may leave for an early second change, after operators and before
_EXPLAINED = 0.8  # the same for the other second changes
_AS_GOOD = 1.02  # factor within which trials explain equally well
_REFUSED = (ValueError, TypeError, AttributeError, KeyError, RuntimeError, IndexError)
"""Exceptions of transformers and torch if a change does not exist for a model."""


@dataclass(frozen=True)
class _Screened:
    """A change at the best value of its grid on a few sequences: errors with and without it, brackets to refine."""

    change: Change
    base: Trial | None
    value: Any
    error: float
    before: float
    brackets: tuple[tuple[float, float], ...] = ()


class _OutOfTimeError(Exception):
    """The seconds of the search are used up."""


_EVERY = 0.02
"""Seconds between two readings of the processor time."""

Stage = tuple[str, Callable[[], Iterable[Change]]]
_OF_OUTPUT = ("records", "logits")
"""Stages of changes after the model's last layer, which are cheap to score."""
_PATIENCE = 10.0  # the other process is awaited for this multiple of its processor seconds
_FORKED = ("operators and tensors", "single operators and tensors")


@dataclass(frozen=True)
class _Report:
    """The result of the other process for a stage.

    Attributes:
        tried: number of changes. found: number of each kept change in the stage, and its value.
        complete: whether the time sufficed.
    """

    stage: str
    tried: int
    found: list[tuple[int, tuple[Any, ...]]]
    complete: bool


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
        target = torch.where(self.region, context.target, torch.nan)
        self.context = replace(context, target=target, check=self._check_time, _hidden={})
        self.left = self._residual(as_is)
        worst = self.context.residual(as_is).sequences.nan_to_num(-1).argsort(descending=True)[:_FEW]
        self.few = self.context.part(sorted(worst.tolist()))
        self.few_as_is = self.few.error(self.few.declared)
        self.one = self.context.part(worst[:1].tolist())
        self.seconds, self.deadline = seconds, time.thread_time() + seconds
        self.trials: list[Trial] = []
        self.tried: dict[str, int] = {}
        self.known: list[Change] = []
        self.complete: set[str] = set()
        self._paired: list[tuple[Change, ...]] = []
        self._rounding: float | None = None
        self._checked, self._late = 0.0, False

    def run(self, stages: Iterable[Stage]) -> Outcome:
        """Tries the stages in order, then pairs; stops at the first stage that leaves no doubt.

        If the model is on a CPU with a second core, another process tries the operators and tensors meanwhile.
        """
        stages = list(stages)
        forked = [stage for stage in stages if stage[0] in _FORKED] if self._has_second_core() else []
        helper: Helper[_Report] | None = None
        outcome: Outcome | None = None
        with contextlib.ExitStack() as stack:
            for stage, changes in stages:
                if forked and stage not in _OF_OUTPUT:
                    with contextlib.suppress(OSError):  # no memory, or too many processes
                        helper = stack.enter_context(Helper(partial(self._help, forked)))
                    forked = []
                report = helper.report(_PATIENCE * self.seconds) if helper and stage in _FORKED else None
                with contextlib.suppress(_OutOfTimeError):
                    if report is not None:
                        outcome = self._joined(report, _made(changes))
                    elif not self._late:
                        outcome = self._tried(stage, _made(changes))
                if outcome is not None:
                    break
        with contextlib.suppress(_OutOfTimeError):
            if outcome is None and not any(trial.near(self.floor) for trial in self.trials):
                self._pairs(self.known)
            self.complete.add("pairs")
        complete = outcome is not None or {"pairs", *(name for name, _ in stages)} <= self.complete
        causes = {change.cause for change in self.known}
        return replace(outcome or self._decide(), tried=self.tried, causes=causes, complete=complete)

    def _tried(self, stage: str, changes: list[Change]) -> Outcome | None:
        """The outcome after a stage, if it leaves no doubt."""
        self.known += changes
        self._stage(stage, [(change, None) for change in changes])
        self.complete.add(stage)
        return self._concluded(stage)

    def _concluded(self, stage: str) -> Outcome | None:
        """The outcome after a stage, if it leaves no doubt; tries pairs if one change explains most."""
        outcome = self._decide()
        leading = self._leading(_LEADING if stage == "operators and tensors" else _MOSTLY)
        if leading is not None and leading.changes not in self._paired:
            self._paired.append(leading.changes)
            with contextlib.suppress(_OutOfTimeError):
                self._pairs(self.known, early=True)
            outcome = self._decide()
        # No stage of the output decides alone, because their changes have similar effects.
        undecided = stage in _OF_OUTPUT or outcome.accepted is None or not self._decisive(outcome.accepted)
        return None if undecided else outcome

    # ---- another process -------------------------------------------------------------------------------------------

    def _help(self, stages: list[Stage], report: Callable[[_Report], None]) -> None:
        """Runs in the other process; reports the changes that are worth keeping."""
        self.deadline = time.thread_time() + self.seconds
        for stage, changes in stages:
            each, before = _made(changes), len(self.trials)
            number = {id(change): i for i, change in enumerate(each)}
            with contextlib.suppress(_OutOfTimeError):
                self._stage(stage, [(change, None) for change in each])
                self.complete.add(stage)
            found = [(number[id(trial.changes[0])], trial.values) for trial in self.trials[before:]]
            report(_Report(stage, self.tried.get(stage, 0), found, stage in self.complete))

    def _joined(self, report: _Report, changes: list[Change]) -> Outcome | None:
        """The outcome with the trials of the other process, if it leaves no doubt."""
        self.known += changes
        self.tried[report.stage] = report.tried
        self.complete |= {report.stage} if report.complete else set()
        for i, values in report.found:
            with contextlib.suppress(*_REFUSED):
                trial = self._trial((changes[i],), values)
                self.trials += [trial] if trial is not None else []
        return self._concluded(report.stage)

    def _has_second_core(self) -> bool:
        if sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2 or multiprocessing.current_process().daemon:
            return False
        if not hasattr(self.full.model, "model"):
            return False
        return next(self.full.model.model.parameters()).device.type == "cpu"  # CUDA does not survive a fork

    def _stage(self, stage: str, changes: Iterable[tuple[Change, Trial | None]]) -> None:
        """Screens changes, each alone or on top of a trial; fits and scores those that explain most."""
        found: list[_Screened] = []
        try:
            for change, base in changes:
                self._check_time()
                self.tried[stage] = self.tried.get(stage, 0) + 1
                with contextlib.suppress(*_REFUSED):
                    screened = self._screened(change, base)
                    if screened is not None:
                        found.append(screened)
        finally:  # even if time is up, the best ones so far are fitted
            found.sort(key=lambda s: s.error)
            self.deadline = max(self.deadline, time.thread_time() + _GRACE * self.seconds)
            for screened in found[:_REFINED]:
                with contextlib.suppress(*_REFUSED, _OutOfTimeError):
                    self._keep(screened)

    # ---- one change ------------------------------------------------------------------------------------------------

    def _screened(self, change: Change, base: Trial | None) -> _Screened | None:
        """The change at the best value of its grid on a few sequences; None if it explains too little there."""
        few = self.context if change.fit is not None else self._tokens((*(base.changes if base else ()), change))
        computation = few.declared if base is None else reapplied(base, few)
        as_is = self.left.mean if few is self.context else self.few_as_is
        before = as_is if base is None else few.error(computation)
        limit = _PROMISING * min(before, as_is)
        if change.fit is not None:
            value = change.fit(few, computation)
            error = float("inf") if value is None else self._error(few, (change,), (value,), computation)
            return _Screened(change, base, value, error, before) if error < limit else None
        errors = self._errors(few, change, base, computation)
        order = sorted(range(len(errors)), key=errors.__getitem__)
        best = _Screened(change, base, change.values[order[0]], errors[order[0]], before)
        if change.continuous and len(order) > 1:
            best = replace(best, brackets=tuple(around(change.values, i) for i in order[:2]))
        if not best.error < 0.5 * limit and change.start is not None:
            near = self._linear(few, change, computation, change.start)
            if near is not None and near[1] < min(best.error, limit):
                width = abs(near[0] - change.start)
                bracket = (near[0] - 0.5 * width, near[0] + 0.5 * width)
                best = replace(best, value=near[0], error=near[1], brackets=(bracket,))
        return best if best.error < limit else None

    def _errors(self, few: Context, change: Change, base: Trial | None, computation: Computation) -> list[float]:
        """Errors of the grid's values; of many, those of the best ones on one sequence."""
        values, chosen = change.values, list(range(len(change.values)))
        if len(values) > _MANY and few is self.few and len(few.sequences) > 1:
            start = self.one.declared if base is None else reapplied(base, self.one)
            first = self._at_values(self.one, change, values, start)
            chosen = sorted(chosen, key=first.__getitem__)[: _MANY // 2]
        found = [torch.inf] * len(values)
        errors = self._at_values(few, change, [values[i] for i in chosen], computation)
        for i, error in zip(chosen, errors, strict=True):
            found[i] = error
        return found

    def _at_values(self, few: Context, change: Change, values: Sequence[Any], computation: Computation) -> list[float]:
        """Errors at some values; changes of the inputs are scored many at a time."""
        size = few.at_once if change.stage == "inputs" and not change.whole else 1
        found: list[float] = []
        for start in range(0, len(values), size):
            self._check_time()
            chunk = values[start : start + size]
            together: list[float] = []
            if size > 1:
                with contextlib.suppress(*_REFUSED):
                    made = [c for value in chunk if (c := change.apply(computation, value)) is not None]
                    together = few.errors(made) if len(made) == len(chunk) else []
            found += together or [self._error(few, (change,), (value,), computation) for value in chunk]
        return [error if error == error else torch.inf for error in found]

    def _tokens(self, changes: tuple[Change, ...]) -> Context:
        """A few sequences, or all if a change depends on all."""
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
        """The trial with the first change fitted again after the second one, if that leaves less."""
        (first, second), (_, value) = trial.changes, trial.values
        computation = second.apply(self.full.declared, value)
        again = None if computation is None or first.fit is None else first.fit(self.context, computation)
        found = None if again is None else self._trial((second, first), (value, again))
        return found if found is not None and found.residual.mean < trial.residual.mean else trial

    def _trial(self, changes: tuple[Change, ...], values: tuple[Any, ...]) -> Trial | None:
        computation = applied(self.full, changes, values)
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
            computation = applied(few, changes, values, base)
            if computation is None:
                return float("inf")
            layer, alone = changes[0].layer, base is None or base.body is few.declared.body
            if layer and alone and len(changes) == 1 and few is not self.context and few.keeps_layers(_REFUSED):
                computation = computation.with_body(start=layer)
            found = few.error(computation)
        except _REFUSED:
            return float("inf")
        return found if found == found else float("inf")

    def _linear(self, few: Context, change: Change, base: Computation, start: float) -> tuple[float, float] | None:
        """The value with the smallest error of a linear extrapolation from the declared one, and the error there."""
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
        computation = applied(few, changes, values, base)
        return few.score(computation) if computation is not None else torch.full_like(few.target, torch.nan)

    # ---- two changes -----------------------------------------------------------------------------------------------

    def _pairs(self, changes: list[Change], early: bool = False) -> None:
        """Tries second changes on the trials that leave least: changes of the output, and these trials on each other.

        On a change of the output that explains most, every other change is tried too. An early call tries only changes
        of the output, on the trials that explain most.
        """
        explained = _LEADING if early else _EXPLAINED
        ranked = sorted(self.trials, key=lambda t: t.residual.mean)
        bests = _one_per_cause(
            [t for t in ranked if len(t.changes) == 1 and t.residual.mean < explained * self.left.mean]
        )
        if early:
            bests = [t for t in bests if t.residual.mean < _AS_GOOD * bests[0].residual.mean]
        found = torch.inf
        for base in bests[:_PAIRED]:
            if base.residual.mean > 1.2 * found:
                return
            first = base.changes[0]
            every = not early and first.stage in _OF_OUTPUT and base.residual.mean < _LEADING * self.left.mean
            second = [c for c in changes if c.cause != first.cause and (every or c.stage in (*_OF_OUTPUT, "precision"))]
            second += [t.changes[0] for t in bests if t.cause != base.cause and t.changes[0] not in second]
            self._stage("pairs", [(c, base) for c in second])
            if any(trial.near(self.floor) for trial in self.trials):
                found = min(found, base.residual.mean)  # bases that explain as much are tried too

    def _leading(self, share: float) -> Trial | None:
        """The trial that leaves less than a share, if none explains all, because a second change is then likely."""
        least = min(self.trials, key=lambda t: t.residual.mean, default=None)
        if least is None or any(trial.near(self.floor) for trial in self.trials):
            return None
        return least if least.residual.mean < share * self.left.mean else None

    # ---- acceptance ------------------------------------------------------------------------------------------------

    def _residual(self, prediction: Tensor) -> Residual:
        return residual(prediction, self.context.target, self.full.sequences.owner, len(self.full.sequences))

    def _noise(self, trial: Trial) -> float:
        """The noise of the changed computation in multiples of the declared one's, where it may decide."""
        temperature = trial.parameters.get("temperature")
        factor = max(1.0, 1.0 / temperature) if isinstance(temperature, float) and temperature > 0 else 1.0
        if trial.computation.stream and trial.residual.mean < 0.1 * self.left.mean:
            noise = self.floor.mean * (torch.rand(len(self.as_is), generator=torch.Generator().manual_seed(0)) * 4 - 2)
            shaken = (lambda x, z, rows: x + noise.to(x), *trial.computation.stream)
            moved = self.full.score(replace(trial.computation, stream=shaken)) - trial.prediction
            factor = max(factor, float(moved.abs().nanmean()) / max(self.floor.mean, 1e-12))
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
        now = time.perf_counter()
        if now - self._checked < _EVERY:  # reading the processor time takes as long as scoring a tiny model
            return
        self._checked = now
        if time.thread_time() > self.deadline:
            self._late = True
            raise _OutOfTimeError

    def _decisive(self, accepted: Trial) -> bool:
        clean = accepted.residual.mean <= CLEAN * accepted.noise * self.floor.mean
        return self.left.mean > DECISIVE * accepted.residual.mean and (clean or not accepted.generic)

    def _decide(self) -> Outcome:
        return decide(self.trials, self.left, self.floor)


def _made(changes: Callable[[], Iterable[Change]]) -> list[Change]:
    """The changes of a stage, up to one that cannot be made for this model."""
    found: list[Change] = []
    with contextlib.suppress(*_REFUSED, DriftError):
        found.extend(changes())
    return found


def _one_per_cause(trials: list[Trial]) -> list[Trial]:
    found: dict[str, Trial] = {}
    for trial in trials:
        found.setdefault(trial.cause, trial)
    return list(found.values())


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
