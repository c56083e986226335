"""Puts a diagnosis into a verdict: a failed input gate has named the cause already, the battery names the rest."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rlkernel_drift.capsule import Capsule, Floor
from rlkernel_drift.compare import conclude
from rlkernel_drift.diagnose.context import References, context_of
from rlkernel_drift.diagnose.gradient import gradient_consequence
from rlkernel_drift.diagnose.recorded import diagnose_recorded
from rlkernel_drift.diagnose.run import diagnose
from rlkernel_drift.gates.common import INPUT_GATES
from rlkernel_drift.knowledge import finding
from rlkernel_drift.pair import match
from rlkernel_drift.verdict import Consequence, Diagnosis, LayerView, Status, Verdict


def diagnose_verdict(
    verdict: Verdict,
    rollout: Capsule,
    train: Capsule,
    references: Callable[[], References] | None,
    floor: Floor | None = None,
) -> Verdict:
    """The verdict with a diagnosis.

    Args:
        references: loads the models; not called where a gate has named the cause. None: there is no model, and the
            train side's recorded logits stand in.
    """
    found = _diagnosed(verdict, rollout, train, references, floor)
    return found if found.diagnosis is None else _answered(found)


def _diagnosed(
    verdict: Verdict,
    rollout: Capsule,
    train: Capsule,
    references: Callable[[], References] | None,
    floor: Floor | None,
) -> Verdict:
    named = _from_gates(verdict)
    if named is not None:
        return verdict.model_copy(update={"diagnosis": named})
    if verdict.statistics is None or not verdict.statistics.tokens:
        return verdict
    if references is None:
        recorded = diagnose_recorded(rollout, train, floor)
        return verdict if recorded is None else verdict.model_copy(update={"diagnosis": recorded})
    models = references()
    found, layers = diagnose(rollout, train, models, floor)
    update: dict[str, object] = {"diagnosis": found, "layers": _merged(verdict.layers, layers)}
    if verdict.status == Status.DRIFT:
        cost = _gradient(rollout, train, models)
        update["consequences"] = verdict.consequences + ([cost] if cost else [])
    result = verdict.model_copy(update=update)
    if found.cause != "none" and verdict.status == Status.ALIGNED:
        # The profile lets it pass; a cause was found all the same, and that is drift.
        return _failed(result, found)
    return result


def _answered(verdict: Verdict) -> Verdict:
    """Without the advice to diagnose: that has been done."""
    gates = [
        gate.model_copy(
            update={"findings": [f.model_copy(update={"fix": ""}) if f.cause == "drift" else f for f in gate.findings]}
        )
        for gate in verdict.gates
    ]
    return verdict.model_copy(update={"gates": gates})


def _from_gates(verdict: Verdict) -> Diagnosis | None:
    for gate in verdict.gates:
        errors = [f for f in gate.findings if f.severity == "error"]
        if gate.name in INPUT_GATES and gate.status == "failed" and errors:
            first = errors[0]
            return Diagnosis(
                cause=first.cause, statement=f"Named by the gate of {gate.title}: {first.message}", finding=first
            )
    return None


def _gradient(rollout: Capsule, train: Capsule, models: References) -> Consequence | None:
    pair = match(rollout, train)
    streams = pair.streams()
    if streams is None:
        return None
    # Both sides in the rollout's order, so that one set of sequences serves for both.
    context = context_of(rollout, models, streams[0])
    other = torch.from_numpy(pair.from_train(train.logprobs[streams[1]]))[context.sequences.token]
    return gradient_consequence(context, context.target, other)


def _failed(verdict: Verdict, found: Diagnosis) -> Verdict:
    error = found.finding or finding("drift", found.statement)
    gates = [
        gate.model_copy(update={"status": "failed", "summary": found.statement, "findings": [*gate.findings, error]})
        if gate.name == "statistics"
        else gate
        for gate in verdict.gates
    ]
    return conclude(verdict.model_copy(update={"gates": gates}))


def _merged(before: LayerView | None, local: LayerView | None) -> LayerView | None:
    """Accumulated errors of the comparison beside the local ones of the replay."""
    if before is None or local is None:
        return local or before
    accumulated = dict(zip(before.operators, before.accumulated, strict=True))
    heat = dict(zip(before.operators, before.heat, strict=True))
    return local.model_copy(
        update={
            "accumulated": [accumulated.get(name) for name in local.operators],
            "heat": [heat.get(name, []) for name in local.operators],
            "heat_tokens": before.heat_tokens,
            "first": before.first,
        }
    )
