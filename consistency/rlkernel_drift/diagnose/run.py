"""Diagnoses two capsules with a reference model: each side as declared, then the search, then the location."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch

from rlkernel_drift.capsule import Capsule, Floor, layer_of
from rlkernel_drift.diagnose import stages, tensors
from rlkernel_drift.diagnose.context import (
    MATCHING,
    RACED,
    References,
    Residual,
    context_of,
    residual,
)
from rlkernel_drift.diagnose.location import (
    Region,
    part_of,
    probable_place,
    recorded_sequences,
    regions,
    splice,
)
from rlkernel_drift.diagnose.search import Search, Stage
from rlkernel_drift.diagnose.sides import Examined, examine, examined, form_in, in_one_dtype, rounds_like
from rlkernel_drift.diagnose.trials import NEAR_FLOOR, Change, Outcome, Trial, applied, reapplied
from rlkernel_drift.errors import DriftError
from rlkernel_drift.knowledge import CAUSES, finding
from rlkernel_drift.pair import Pair, match
from rlkernel_drift.scoring.model import name_of
from rlkernel_drift.statistics import owners
from rlkernel_drift.verdict import Diagnosis, HypothesisResult, LayerView, Scalar

SECONDS = 10.0
"""Default seconds of a search; a slow model gets the time of `_SCORINGS` scorings, at most `_LONGEST` seconds."""
_SCORINGS, _LONGEST = 600, 90.0
_SHOWN = 12  # hypotheses of a verdict


def diagnose(
    rollout: Capsule, train: Capsule, references: References, floor: Floor | None = None, seconds: float | None = None
) -> tuple[Diagnosis, LayerView | None]:
    """Names the cause of the difference between two capsules of the same tokens.

    Args:
        references: the trainer's model, and what else changes may use.
        floor: measured noise; default calibrated here for these tokens.
        seconds: limit of the search; default `SECONDS`, more for a slow model.

    Raises:
        DriftError: a side has no log-probabilities of counted tokens.
    """
    pair = match(rollout, train)
    streams = pair.streams()
    if streams is None:
        raise DriftError("diagnose needs log-probabilities on both sides")
    trained = examine("train", train, references, streams[1], floor)
    sides = in_one_dtype([examine("rollout", rollout, references, streams[0], floor, like=trained), trained])
    wrong = [side for side in sides if not side.healthy]
    if not wrong:
        return _other_dtype(sides) or _without_drift(sides), _view(sides)
    side = max(wrong, key=lambda s: s.over_floor)
    shared = _shared_processing(sides) if len(wrong) == 2 else None
    if shared is None:
        if _agree(pair, streams, side.floor):
            return alike(side), _view([side])
        return _explained(sides, seconds)
    sides = [_declaring(side, shared, floor) for side in sides]
    if any(not side.healthy for side in sides):
        found, view = _explained(sides, seconds)
    else:
        found, view = _without_drift(sides), _view(sides)
    both = f"Both sides have {shared.name}{_shown(shared.parameters)}, which neither declares. "
    return _restated(found, both + found.statement), view


_BEFORE = 2.0
"""Seconds of each search for processing that both sides have and neither declares."""
_FARTHER = 1.5
"""Factor by which the other side may be farther from the model with this processing, because a fault can hide it."""


def _shared_processing(sides: list[Examined]) -> Trial | None:
    """The processing of the logits that explains one side, unless the other side is clearly farther from the model with
    it."""
    near, far = sorted(sides, key=lambda s: s.over_floor)
    both = ((near, far), (far, near))
    # fp32 first, because what matches there matches within the noise of 16 bits too.
    wide = ((form_in(side, torch.float32), other) for side, other in both)
    tried = [(form, other) for form, other in wide if form.context.dtype == torch.float32]
    for side, other in both:
        forms = sorted([side, *side.others], key=lambda s: s.over_floor)
        tried += [(form, other) for form in forms if form.context.dtype != torch.float32][:1]
    for side, other in tried:
        kinds = [stage for stage in stages(side.context, side.suspects) if stage[0] in ("logits", "filters")]
        found = Search(side.context, side.as_is, _BEFORE).run(kinds).accepted
        if found is not None and all(isinstance(value, (int, float, dict)) for value in found.values):
            other = form_in(other, side.context.dtype)
            error = other.context.error(reapplied(found, other.context))
            # A fault of this side does not help the other.
            limit = 1.0 if other.over_floor < side.over_floor else _FARTHER
            return found if error < limit * other.left.mean else None
    return None


def _declaring(side: Examined, shared: Trial, floor: Floor | None) -> Examined:
    """The side as if it declared the processing of the logits that both sides have."""
    side = form_in(side, shared.computation.body.dtype)
    apply = lambda c: applied(side.context, shared.changes, shared.values, c)
    context = replace(side.context, undeclared=apply, floor=None, _hidden={})
    return replace(examined(side.name, side.capsule, context, floor, []), others=side.others)


def _explained(sides: list[Examined], seconds: float | None) -> tuple[Diagnosis, LayerView | None]:
    """The diagnosis of the side that is farther from the model."""
    side = max((s for s in sides if not s.healthy), key=lambda s: s.over_floor)
    other = next(s for s in sides if s is not side)
    outcome, region = _searched(side, seconds)
    accepted = outcome.accepted
    if accepted is None and outcome.rivals:
        accepted, other_trial = outcome.rivals
        outcome = replace(outcome, equal=[other_trial])
    if accepted is not None:
        if _explains_both(accepted, other):
            return alike(side, accepted), _view([side])
        return accepted_diagnosis(side, accepted, outcome), _view([side])
    fitting = next((form for form in side.others if form.healthy and rounds_like(form, side)), None)
    if fitting is not None:
        sides = [replace(fitting, others=[side]) if s is side else s for s in sides]
        return _other_dtype(sides) or _without_drift(sides), _view(sides)
    # In a dtype that is not the side's, every operator has a large error.
    replayed = min([side, *side.others], key=lambda s: len(s.outliers))
    if replayed.outliers:
        return _operator(replayed, outcome), _view([replayed])
    most = _most_of_it(side, outcome)
    if region is None and most is not None and not _helps(most, other):
        return _partly(side, most, outcome), _view([side])
    return located_diagnosis(side, outcome, region), _view([side])


def _searched(side: Examined, seconds: float | None) -> tuple[Outcome, Region | None]:
    """Searches all tokens, then the parts that alone carry the difference."""
    limit = seconds if seconds is not None else min(max(SECONDS, _SCORINGS * side.cost), _LONGEST)
    begin, parts = time.thread_time(), regions(side.context, side.as_is)
    share = limit if not parts else 0.6 * limit
    outcome = Search(side.context, side.as_is, share).run(_stages(side))
    for region in parts:
        if outcome.accepted is not None:
            return outcome, None
        left = limit - (time.thread_time() - begin)
        if region.kind == "tokens" and len(region.places) < 3:
            continue
        part = Search(side.context, side.as_is, left, region.where, region.words).run(_stages(side))
        if part.accepted is not None:
            return part, region
    return outcome, next((region for region in parts if _beyond_noise(side, region)), None)


def _beyond_noise(side: Examined, region: Region) -> bool:
    """Whether neither near ties, nor noise that hides the difference elsewhere, can explain the region."""
    if side.context.dtype == torch.float32:
        return True
    if region.kind == "tokens":
        return int(region.where.sum()) >= RACED
    return region.kind != "requests" or len(side.context.sequences) - len(region.places) >= MATCHING


def _stages(side: Examined) -> list[Stage]:
    """The stages. If the side declares no dtype, other dtypes are forms of the side and not tried here."""

    def kept(changes: Callable[[], Iterable[Change]]) -> Iterator[Change]:
        return (c for c in changes() if not (side.others and c.cause == "body-dtype" and c.stage == "precision"))

    found = stages(side.context, side.suspects)
    if side.outliers:  # the replay of the recorded operators names single ones
        found = list(itertools.takewhile(lambda stage: not stage[0].startswith("single"), found))
    return [(name, partial(kept, changes)) for name, changes in found]


def _explains_both(accepted: Trial, other: Examined) -> bool:
    """Whether the other side is computed with the accepted change too, so that it is not their difference."""
    left = _helps(accepted, other)
    return left is not None and replace(accepted, residual=left).near(other.floor)


def _helps(trial: Trial, other: Examined) -> Residual | None:
    """What a change leaves of the other side's differences, if it explains at least half of them too."""
    if other.healthy:
        return None
    left = other.context.residual(other.context.score(reapplied(trial, other.context)))
    return left if left.mean < 0.5 * other.left.mean else None


