"""Diagnoses two capsules with a reference model: each side as declared, then the battery, then the layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from rlkernel_drift.capsule import Capsule, Floor
from rlkernel_drift.diagnose.battery import run_battery
from rlkernel_drift.diagnose.bodies import old_tensors, predict_with_old
from rlkernel_drift.diagnose.context import (
    Context,
    References,
    Residual,
    context_of,
    correlation,
    noise_floor,
    possible_dtypes,
    residual,
)
from rlkernel_drift.diagnose.hypothesis import Trial, decide
from rlkernel_drift.diagnose.layers import OUTLIER, LocalError, local_errors, recorded_sequences, splice
from rlkernel_drift.errors import DriftError
from rlkernel_drift.knowledge import CAUSES, finding
from rlkernel_drift.locate import layer_of
from rlkernel_drift.pair import Pair, match
from rlkernel_drift.profiles import raise_floor
from rlkernel_drift.scoring.model import name_of
from rlkernel_drift.statistics import owners
from rlkernel_drift.verdict import Diagnosis, Finding, HypothesisResult, LayerView, Scalar

_SHOWN = 12
_NOTHING_ELSE, _UNBIASED, _SIZE = 0.6, 0.3, (0.5, 1.6)
_CLEARLY = 2.0


@dataclass(eq=False)
class Examined:
    """One side after its examination.

    Attributes:
        as_is, hidden: prediction and hidden states of the declared computation.
        left: the differences that the declared computation does not explain.
        others: the side in the other dtypes that it may have, if it declares none.
    """

    name: str
    capsule: Capsule
    context: Context
    as_is: torch.Tensor
    hidden: torch.Tensor
    left: Residual
    floor: Floor
    local: dict[str, LocalError] | None = None
    others: list[Examined] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether the reference, as declared, explains the side's log-probabilities."""
        return self.left.healthy(self.floor)

    @property
    def over_floor(self) -> float:
        """What the declared computation leaves, in multiples of the noise floor."""
        return self.left.mean / self.floor.mean

    @property
    def outliers(self) -> list[tuple[str, float]]:
        """Operators with errors of their own, worst first."""
        found = [(name, local.ratio) for name, local in (self.local or {}).items() if local.ratio > OUTLIER]
        return sorted(found, key=lambda item: -item[1])


def diagnose(
    rollout: Capsule, train: Capsule, references: References, floor: Floor | None = None
) -> tuple[Diagnosis, LayerView | None]:
    """Names the cause of the difference between two capsules of the same tokens.

    Args:
        references: the trainer's model, and what else hypotheses may use.
        floor: measured noise; default calibrated here for these tokens.

    Raises:
        DriftError: a side has no log-probabilities of counted tokens.
    """
    pair = match(rollout, train)
    streams = pair.streams()
    if streams is None:
        raise DriftError("diagnose needs log-probabilities on both sides")
    first = examine("rollout", rollout, references, streams[0], floor)
    sides = [first, examine("train", train, references, streams[1], floor, like=first)]
    while wrong := [side for side in sides if not side.healthy]:
        side = max(wrong, key=lambda s: s.over_floor)
        if len(wrong) == 2 and _agree(pair, streams, side.floor):
            return alike(side), _view([side])
        fitting = next((other for other in side.others if other.healthy), None)
        whys: list[tuple[list[Trial], str]] = []
        for tried in [side] if fitting else [side, *side.others]:
            trials = run_battery(tried.context, tried.as_is, tried.hidden, tried.floor)
            if side.others:  # a side that declares no dtype cannot have the wrong one
                trials = [trial for trial in trials if trial.hypothesis.cause != "body-dtype"]
            accepted, runner_up, why = decide(trials, tried.left, tried.floor)
            if accepted is not None:
                if len(wrong) == 2 and _agree(pair, streams, tried.floor, accepted.noise):
                    return alike(tried, accepted), _view([tried])
                return accepted_diagnosis(tried, accepted, runner_up, trials), _view([tried])
            whys.append((trials, why))
        if fitting is None:
            trials, why = whys[0]
            # In a dtype that is not the side's, every operator has a large error.
            replayed = min([side, *side.others], key=lambda s: len(s.outliers))
            if replayed.outliers:
                return _operator(replayed, trials), _view([replayed])
            return unexplained_diagnosis(side, trials, why, _suspects(side, trials)), _view([side])
        sides[sides.index(side)] = replace(fitting, others=[side])
    return _without_drift(sides), _view(sides)


