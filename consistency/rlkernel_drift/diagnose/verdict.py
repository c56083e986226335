"""Puts a diagnosis into a verdict: a failed input gate has named the cause already, the battery names the rest."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from rlkernel_drift.capsule import Capsule, Floor, WeightFingerprint
from rlkernel_drift.capsule.fingerprint import weight_fingerprint
from rlkernel_drift.compare import conclude
from rlkernel_drift.diagnose.context import References, context_of
from rlkernel_drift.diagnose.gradient import gradient_consequence
from rlkernel_drift.diagnose.recorded import GUESSED, diagnose_recorded
from rlkernel_drift.diagnose.run import diagnose
from rlkernel_drift.errors import DriftError
from rlkernel_drift.gates.common import INPUT_GATES, skipped, some
from rlkernel_drift.gates.weights import same_weight
from rlkernel_drift.knowledge import finding
from rlkernel_drift.pair import match
from rlkernel_drift.scoring.operators import stored
from rlkernel_drift.scoring.weights import state_of
from rlkernel_drift.verdict import Consequence, Diagnosis, Finding, Gate, LayerView, Status, Verdict

_THETA = 1e-3
_NO_LOGPROB = frozenset({"not-finite", "support", "above-zero"})
"""Causes by which the statistics gate refuses values: a difference to them explains nothing."""


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
        found = diagnose_recorded(rollout, train, floor)
        if found is None:
            return verdict
        result = verdict.model_copy(update={"diagnosis": found})
    else:
        models = references()
        check_model(models, train)
        found, layers = diagnose(rollout, train, models, floor)
        update: dict[str, object] = {"diagnosis": found, "layers": _merged(verdict.layers, layers)}
        if verdict.status == Status.DRIFT:
            cost = _gradient(rollout, train, models)
            update["consequences"] = verdict.consequences + ([cost] if cost else [])
        result = verdict.model_copy(update=update)
    if found.cause == "none" or verdict.status != Status.ALIGNED:
        return result
    if found.cause == "unexplained" and found.floor_source == GUESSED:
        return _undecided(result, found)
    # The profile lets it pass; a cause was found all the same, and that is drift.
    return _failed(result, found)


def check_model(models: References, train: Capsule) -> None:
    """Refuses a model that did not compute the train side: its own deviation would be taken for drift.

    Raises:
        DriftError: it has another shape, rotary base or other weights than the capsule says.
    """
    model, manifest = models.model, train.manifest
    theta = manifest.config.get("rope_theta")
    text = getattr(model.config, "text_config", None) or model.config
    pairs: list[tuple[str, object, object]] = [
        ("num_hidden_layers", getattr(text, "num_hidden_layers", None), manifest.model.layers),
        ("hidden_size", getattr(text, "hidden_size", None), manifest.model.hidden_size),
    ]
    if isinstance(theta, (int, float)) and model.theta and abs(model.theta - theta) > _THETA * theta:
        pairs.append(("rope_theta", float(f"{model.theta:.6g}"), theta))
    words = [f"{name} {own} where the capsule has {its}" for name, own, its in pairs if its and own and own != its]
    known = manifest.weights.tensors if manifest.weights else {}
    state = state_of(model)
    merged = set(models.adapter.updates) if models.adapter else set()
    common = [name for name in known if name in state and name not in merged]
    with ThreadPoolExecutor() as pool:  # hashing and numpy leave the interpreter's lock
        held = [] if words else list(pool.map(lambda name: _holds(known[name], state[name]), common))
    differ = [name for name, same in zip(common, held, strict=False) if not same]
    if differ:
        words = [f"{len(differ)} of {len(common)} tensors are others ({some(differ)})"]
    if words:
        raise DriftError(
            f"--model is not the model that computed the train capsule: {'; '.join(words)}. Name the directory that "
            "the train side was captured from"
        )


def _holds(known: WeightFingerprint, value: Tensor) -> bool:
    """Whether a weight is the one of a fingerprint, in its dtype; true for dtypes that are not judged."""
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    if known.dtype not in dtypes:
        return True
    return same_weight(known, weight_fingerprint(stored(value.to(dtypes[known.dtype]))))


def _undecided(verdict: Verdict, found: Diagnosis) -> Verdict:
    """Nothing fits, but no noise floor was measured: neither aligned nor drift."""
    words = f"{found.statement}; the floor is a guess, measure one (`rlkernel-drift floor`) or name --model"
    gates = [skipped("statistics", words) if gate.name == "statistics" else gate for gate in verdict.gates]
    return conclude(verdict.model_copy(update={"gates": gates}))


def _answered(verdict: Verdict) -> Verdict:
    """Without the advice to diagnose, and without hints that the diagnosis refuted: that has been done."""
    excluded = verdict.diagnosis.excluded if verdict.diagnosis is not None else []

    def answered(gate: Gate, found: Finding) -> Finding:
        if found.cause == "drift":
            return found.model_copy(update={"fix": ""})
        if gate.name != "statistics" or found.severity != "warning" or found.cause not in excluded:
            return found
        return found.model_copy(
            update={"severity": "note", "message": f"{found.message}; re-scoring excludes it", "fix": ""}
        )

    gates = [gate.model_copy(update={"findings": [answered(gate, f) for f in gate.findings]}) for gate in verdict.gates]
    return verdict.model_copy(update={"gates": gates})


def _from_gates(verdict: Verdict) -> Diagnosis | None:
    for gate in verdict.gates:
        errors = [f for f in gate.findings if f.severity == "error"]
        if gate.status != "failed" or not errors:
            continue
        first = errors[0]
        if gate.name in INPUT_GATES or (gate.name == "statistics" and first.cause in _NO_LOGPROB):
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
