"""A hypothesis: how a side may have been computed, what it predicts, what it leaves unexplained, when it is accepted.

One is accepted only near the noise floor and well below the runner-up, else the difference is "unexplained". A
hypothesis that contains another (temperature and top-p contains top-p) is no rival of it, and is preferred only where
the simpler one does not reach the floor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlkernel_drift.capsule import Floor
from rlkernel_drift.diagnose.context import Context
from rlkernel_drift.profiles import at_least
from rlkernel_drift.scoring.semantics import IMPOSSIBLE
from rlkernel_drift.verdict import Scalar


@dataclass(frozen=True)
class Prediction:
    """Log-probabilities under a hypothesis.

    Attributes:
        values: [N]; NaN where the hypothesis says nothing.
        parameters: fitted ones by name.
        hidden: [N, C] of the counted rows, where the body was changed, so that settings can be fitted on top.
        weight: of the head, where it is another one.
    """

    values: Tensor
    parameters: dict[str, Scalar] = field(default_factory=dict)
    hidden: Tensor | None = None
    weight: Tensor | None = None


@dataclass(frozen=True)
class Hypothesis:
    """One entry of the battery.

    Attributes:
        name: in words. cause: key of `knowledge.CAUSES`.
        implies: causes that it contains; a hypothesis is no rival of one that it contains.
        rounds: it rounds values that are noisy before: one that lies between two roundings moves a token by a step.
        dtype: of the layers, where it is another one: the noise of that dtype is what may be left.
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


Battery = Callable[[Context], Iterator[Hypothesis]]


@dataclass(frozen=True)
class Residual:
    """What a prediction leaves unexplained.

    Attributes:
        mean, p99: of |prediction - target| over the tokens that are predicted.
        sequences: [B] mean of each sequence, NaN where nothing is predicted.
        share: predicted tokens, of all.
        tokens: [N] each token's, NaN where nothing is predicted.
        bias: mean of target - prediction.
    """

    mean: float
    p99: float
    sequences: Tensor
    share: float
    tokens: Tensor
    bias: float

    @property
    def usable(self) -> bool:
        """Whether enough tokens are predicted to judge."""
        return self.share >= 0.5


def residual(prediction: Tensor, target: Tensor, owner: Tensor, count: int) -> Residual:
    """Residual of a prediction; tokens that are NaN on a side are left out."""
    size = (prediction - target).abs().clamp(max=-IMPOSSIBLE)
    there = torch.isfinite(size)
    if not bool(there.any()):
        return Residual(float("inf"), float("inf"), torch.full((count,), torch.nan), 0.0, size, 0.0)
    known, mine = size[there].double(), owner[there]
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, mine, known)
    number = torch.zeros(count, dtype=torch.float64).index_add_(0, mine, torch.ones_like(known))
    return Residual(
        float(known.mean()),
        float(known.quantile(0.99)) if len(known) < 1 << 23 else float(known.max()),
        sums / number,
        float(there.float().mean()),
        size,
        float((target - prediction)[there].double().mean()),
    )


def together(a: Tensor, b: Tensor) -> float:
    """Correlation of two differences, token by token; 0 where nothing can be said."""
    pair = torch.stack([a, b]).double()
    pair = pair[:, pair.isfinite().all(0)]
    found = float(torch.corrcoef(pair)[0, 1]) if pair.shape[1] > 2 else 0.0
    return found if found == found else 0.0


def best_of(a: Tensor, b: Tensor, target: Tensor, owner: Tensor, count: int) -> tuple[Tensor, list[int]]:
    """For each sequence the closer of two predictions: the prediction, and the sequences that took the second."""
    first, second = (residual(p, target, owner, count).sequences for p in (a, b))
    takes = (second < first) | (torch.isnan(first) & ~torch.isnan(second))
    return torch.where(takes[owner], b, a), [int(i) for i in takes.nonzero()[:, 0]]


NEAR_FLOOR, NEAR_TAIL = 2.0, 6.0
ROUNDED_FLOOR, ROUNDED_TAIL = 4.0, 24.0
BELOW_RUNNER_UP = 0.5
CLOSEST, CLOSEST_FILTERS, SIGMAS = 0.85, 0.94, 4.0
_FILTERS = frozenset({"top-p", "top-k", "min-p"})
HEALTHY_MEAN, HEALTHY_TAIL, HEALTHY_SEQUENCE, HEALTHY_BIAS = 1.25, 2.0, 2.5, 0.3