def examine(
    name: str,
    capsule: Capsule,
    references: References,
    stream: str,
    floor: Floor | None = None,
    like: Examined | None = None,
) -> Examined:
    """Scores one side with the reference as the side declares itself, and calibrates the noise floor.

    A side that declares no dtype is scored in the checkpoint's, unless another dtype is clearly closer.

    Args:
        like: a side examined before; its scores are reused if it declares the same computation of the same tokens.
    """
    found: list[Examined] = []
    for dtype in possible_dtypes(capsule, references.model):
        context = context_of(capsule, references, stream, dtype=dtype)
        if not context.sequences.counted:
            raise DriftError(f"the {name} side has no counted token")
        side = _examined(name, capsule, context, floor, [] if like is None else [like, *like.others])
        if side.healthy and not found:
            return side
        if side.left.usable or not found:  # float16 may overflow
            found.append(side)
    closest = min(found, key=lambda s: s.left.mean)
    if found[0].left.mean <= _CLEARLY * closest.left.mean:
        closest = found[0]
    closest.others = [side for side in found if side is not closest]
    return closest


def _examined(name: str, capsule: Capsule, context: Context, floor: Floor | None, known: list[Examined]) -> Examined:
    like = next((side for side in known if context.computes_like(side.context)), None)
    if like is not None:
        hidden, as_is, noise = like.hidden, like.as_is, like.floor
    else:
        hidden = context.hidden()
        as_is = context.predict(hidden)
        noise = noise_floor(context, as_is) if floor is None else raise_floor(floor, name_of(context.dtype))
    context.floor = noise
    local = local_errors(context, capsule) if capsule.operators.values else None
    return Examined(name, capsule, context, as_is, hidden, context.residual(as_is), noise, local)


def _agree(pair: Pair, streams: tuple[str, str], floor: Floor, noise: float = 1.0) -> bool:
    """Whether the sides differ by no more than `noise` times the noise floor, however far they are from the model."""
    floor = floor.model_copy(update={"mean": noise * floor.mean, "p99": noise * floor.p99})
    compared = pair.compared(streams)
    assert compared is not None
    owner = torch.from_numpy(owners(pair.rollout.cu_seqlens, compared.index))
    left, right = (torch.from_numpy(x[compared.index].copy()) for x in (compared.rollout, compared.train))
    return len(compared.index) > 0 and residual(left, right, owner, pair.rollout.sequences).healthy(floor)


# ---- diagnoses -----------------------------------------------------------------------------------------------------


def _no_cause(side: Examined, statement: str) -> Diagnosis:
    return Diagnosis(
        cause="none",
        statement=statement,
        residual=side.left.mean,
        as_is=side.left.mean,
        floor=side.floor.mean,
        floor_source=_source(side.floor),
    )


def _without_drift(sides: list[Examined]) -> Diagnosis:
    suspects = [side for side in sides if side.outliers]
    if suspects:
        return _operator(suspects[0], [])
    worst = max(sides, key=lambda s: s.over_floor)
    statement = (
        f"Both sides match the model as they declare it: mean |d| {worst.left.mean:.3g} against a noise floor of "
        f"{worst.floor.mean:.3g}"
    )
    for side in sides:
        if side.others:
            statement += f"; the {side.name} side declares no dtype and fits {name_of(side.context.dtype)}"
    return _no_cause(worst, statement)


