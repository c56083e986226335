"""Changes of a computation, trials of them, and which trial is accepted.

A trial is accepted only if it leaves no more than noise, and if no trial that predicts other numbers leaves about as
little.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlkernel_drift.capsule import Floor
from rlkernel_drift.diagnose.context import Computation, Context, Residual
from rlkernel_drift.profiles import raise_floor
from rlkernel_drift.verdict import Scalar


@dataclass(frozen=True)
class Change:
    """A change of a computation that the search may try.

    Attributes:
        name: shown to the user. cause: key of `knowledge.CAUSES`. stage: of the search.
        apply: maps a computation and a value to the changed computation; None if it does not apply.
        values: the grid. continuous: whether values between them exist. shown: a value as the verdict shows it.
        start: the value of the declared computation, near which the prediction is nearly linear in the value.
        fit: finds the value without a grid; it returns None if nothing fits.
        operator: the operator or tensor that it changes, if it is one.
        effort: simpler changes have less; a change that contains another has more.
        implies: causes that it contains.
        rounds: whether it rounds noisy values, so that noise may move a token by a whole step.
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

    @property
    def layer(self) -> int:
        """The layer that it changes; 0 if it changes several, or none."""
        found = re.search(r"\blayers?[. ](\d+)\b", self.operator)
        return int(found.group(1)) if found else 0


@dataclass(frozen=True)
class Trial:
    """A computation that was tried.

    Attributes:
        prediction: [N]. residual: target less prediction, over the region. scope: the part of the tokens that it
            explains, while the others are as declared; "" means all.
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
        """The cause of its first change, which explains more than a second one."""
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


# Limits of what an accepted change leaves, in multiples of the noise floor's mean and 99% quantile.
NEAR_FLOOR, NEAR_TAIL = 2.0, 6.0
ROUNDED_FLOOR, ROUNDED_TAIL = 4.0, 24.0
# What it leaves is at most this share of what the runner-up leaves; up to the second share (the third between filters)
# it must be better token by token, by so many standard errors.
_BELOW_RUNNER_UP = 0.5
_CLOSEST, _CLOSEST_FILTERS, _SIGMAS = 0.85, 0.94, 4.0
_FILTERS = frozenset({"top-p", "top-k", "min-p"})
DECISIVE = 8.0
"""Factor by which a trial reduces the difference if no later stage need be tried."""
CLEAN = 1.3
"""Noise floors that a generic change may leave for the same."""
_SAME = 0.25  # noise floors by which the predictions of equal trials differ at most
_AMBIGUOUS = 2.0  # factor by which a runner-up reduces the difference if both trials are named
_TELLING = 3.0  # noise floors from which on a difference distinguishes causes whose predictions are equal
_TOO_CLOSE = "the difference is too close to the noise floor to tell causes apart"


@dataclass
class Outcome:
    """The result of a search.

    Attributes:
        accepted: the named trial, or None; equal: other trials that predict the same numbers.
        rivals: two trials that both leave noise and predict other numbers, so that neither is proven.
        tried: stage -> number of changes; causes: theirs. complete: whether the time sufficed.
    """

    accepted: Trial | None
    runner_up: Trial | None
    why: str
    trials: list[Trial] = field(default_factory=list)
    equal: list[Trial] = field(default_factory=list)
    rivals: list[Trial] = field(default_factory=list)
    tried: dict[str, int] = field(default_factory=dict)
    causes: set[str] = field(default_factory=set)
    complete: bool = True


def reapplied(trial: Trial, context: Context) -> Computation:
    """The computation of a trial for the tokens of a context."""
    found = applied(context, trial.changes, trial.values)
    assert found is not None
    return found


def applied(
    context: Context, changes: tuple[Change, ...], values: tuple[Any, ...], base: Computation | None = None
) -> Computation | None:
    """The declared computation, or `base`, with changes; None if one does not apply."""
    found: Computation | None = context.declared if base is None else base
    for change, value in zip(changes, values, strict=True):
        found = None if found is None else change.apply(found, value)
    return found


def each_request(
    context: Context,
    base: Computation,
    change: Callable[[Computation, Any], Computation],
    values: Iterable[Any],
    none: Any,
) -> list[Any] | None:
    """For each request the value that explains most, or `none`; None if no request needs one."""
    left = context.residual(context.score(base)).sequences.clone()
    found = [none] * len(left)
    for value in values:
        tried = context.residual(context.score(change(base, value))).sequences
        better = tried < 0.9 * left
        left = torch.where(better, tried, left)
        found = [value if b else f for b, f in zip(better.tolist(), found, strict=True)]
    return found if any(value != none for value in found) else None


def decide(trials: list[Trial], as_is: Residual, floor: Floor) -> Outcome:
    """Accepts a trial, or none."""
    usable = [t for t in trials if t.residual.usable or t.scope]
    mean = lambda t: t.residual.mean
    near = [t for t in usable if t.near(floor) and _tells(t, as_is, floor)]
    near.sort(key=lambda t: (*t.effort, mean(t)))
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
    if mean(accepted) <= _BELOW_RUNNER_UP * limit or _surely_better(accepted, runner_up, as_is):
        others = (t for t in equal if t is not accepted and t.cause != accepted.cause and not _related(t, accepted))
        named = {t.name: t for t in others}
        if named and as_is.mean < _TELLING * floor.mean:
            return Outcome(None, runner_up, _TOO_CLOSE, trials)
        return Outcome(accepted, runner_up, "", trials, list(named.values()))
    if runner_up is not None and mean(runner_up) < as_is.mean:
        why = f"{accepted.name} and {runner_up.name} explain it about equally well"
    else:
        why = _TOO_CLOSE
    both = runner_up is not None and runner_up.near(floor) and as_is.mean > _AMBIGUOUS * mean(runner_up)
    return Outcome(None, runner_up, why, trials, rivals=[accepted, runner_up] if both and runner_up else [])


def _tells(trial: Trial, as_is: Residual, floor: Floor) -> bool:
    """Whether it leaves only the declared computation's noise, or explains nearly all if its own noise is larger."""
    return trial.residual.mean <= max(NEAR_FLOOR * floor.mean, as_is.mean / DECISIVE)


def _alike(trial: Trial, accepted: Trial, as_is: Residual, floor: Floor) -> bool:
    """Whether two trials predict the same numbers, as a scale of queries and one of the scores do."""
    distance = (trial.prediction - accepted.prediction).abs().nanmean()
    return bool(distance <= max(_SAME * floor.mean, 1e-3 * as_is.mean))


def _surely_better(accepted: Trial, runner_up: Trial | None, as_is: Residual) -> bool:
    """Whether the accepted trial is closer token by token, because noise in both can hide the ratio of the means."""
    if runner_up is None or accepted.residual.mean > _BELOW_RUNNER_UP * as_is.mean:
        return False
    # Filters renormalise over nearly the same tokens and therefore leave similar residuals.
    similar = {accepted.cause, runner_up.cause} <= _FILTERS
    if accepted.residual.mean > (_CLOSEST_FILTERS if similar else _CLOSEST) * runner_up.residual.mean:
        return False
    gain = runner_up.residual.tokens - accepted.residual.tokens
    gain = gain[gain.isfinite()]
    error = float(gain.std()) / max(1, len(gain)) ** 0.5
    return float(gain.mean()) > _SIGMAS * error


def _related(a: Trial, b: Trial) -> bool:
    return a.causes <= b.causes or b.causes <= a.causes