def _agree(pair: Pair, streams: tuple[str, str], floor: Floor) -> bool:
    """Whether the sides differ by no more than the noise floor, however far they are from the model."""
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
        confidence="proven",
    )


def _other_dtype(sides: list[Examined]) -> Diagnosis | None:
    """The diagnosis where the sides match the model in different dtypes, declared or not."""
    for side, other in (sides, sides[::-1]):
        narrow, wide = side.context.dtype, other.context.dtype
        if narrow.itemsize >= wide.itemsize:
            continue
        context = replace(side.context, dtype=wide, head=other.context.head, _hidden={})
        as_is = context.score(context.declared)
        same = replace(other, name=side.name, context=context, as_is=as_is, left=context.residual(as_is))
        weights = {n: context.weight(n).to(narrow) for n, _ in context.model.model.named_parameters()}
        left = context.residual(context.score(context.declared.with_edits(weights)))
        cause, words, mean = "body-dtype", "layers", side.left.mean
        if left.mean <= NEAR_FLOOR * same.floor.mean:
            cause, words, mean = "quantised-weights", "weights, not layers,", left.mean
        statement = (
            f"The {side.name} side matches the model with {words} in {name_of(narrow)}, the {other.name} side in "
            f"{name_of(wide)}. Mean |d| falls from {same.left.mean:.3g} to {mean:.3g}"
        )
        found = _diagnosis(same, None, cause, statement, {"dtype": name_of(narrow)}, mean, {})
        return found.model_copy(update={"confidence": "proven", "next": _AGAIN})
    return None