def alike(side: Examined, trial: Trial | None = None) -> Diagnosis:
    """The diagnosis of two sides that agree with each other and not with the model."""
    statement = (
        f"Both sides agree within the noise floor of {side.floor.mean:.3g} and differ from the model alike, by mean "
        f"|d| {side.left.mean:.3g}: they are aligned, and "
    )
    if trial is None:
        statement += "--model did not compute them"
    else:
        statement += f"neither declares {trial.hypothesis.name}{_shown(trial.prediction.parameters)}"
    return _no_cause(side, statement)


def accepted_diagnosis(side: Examined, trial: Trial, runner_up: Trial | None, trials: list[Trial]) -> Diagnosis:
    """The diagnosis of an accepted hypothesis."""
    left, parameters = trial.residual.mean, trial.prediction.parameters
    statement = (
        f"The {side.name} side is explained by: {trial.hypothesis.name}{_shown(parameters)}. Mean |d| falls from "
        f"{side.left.mean:.3g} to {left:.3g} (noise floor {side.floor.mean:.3g}"
    )
    if runner_up is not None:
        statement += f"; runner-up {runner_up.hypothesis.name} leaves {runner_up.residual.mean:.3g}"
    evidence: dict[str, Scalar] = {
        "residual": left,
        "floor": side.floor.mean,
        "runner_up": runner_up.residual.mean if runner_up else None,
    }
    return _diagnosis(side, trials, trial.hypothesis.cause, f"{statement})", parameters, left, evidence)


def _suspects(side: Examined, trials: list[Trial]) -> list[Finding]:
    """Layers in fewer bits on an unknown path, if their rounding has the size of the side's differences.

    They are only a suspect: re-scoring does not remove the difference, and many faults make differences of that size.
    """
    context, mean = side.context, side.left.mean
    others = [t.residual.mean for t in trials if t.hypothesis.cause != "body-dtype"]
    nothing_else = min(others, default=mean) > _NOTHING_ELSE * mean
    if side.others or context.dtype != torch.float32 or not nothing_else or abs(side.left.bias) > _UNBIASED * mean:
        return []
    for dtype in (torch.bfloat16, torch.float16):
        rounding = context.predict(context.hidden(dtype=dtype)) - side.as_is
        size = float(rounding.abs().mean())
        if _SIZE[0] * size <= mean <= _SIZE[1] * size:
            correlated = correlation(rounding, context.target - side.as_is)
            message = (
                f"layers in {name_of(dtype)}, whose rounding makes differences of this size ({size:.3g}; token by "
                f"token their correlation is {correlated:.2f})"
            )
            evidence: dict[str, Scalar] = {"as_is": mean, "rounding": size, "correlation": correlated}
            return [finding("body-dtype", message, "warning", dtype=name_of(dtype), **evidence)]
    return []


def _operator(side: Examined, trials: list[Trial]) -> Diagnosis:
    """The diagnosis of the worst operator; it says so if the operator fails in every layer."""
    assert side.local is not None
    outliers = side.outliers
    name, ratio = outliers[0]
    kind = name.split(".")[-1]
    layers = {layer_of(n) for n, _ in outliers if n.split(".")[-1] == kind} - {None}
    total = len({layer_of(n) for n in side.local} - {None})
    where = f"{kind} in every layer" if layers and len(layers) == total > 1 else name
    finite = math.isfinite(ratio)
    size = f"its error on its own recorded input is {ratio:.1f} times its rounding"
    if not finite:
        size = "values are NaN or infinite although its recorded input makes finite ones"
    statement = f"On the {side.name} side {where} computes a different function: {size}"
    stale = _stale_operator(side, outliers)
    if stale:
        statement += f", and the previous weights explain it ({', '.join(stale[:3])})"
    parameters: dict[str, Scalar] = {
        "operator": name,
        "layer": layer_of(name),
        "ratio": ratio if finite else None,
        "layers": len(layers),
    }
    return _diagnosis(side, trials, "partial-sync" if stale else "operator", statement, parameters, side.left.mean, {})


