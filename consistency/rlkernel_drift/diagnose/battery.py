"""Runs the battery over one side: every hypothesis once, then settings on top of the most promising bodies."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rlkernel_drift.capsule import Floor
from rlkernel_drift.diagnose.bodies import body_battery
from rlkernel_drift.diagnose.context import Context
from rlkernel_drift.diagnose.decide import Trial
from rlkernel_drift.diagnose.hypothesis import Hypothesis, Prediction
from rlkernel_drift.diagnose.residual import best_of, residual
from rlkernel_drift.diagnose.semantic import Base, precision_battery, semantic_battery
from rlkernel_drift.scoring.semantics import fit_temperature

_PAIRED = 3


def run_battery(context: Context, as_is: torch.Tensor, hidden: torch.Tensor, floor: Floor) -> list[Trial]:
    """All trials, in the order of the battery.

    Args:
        as_is: [N] prediction of the declared computation; hidden: [N, C] its hidden states.
    """
    trials = []
    for hypothesis in _hypotheses(context, hidden):
        prediction = hypothesis.predict(context)
        if prediction is not None:
            trials += _trials(context, hypothesis, prediction, as_is, floor)
    if not any(trial.near(floor) for trial in trials):
        trials += _paired(context, trials)
    return trials


def _hypotheses(context: Context, hidden: torch.Tensor) -> Iterator[Hypothesis]:
    yield from semantic_battery(context, hidden)
    yield from precision_battery(context, hidden)
    yield from body_battery(context)


def trial_of(context: Context, hypothesis: Hypothesis, prediction: Prediction) -> Trial:
    """A hypothesis with what it leaves, for all sequences."""
    left = residual(prediction.values, context.target, context.sequences.owner, len(context.sequences))
    return Trial(hypothesis, prediction, left)


def _trials(
    context: Context, hypothesis: Hypothesis, prediction: Prediction, as_is: torch.Tensor, floor: Floor
) -> list[Trial]:
    """The hypothesis for all sequences, and for some of them where the others are as declared."""
    owner, count = context.sequences.owner, len(context.sequences)
    whole = trial_of(context, hypothesis, prediction)
    if whole.near(floor) or count < 2:
        return [whole]
    mixed, affected = best_of(as_is, prediction.values, context.target, owner, count)
    if not 0 < len(affected) < count:
        return [whole]
    part = Prediction(mixed, {**prediction.parameters, "sequences": len(affected)})
    return [whole, Trial(hypothesis, part, residual(mixed, context.target, owner, count), affected)]


def _paired(context: Context, trials: list[Trial]) -> list[Trial]:
    """A temperature on top of the bodies that leave least: two faults at once."""
    bodies = [t for t in trials if t.prediction.hidden is not None and t.affected is None]
    bodies.sort(key=lambda t: t.residual.mean)
    found = []
    for trial in bodies[:_PAIRED]:
        assert trial.prediction.hidden is not None
        base = Base(context, trial.prediction.hidden, trial.prediction.weight)
        prediction = base.spread(fit_temperature(base.rows, base.own))
        name = f"{trial.hypothesis.name}, and another temperature"
        both = Hypothesis(
            name, trial.hypothesis.cause, trial.hypothesis.predict, trial.hypothesis.causes | {"temperature"}
        )
        parameters = {**trial.prediction.parameters, **prediction.parameters}
        left = residual(prediction.values, context.target, context.sequences.owner, len(context.sequences))
        found.append(Trial(both, Prediction(prediction.values, parameters), left))
    return found
