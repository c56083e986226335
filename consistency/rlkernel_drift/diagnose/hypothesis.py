"""A hypothesis: how a side may have been computed, what it predicts, what it leaves unexplained, when it is accepted.

A hypothesis is accepted only near the noise floor and well below the runner-up, else the difference is "unexplained".
One that contains another (temperature and top-p contains top-p) is not its rival, and is preferred only where the
simpler one does not reach the floor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from rlkernel_drift.capsule import Floor
from rlkernel_drift.diagnose.context import Context, Residual
from rlkernel_drift.profiles import raise_floor
from rlkernel_drift.verdict import Scalar


@dataclass(frozen=True)
class Prediction:
    """Log-probabilities under a hypothesis.

    Attributes:
        values: [N]; NaN where the hypothesis makes no prediction.
        parameters: fitted ones by name.
        hidden: [N, C] of the counted rows if the body was changed, so that settings can be fitted on top.
        weight: of the head, if it was replaced.
    """

    values: Tensor
    parameters: dict[str, Scalar] = field(default_factory=dict)
    hidden: Tensor | None = None
    weight: Tensor | None = None


def predicted(
    context: Context, hidden: Tensor, parameters: dict[str, Scalar] | None = None, weight: Tensor | None = None
) -> Prediction:
    """The prediction of a changed body, under the declared settings."""
    return Prediction(context.predict(hidden, weight=weight), parameters or {}, hidden, weight)


@dataclass(frozen=True)
class Hypothesis:
    """One entry of the battery.

    Attributes:
        name: shown to the user. cause: key of `knowledge.CAUSES`.
        predict: None where the hypothesis does not apply.
        implies: causes that it contains.
        rounds: whether it rounds noisy values: noise near the middle of two roundings moves a token by a whole step.
        dtype: of the layers, if they are in another one; the noise of that dtype may remain.
    """

    name: str
    cause: str
    predict: Callable[[Context], Prediction | None]
    implies: frozenset[str] = frozenset()
    rounds: bool = False
    dtype: str = "float32"

    @property
    def causes(self) -> frozenset[str]:
        """Its cause and those that it contains."""
        return self.implies | {self.cause}


# What may remain under an accepted hypothesis, in multiples of the noise floor's mean and 99% quantile.
NEAR_FLOOR, NEAR_TAIL = 2.0, 6.0
ROUNDED_FLOOR, ROUNDED_TAIL = 4.0, 24.0
# How far it must be below the runner-up; closer ones need a difference of so many standard errors.
BELOW_RUNNER_UP = 0.5
CLOSEST, CLOSEST_FILTERS, SIGMAS = 0.85, 0.94, 4.0
_FILTERS = frozenset({"top-p", "top-k", "min-p"})


@dataclass(frozen=True)
class Trial:
    """A hypothesis that was tried.

    Attributes:
        affected: numbers of the sequences that it explains while the others are as declared; None means all.
    """

    hypothesis: Hypothesis
    prediction: Prediction
    residual: Residual
    affected: list[int] | None = None

    def near(self, floor: Floor) -> bool:
        """Whether what is left is noise."""
        left, noise, floor = self.residual, self.noise, raise_floor(floor, self.hypothesis.dtype)
        mean, tail = (ROUNDED_FLOOR, ROUNDED_TAIL) if self.hypothesis.rounds else (NEAR_FLOOR, NEAR_TAIL)
        return left.usable and left.mean <= mean * noise * floor.mean and left.p99 <= tail * noise * floor.p99

    @property
    def noise(self) -> float:
        """Factor on the floor's noise under this hypothesis: a temperature below 1 amplifies it."""
        temperature = self.prediction.parameters.get("temperature")
        return max(1.0, 1.0 / temperature) if isinstance(temperature, float) and temperature > 0 else 1.0

    @property
    def effort(self) -> tuple[int, int]:
        """Number of causes, and whether it explains only some sequences; simpler hypotheses come first."""
        return len(self.hypothesis.causes), int(self.affected is not None)


def decide(trials: list[Trial], as_is: Residual, floor: Floor) -> tuple[Trial | None, Trial | None, str]:
    """Accepts a hypothesis, or none.

    Returns:
        (accepted or None, runner-up or None, why nothing was accepted).
    """
    usable = [t for t in trials if t.residual.usable]
    mean = lambda t: t.residual.mean
    near = sorted((t for t in usable if t.near(floor)), key=lambda t: (*t.effort, mean(t)))
    if not near:
        best = min(usable, key=mean, default=None)
        if best is None:
            return None, None, "no hypothesis could be tried"
        ratio = mean(best) / floor.mean
        return None, best, f"the best hypothesis, {best.hypothesis.name}, leaves {ratio:.1f} times the noise floor"
    clearly = [t for t in near if mean(t) < 0.6 * mean(near[0]) and t.effort[0] <= 2]
    accepted = min(clearly, key=mean, default=near[0])
    rivals = [t for t in usable if not _related(accepted.hypothesis, t.hypothesis)]
    runner_up = min(rivals, key=mean, default=None)
    limit = as_is.mean if runner_up is None else min(as_is.mean, mean(runner_up))
    if mean(accepted) <= BELOW_RUNNER_UP * limit or _surely_better(accepted, runner_up, as_is):
        return accepted, runner_up, ""
    if runner_up is not None and mean(runner_up) < as_is.mean:
        why = f"{accepted.hypothesis.name} and {runner_up.hypothesis.name} explain it about equally well"
    else:
        why = "the difference is too close to the noise floor to tell causes apart"
    return None, runner_up, why


def _surely_better(accepted: Trial, runner_up: Trial | None, as_is: Residual) -> bool:
    """Whether the accepted trial is closer token by token; noise in both residuals can hide the ratio of means."""
    if runner_up is None or accepted.residual.mean > BELOW_RUNNER_UP * as_is.mean:
        return False
    # Filters renormalise over nearly the same tokens and therefore leave similar residuals.
    similar = {accepted.hypothesis.cause, runner_up.hypothesis.cause} <= _FILTERS
    if accepted.residual.mean > (CLOSEST_FILTERS if similar else CLOSEST) * runner_up.residual.mean:
        return False
    gain = runner_up.residual.tokens - accepted.residual.tokens
    gain = gain[gain.isfinite()]
    error = float(gain.std()) / max(1, len(gain)) ** 0.5
    return float(gain.mean()) > SIGMAS * error


def _related(a: Hypothesis, b: Hypothesis) -> bool:
    return a.causes <= b.causes or b.causes <= a.causes