def _without_drift(sides: list[Examined]) -> Diagnosis:
    suspects = [side for side in sides if side.outliers]
    if suspects:
        return _operator(suspects[0], None)
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
        statement += f"neither declares {trial.name}{_shown(trial.parameters)}"
    return _no_cause(side, statement)


def accepted_diagnosis(side: Examined, trial: Trial, outcome: Outcome) -> Diagnosis:
    """The diagnosis of an accepted change."""
    left, parameters = trial.residual.mean, dict(trial.parameters)
    where = f" in {trial.scope}" if trial.scope else ""
    one_of = "one of several changes: " if outcome.equal else ""
    others = "".join(f", or {t.name}{_shown(t.parameters)}" for t in outcome.equal[:3])
    statement = f"The {side.name} side is explained{where} by: {one_of}{trial.name}{_shown(parameters)}{others}. "
    statement += "Mean |d| falls from "
    before = side.left.mean
    statement += f"{before:.3g} to {left:.3g} (noise floor {side.floor.mean:.3g}"
    runner_up = outcome.runner_up
    if runner_up is not None:
        statement += f"; runner-up {runner_up.name} leaves {runner_up.residual.mean:.3g}"
    statement += ")"
    operator = next((c.operator for c in trial.changes if c.operator), "")
    evidence: dict[str, Scalar] = {
        "residual": left,
        "floor": side.floor.mean,
        "runner_up": runner_up.residual.mean if runner_up else None,
    }
    if operator:
        parameters["operator"] = operator
    found = _diagnosis(side, outcome, trial.cause, statement, parameters, left, evidence)
    update: dict[str, object] = {
        "confidence": "likely" if outcome.equal else "proven",
        "alternatives": list(dict.fromkeys(t.cause for t in outcome.equal if t.cause != trial.cause)),
        "location": operator or trial.scope,
        "next": _capture(side) if outcome.equal else _AGAIN,
    }
    return found.model_copy(update=update)


_AGAIN = "rlkernel-drift compare ROLLOUT TRAIN, with both captured again after the fix"


def _capture(side: Examined) -> str:
    """The command that records operator outputs of the side, because their replay decides."""
    engine = side.capsule.manifest.engine
    known = engine if engine in ("hf", "vllm", "rlkernel", "vllm+rlkernel", "hf+rlkernel") else "ENGINE"
    command = f"rlkernel-drift capture --engine {known} --model DIR --prompts FILE --operators full --out {side.name}"
    return f"{command}, then diagnose it: the replay of its operators shows which one fails"