@dataclass(frozen=True)
class Trial:
    """A hypothesis that was tried.

    Attributes:
        affected: numbers of the sequences that it explains while the others are as declared; None: all.
    """

    hypothesis: Hypothesis
    prediction: Prediction
    residual: Residual
    affected: list[int] | None = None

    def near(self, floor: Floor) -> bool:
        """Whether what is left is noise."""
        r, noise, floor = self.residual, self.noise, at_least(floor, self.hypothesis.dtype)
        mean, tail = (ROUNDED_FLOOR, ROUNDED_TAIL) if self.hypothesis.rounds else (NEAR_FLOOR, NEAR_TAIL)
        return r.usable and r.mean <= mean * noise * floor.mean and r.p99 <= tail * noise * floor.p99

    @property
    def noise(self) -> float:
        """How much louder the floor's noise is under this hypothesis: a temperature below 1 divides it too."""
        temperature = self.prediction.parameters.get("temperature")
        return max(1.0, 1.0 / temperature) if isinstance(temperature, float) and temperature > 0 else 1.0

    @property
    def effort(self) -> tuple[int, int]:
        """Causes and parts that it needs; simpler ones come first."""
        return len(self.hypothesis.causes), int(self.affected is not None)


def healthy(as_is: Residual, floor: Floor) -> bool:
    """Whether the declared computation explains the side: in the mean, in the tail, and in every sequence."""
    sequences = as_is.sequences[as_is.sequences.isfinite()]
    worst = float(sequences.max()) if len(sequences) else 0.0
    return (
        as_is.mean <= HEALTHY_MEAN * floor.mean
        and as_is.p99 <= HEALTHY_TAIL * floor.p99
        and worst <= HEALTHY_SEQUENCE * floor.mean
        and abs(as_is.bias) <= HEALTHY_BIAS * floor.mean
    )


def decide(trials: list[Trial], as_is: Residual, floor: Floor) -> tuple[Trial | None, Trial | None, str]:
    """Chooses.

    Returns:
        (accepted or None, runner-up or None, why nothing was accepted).
    """
    usable = [t for t in trials if t.residual.usable]
    near = sorted((t for t in usable if t.near(floor)), key=lambda t: (*t.effort, t.residual.mean))
    if not near:
        best = min(usable, key=lambda t: t.residual.mean, default=None)
        if best is None:
            return None, None, "no hypothesis could be tried"
        ratio = best.residual.mean / floor.mean
        return None, best, f"the best hypothesis, {best.hypothesis.name}, leaves {ratio:.1f} times the noise floor"
    rivals_of = lambda t: [r for r in usable if not _related(t.hypothesis, r.hypothesis)]
    # Among hypotheses of equal effort the one that leaves least.
    simplest = [t for t in near if t.effort == near[0].effort]
    accepted = simplest[0]
    clearly = [t for t in near if t.residual.mean < 0.6 * accepted.residual.mean and t.effort[0] <= 2]
    accepted = min(clearly, key=lambda t: t.residual.mean) if clearly else accepted
    rivals = rivals_of(accepted)
    runner_up = min(rivals, key=lambda t: t.residual.mean, default=None)
    limit = min(as_is.mean, runner_up.residual.mean if runner_up else as_is.mean)
    if accepted.residual.mean <= BELOW_RUNNER_UP * limit or _surely_better(accepted, runner_up, as_is):
        return accepted, runner_up, ""
    if runner_up is not None and runner_up.residual.mean < as_is.mean:
        return None, runner_up, f"{accepted.hypothesis.name} and {runner_up.hypothesis.name} explain it about as well"
    return None, runner_up, "the difference is too close to the noise floor to tell causes apart"


def _surely_better(accepted: Trial, runner_up: Trial | None, as_is: Residual) -> bool:
    """Noise is in both residuals and hides their ratio: token by token the accepted one must be closer all the same."""
    if runner_up is None or accepted.residual.mean > BELOW_RUNNER_UP * as_is.mean:
        return False
    # Filters resemble one another: they renormalise over nearly the same tokens.
    alike = {accepted.hypothesis.cause, runner_up.hypothesis.cause} <= _FILTERS
    if accepted.residual.mean > (CLOSEST_FILTERS if alike else CLOSEST) * runner_up.residual.mean:
        return False
    gain = runner_up.residual.tokens - accepted.residual.tokens
    gain = gain[gain.isfinite()]
    error = float(gain.std()) / max(1, len(gain)) ** 0.5
    return float(gain.mean()) > SIGMAS * error


def _related(a: Hypothesis, b: Hypothesis) -> bool:
    return a.causes <= b.causes or b.causes <= a.causes