def _stale_operator(side: Examined, outliers: list[tuple[str, float]]) -> list[str]:
    """Names of weights of the outliers whose old values bring the side to the floor."""
    if side.context.references.previous is None:
        return []
    old = old_tensors(side.context)
    operators = [name.removeprefix("layers.") for name, _ in outliers]
    names = [n for n in old if any(_is_weight_of(n, operator) for operator in operators)]
    if not names:
        return []
    left = side.context.residual(predict_with_old(side.context, {n: old[n] for n in names}))
    return names if left.mean <= 2 * side.floor.mean else []


def _is_weight_of(parameter: str, operator: str) -> bool:
    layer, _, name = operator.rpartition(".")
    return (not layer or f".layers.{layer}." in parameter) and f".{name}." in parameter


def unexplained_diagnosis(side: Examined, trials: list[Trial], why: str, suspects: Sequence[Finding] = ()) -> Diagnosis:
    """The diagnosis where nothing was accepted, with the causes that were excluded."""
    off = f"the {side.name} side differs by {side.left.mean:.3g}, the noise floor is {side.floor.mean:.3g}"
    statement = f"Unexplained: {off}; {why}"
    if suspects:
        words = " or ".join(suspect.message for suspect in suspects)
        statement += f". Suspected, but not confirmed by re-scoring: {words}"
    found = _diagnosis(side, trials, "unexplained", statement, {}, side.left.mean, {})
    causes = {suspect.cause for suspect in suspects}
    excluded = [cause for cause in found.excluded if cause not in causes]
    return found.model_copy(update={"suspects": list(suspects), "excluded": excluded})


def _diagnosis(
    side: Examined,
    trials: list[Trial],
    cause: str,
    statement: str,
    parameters: dict[str, Scalar],
    left: float,
    evidence: dict[str, Scalar],
) -> Diagnosis:
    evidence = {"as_is": side.left.mean, **evidence, **parameters}
    return Diagnosis(
        cause=cause,
        side=side.name,
        statement=statement,
        parameters=parameters,
        residual=left,
        as_is=side.left.mean,
        floor=side.floor.mean,
        floor_source=_source(side.floor),
        hypotheses=[_result(side, trial) for trial in sorted(trials, key=lambda t: t.residual.mean)[:_SHOWN]],
        excluded=sorted({t.hypothesis.cause for t in trials if not t.near(side.floor)} - {cause}),
        finding=finding(cause, statement, **evidence) if cause in CAUSES else None,  # type: ignore[arg-type]
    )


def _result(side: Examined, trial: Trial) -> HypothesisResult:
    affected = "" if trial.affected is None else f" ({len(trial.affected)} sequences)"
    return HypothesisResult(
        name=trial.hypothesis.name + affected,
        cause=trial.hypothesis.cause,
        side=side.name,
        parameters=trial.prediction.parameters,
        residual=trial.residual.mean,
        tail=trial.residual.p99,
        over_floor=trial.residual.mean / side.floor.mean,
    )


def _shown(parameters: dict[str, Scalar]) -> str:
    shown = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in parameters.items()]
    return f" ({', '.join(shown)})" if shown else ""


def _source(floor: Floor) -> str:
    return f"{floor.tokens} tokens under {', '.join(floor.permutations)}"


def _view(sides: list[Examined]) -> LayerView | None:
    """Local errors, floors and splicing of the first side that recorded operators."""
    side = next((s for s in sides if s.local is not None), None)
    if side is None or side.local is None:
        return None
    left: list[float] = []
    if not side.healthy:
        chosen = [i for i, _ in recorded_sequences(side.capsule)]
        stream = match(side.capsule, side.capsule).streams()
        assert stream is not None
        small = context_of(side.capsule, side.context.references, stream[0], chosen=chosen)
        left = splice(replace(side.context, sequences=small.sequences, target=small.target), side.capsule)
    numbered = {f"layers.{k}.output": value for k, value in enumerate(left[1:])}
    return LayerView(
        operators=list(side.local),
        local=[local.error if math.isfinite(local.error) else None for local in side.local.values()],
        floor=[local.rounding for local in side.local.values()],
        splice=[numbered.get(name) for name in side.local],
    )