_PART = 0.6  # of the difference; a change that leaves less is a better explanation than any single tensor
_REST = 1.3  # noise floors that tokens outside the few that are named may have


_OF_REGIONS = {
    "requests": ("some-requests", "these requests were computed otherwise than the rest"),
    "later": ("some-places", "something changes there, such as the weights, a window, or a limit of the context"),
    "earlier": ("some-places", "something ends there, such as the effect of another prompt"),
    "steps": ("some-places", "steps that return several tokens, as in speculative decoding, differ in one of them"),
    "tokens": ("few-tokens", "a race or a wrong entry of a few tokens, not a shift of all"),
}
"""Kind of region -> (cause, explanation)."""


def located_diagnosis(side: Examined, outcome: Outcome, region: Region | None) -> Diagnosis:
    """The diagnosis where no change is accepted: the narrowest place that the evidence supports."""
    off = f"the {side.name} side differs by {side.left.mean:.3g}, the noise floor is {side.floor.mean:.3g}"
    statement = f"No change explains it: {off}; {outcome.why}"
    if not outcome.complete:
        statement += "; the time was not enough for all (--seconds)"
    place, parameters, cause = "", dict[str, Scalar](), "unexplained"
    if region is not None and (region.kind != "tokens" or _rest_is_noise(side, region)):
        cause, words = _OF_REGIONS[region.kind]
        place, parameters = region.words, {"tokens": int(region.where.sum())}
        statement = (
            f"The difference is that of {place}; the rest matches the model to the noise floor: {words}. {statement}"
        )
    elif _in_part(side, outcome):
        statement += "; probably two things differ"
    elif side.left.mean > 3 * side.floor.mean and hasattr(side.context.model, "model"):
        place, words = probable_place(side.left, side.floor, side.suspects)
        if place:
            cause, parameters = "operator", {"operator": place}
            statement = f"{words}. {statement}"
    found = _diagnosis(side, outcome, cause, statement, parameters, side.left.mean, {})
    update = {"location": place, "confidence": "likely" if place else "unknown", "next": _capture(side)}
    return found.model_copy(update=update)


_MOST = 0.25  # share of the difference; a change that leaves less is named, as one of two
_MOST_OF_PAIR = 0.1  # two changes together fit more, so they must leave less
_MOST_OF_CONSTANT = 0.5  # share of what a constant prediction leaves
_LARGE = 8.0  # noise floors of a large difference
_NEVER_IN_PART = frozenset({"few-tokens", "masked-tokens", "logit-bias", "wrong-candidate"})
"""Causes whose fits have many numbers, or whose values resemble the log-probabilities themselves."""


def _most_of_it(side: Examined, outcome: Outcome) -> Trial | None:
    """The change that explains at least three quarters of a large difference, or two that explain nine tenths.

    None if a constant prediction would explain about as much.
    """
    left = lambda t: _MOST if len(t.changes) == 1 else _MOST_OF_PAIR
    fitting = (t for t in outcome.trials if t.residual.usable and t.residual.mean < left(t) * side.left.mean)
    best = min(fitting, key=lambda t: t.residual.mean, default=None)
    if best is None or side.over_floor < _LARGE or best.cause in _NEVER_IN_PART:
        return None
    target = side.context.target[side.context.target.isfinite()]
    constant = float((target - target.median()).abs().mean())  # what a constant leaves, such as a model of zeros
    return best if best.residual.mean < _MOST_OF_CONSTANT * constant and not best.near(side.floor) else None


def _partly(side: Examined, trial: Trial, outcome: Outcome) -> Diagnosis:
    """The diagnosis of a change that explains most of a difference; something else differs too."""
    found = accepted_diagnosis(side, trial, replace(outcome, runner_up=None, equal=[]))
    share = 1 - trial.residual.mean / side.left.mean
    statement = (
        f"The {side.name} side is explained to {share:.0%} by: {trial.name}{_shown(trial.parameters)}. "
        f"Mean |d| falls from {side.left.mean:.3g} to {trial.residual.mean:.3g}, which is more than noise "
        f"({side.floor.mean:.3g}): something else differs too, or the change is not exactly this one"
    )
    return _restated(found, statement).model_copy(update={"confidence": "likely", "next": _capture(side)})


def _restated(found: Diagnosis, statement: str) -> Diagnosis:
    """The diagnosis with another statement, which its finding repeats."""
    again = found.finding and found.finding.model_copy(update={"message": statement})
    return found.model_copy(update={"statement": statement, "finding": again})


def _in_part(side: Examined, outcome: Outcome) -> bool:
    """Whether a change explains so much that a single tensor is an unlikely cause."""
    return outcome.runner_up is not None and outcome.runner_up.residual.mean < _PART * side.left.mean


def _rest_is_noise(side: Examined, region: Region) -> bool:
    """Whether a few tokens hold all of the difference, and are not the tail of a small difference of all tokens."""
    return float(side.left.tokens[~region.where].nanmean()) <= _REST * side.floor.mean


def _operator(side: Examined, outcome: Outcome | None) -> Diagnosis:
    """The diagnosis of the worst operator; it says so if the operator fails in every layer."""
    assert side.local is not None
    outliers = side.outliers
    name, ratio = outliers[0]
    kind = name.split(".")[-1]
    same_kind = [n for n, _ in outliers if n.split(".")[-1] == kind]
    layers = {layer_of(n) for n in same_kind} - {None}
    total = len({layer_of(n) for n in side.local} - {None})
    every = total > 1 and {n for n, _ in outliers} >= {n for n in side.local if n.endswith("_proj")}
    where = f"{kind} in every layer" if layers and len(layers) == total > 1 else name
    if every:
        where = "every projection of every layer"
    finite = math.isfinite(ratio)
    size = f"its error on its own recorded input is {ratio:.1f} times its rounding"
    if not finite:
        size = "values are NaN or infinite although its recorded input makes finite ones"
    parts = {part_of(n, side.local[n], side.context, side.capsule) for n in same_kind}
    part = parts.pop() if len(parts) == 1 and finite and not every else ""
    statement = f"On the {side.name} side {where} computes a different function{part}: {size}"
    stale = _stale_operator(side, outliers)
    if every:
        statement += ", so other weights, or products in fewer bits, are likelier than a fault of each"
    if stale:
        statement += f", and the previous weights explain it ({', '.join(stale[:3])})"
    parameters: dict[str, Scalar] = {
        "operator": name,
        "layer": layer_of(name),
        "ratio": ratio if finite else None,
        "layers": len(layers),
    }
    cause = "partial-sync" if stale else "weights-differ" if every else "operator"
    found = _diagnosis(side, outcome, cause, statement, parameters, side.left.mean, {})
    return found.model_copy(update={"confidence": "proven", "location": "all layers" if every else where + part})


def _stale_operator(side: Examined, outliers: list[tuple[str, float]]) -> list[str]:
    """Names of weights of the outliers whose old values bring the side to the floor."""
    if side.context.references.previous is None:
        return []
    old = tensors.old_tensors(side.context)
    operators = [name.removeprefix("layers.") for name, _ in outliers]
    names = [n for n in old if any(_is_weight_of(n, operator) for operator in operators)]
    if not names:
        return []
    computation = side.context.declared.with_edits({n: old[n] for n in names})
    left = side.context.residual(side.context.score(computation))
    return names if left.mean <= 2 * side.floor.mean else []


def _is_weight_of(parameter: str, operator: str) -> bool:
    layer, _, name = operator.rpartition(".")
    return (not layer or f".layers.{layer}." in parameter) and f".{name}." in parameter


def _diagnosis(
    side: Examined,
    outcome: Outcome | None,
    cause: str,
    statement: str,
    parameters: dict[str, Scalar],
    left: float,
    evidence: dict[str, Scalar],
) -> Diagnosis:
    evidence = {"as_is": side.left.mean, **evidence, **parameters}
    trials = [] if outcome is None else outcome.trials
    causes = set() if outcome is None else outcome.causes
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
        excluded=sorted(causes - {c for t in trials if t.near(side.floor) for c in t.causes} - {cause}),
        tried={} if outcome is None else outcome.tried,
        finding=finding(cause, statement, **evidence) if cause in CAUSES else None,  # type: ignore[arg-type]
    )


def _result(side: Examined, trial: Trial) -> HypothesisResult:
    return HypothesisResult(
        name=trial.name + (f" ({trial.scope})" if trial.scope else ""),
        cause=trial.cause,
        side=side.name,
        parameters=trial.parameters,
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
