"""Diagnoses two capsules with a reference model: each side as declared, then the search, then the location."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch

from rlkernel_drift.capsule import Capsule, Floor, dtype_name
from rlkernel_drift.diagnose import stages, tensors
from rlkernel_drift.diagnose.context import (
    Context,
    References,
    Residual,
    context_of,
    declared_head,
    noise_floor,
    possible_dtypes,
    residual,
)
from rlkernel_drift.diagnose.location import (
    OUTLIER,
    LocalError,
    Region,
    Suspect,
    local_errors,
    probable_place,
    probe,
    recorded_sequences,
    regions,
    splice,
)
from rlkernel_drift.diagnose.logits import processing
from rlkernel_drift.diagnose.search import Search
from rlkernel_drift.diagnose.trials import NEAR_FLOOR, Change, Outcome, Trial, applied, reapplied
from rlkernel_drift.errors import DriftError
from rlkernel_drift.gates.layers import layer_of
from rlkernel_drift.knowledge import CAUSES, finding
from rlkernel_drift.pair import Pair, match
from rlkernel_drift.profiles import raise_floor
from rlkernel_drift.scoring.model import Head, name_of
from rlkernel_drift.statistics import owners
from rlkernel_drift.verdict import Diagnosis, HypothesisResult, LayerView, Scalar

SECONDS = 10.0
"""Seconds of a search, where the user names none; a slow model gets the time of `_SCORINGS` scorings."""
_SCORINGS, _LONGEST = 600, 90.0
_SHOWN = 12
_CLEARLY = 1.3


@dataclass(eq=False)
class Examined:
    """One side after its examination.

    Attributes:
        as_is: prediction of the declared computation.
        left: the differences that the declared computation does not explain.
        others: the side in the other precisions that it may have, if it declares none.
        cost: seconds of one scoring.
    """

    name: str
    capsule: Capsule
    context: Context
    as_is: torch.Tensor
    left: Residual
    floor: Floor
    local: dict[str, LocalError] | None = None
    others: list[Examined] = field(default_factory=list)
    cost: float = 0.0
    _suspects: list[Suspect] | None = None

    def suspects(self) -> list[Suspect]:
        """Tensors by how likely a random change of each causes the differences, best first."""
        if self._suspects is None:
            difference = self.context.target - self.as_is
            self._suspects = probe(self.context, difference, max(3.0, 150 * self.cost))
        return self._suspects

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
    sides = _in_one_dtype([examine("rollout", rollout, references, streams[0], floor, like=trained), trained])
    wrong = [side for side in sides if not side.healthy]
    if not wrong:
        return _other_dtype(sides) or _without_drift(sides), _view(sides)
    side = max(wrong, key=lambda s: s.over_floor)
    if _agree(pair, streams, side.floor):
        return alike(side), _view([side])
    shared = _shared_processing(sides) if len(wrong) == 2 else None
    if shared is None:
        return _explained(sides, seconds)
    sides = [_declaring(side, shared, floor) for side in sides]
    if any(not side.healthy for side in sides):
        found, view = _explained(sides, seconds)
    else:
        found, view = _without_drift(sides), _view(sides)
    both = f"Both sides have {shared.name}{_shown(shared.parameters)}, which neither declares. "
    return found.model_copy(update={"statement": both + found.statement}), view


def _in_one_dtype(sides: list[Examined]) -> list[Examined]:
    """The sides in a dtype that both may have, if more of them match the model in it than in their own.

    Otherwise a side that is far from the model is scored in the dtype of the other side, if it may have it.
    """
    forms = [{form.context.dtype: form for form in (*side.others, side)} for side in sides]
    best = sides
    for dtype in (dtype for dtype in forms[1] if dtype in forms[0]):
        both = [_form(side, dtype) for side in sides]
        if sum(side.healthy for side in both) > sum(side.healthy for side in best):
            best = both
    near = min(best, key=lambda side: side.left.mean)
    far = lambda side: not side.healthy and side.left.mean > _FAR * near.left.mean
    return [_form(side, near.context.dtype) if far(side) else side for side in best]


_FAR = 3.0


def _form(side: Examined, dtype: torch.dtype) -> Examined:
    """The side scored in a dtype that it may have, with its other forms; as it is if it may not have that dtype."""
    forms = [side, *side.others]
    chosen = next((form for form in forms if form.context.dtype == dtype), side)
    return replace(chosen, others=[form for form in forms if form is not chosen])


_BEFORE, _FARTHER = 2.0, 1.5
"""Seconds of the search for what both sides have and neither declares; how much farther from the model the other side
may be with it, because a large fault can hide it there."""


def _shared_processing(sides: list[Examined]) -> Trial | None:
    """The processing of the logits that explains the side that is closer to the model, unless the other side is clearly
    farther from the model with it."""
    near, far = sorted(sides, key=lambda s: s.over_floor)
    others = sorted(near.others, key=lambda s: s.over_floor)
    for side in (near, *others[:1]):  # in the dtypes that it may have
        kinds = {stage: [c for c in processing(side.context) if c.stage == stage] for stage in ("logits", "filters")}
        found = Search(side.context, side.as_is, _BEFORE).run(kinds.items()).accepted
        if found is not None and all(isinstance(value, (int, float, dict)) for value in found.values):
            other = _form(far, side.context.dtype)
            left = other.context.error(reapplied(found, other.context))
            return found if left < _FARTHER * other.left.mean else None
    return None


def _declaring(side: Examined, shared: Trial, floor: Floor | None) -> Examined:
    """The side as if it declared the processing of the logits that both sides have."""
    side = _form(side, shared.computation.body.dtype)
    apply = lambda c: applied(side.context, shared.changes, shared.values, c)
    context = replace(side.context, undeclared=apply, floor=None, _hidden={})
    return replace(_examined(side.name, side.capsule, context, floor, []), others=side.others)


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
    fitting = next((another for another in side.others if another.healthy and _rounds_like(another, side)), None)
    if fitting is not None:
        sides = [replace(fitting, others=[side]) if s is side else s for s in sides]
        return _other_dtype(sides) or _without_drift(sides), _view(sides)
    # In a dtype that is not the side's, every operator has a large error.
    replayed = min([side, *side.others], key=lambda s: len(s.outliers))
    if replayed.outliers:
        return _operator(replayed, outcome), _view([replayed])
    return located_diagnosis(side, outcome, region), _view([side])


_CORRELATED = 6.0  # standard errors


def _rounds_like(narrow: Examined, wide: Examined) -> bool:
    """Whether a side has the rounding of a 16-bit dtype: it is clearly closer to the model there than in fp32, or its
    differences from fp32 go with those of the model in that dtype. That it is within their noise is not enough."""
    if _CLEARLY * narrow.left.mean <= wide.left.mean:
        return True
    rounding, rest = narrow.as_is - wide.as_is, wide.context.target - wide.as_is
    there = rounding.isfinite() & rest.isfinite()
    x, y = rounding[there], rest[there]
    limit = lambda v: v.clamp(-4 * float(v.abs().mean()), 4 * float(v.abs().mean()))  # no token decides alone
    x, y = limit(x), limit(y)
    correlation = float((x * y).mean() / (x.square().mean() * y.square().mean()).sqrt().clamp(min=1e-30))
    return correlation * len(x) ** 0.5 > _CORRELATED


def _searched(side: Examined, seconds: float | None) -> tuple[Outcome, Region | None]:
    """Searches all tokens, then the parts that alone carry the difference."""
    limit = seconds if seconds is not None else min(max(SECONDS, _SCORINGS * side.cost), _LONGEST)
    begin, parts = time.thread_time(), regions(side.context, side.as_is)
    share = limit if not parts else 0.6 * limit
    outcome = Search(side.context, side.as_is, share).run(_without_undeclared(side))
    for region in parts:
        if outcome.accepted is not None:
            return outcome, None
        left = limit - (time.thread_time() - begin)
        if region.kind == "tokens" and len(region.places) < 3:
            continue
        part = Search(side.context, side.as_is, left, region.where, region.words).run(_without_undeclared(side))
        if part.accepted is not None:
            return part, region
    return outcome, parts[0] if parts else None


def _without_undeclared(side: Examined) -> Iterator[tuple[str, Iterable[Change]]]:
    """The stages, without other dtypes of the layers where the side declares none."""
    for name, changes in stages(side.context, side.suspects):
        if side.outliers and name.startswith("single"):
            return  # the replay of the recorded operators names single ones
        yield name, (c for c in changes if not (side.others and c.cause == "body-dtype"))


def _explains_both(accepted: Trial, other: Examined) -> bool:
    """Whether the other side, too, is computed with the accepted change: then the sides do not differ by it."""
    if other.healthy:
        return False
    left = other.context.residual(other.context.score(reapplied(accepted, other.context)))
    return left.mean < 0.5 * other.left.mean and replace(accepted, residual=left).near(other.floor)


def examine(
    name: str,
    capsule: Capsule,
    references: References,
    stream: str,
    floor: Floor | None = None,
    like: Examined | None = None,
) -> Examined:
    """Scores one side with the reference as the side declares itself, and calibrates the noise floor.

    A side that declares no dtype is scored in the checkpoint's, unless another dtype is clearly closer; one that
    declares none for its head in fp32 and in the dtype of its layers.

    Args:
        like: a side examined before; its scores are reused if it declares the same computation of the same tokens.
    """
    found: list[Examined] = []
    known = [] if like is None else [like, *like.others]
    dtypes = _dtypes(capsule, references, like)
    for dtype in dtypes:
        sides = []
        for head in _heads(capsule, dtype, like):
            context = context_of(capsule, references, stream, dtype=dtype)
            context.head = head
            if not context.sequences.counted:
                raise DriftError(f"the {name} side has no counted token")
            sides.append(_examined(name, capsule, context, floor, known))
        side = next((s for s in sides if s.healthy), _closest(sides))
        if side.healthy and not found:
            return _exact(side, known) if len(dtypes) > 1 else side
        if side.left.usable or not found:  # float16 may overflow
            found.append(side)
    closest = _closest(found)
    if closest.context.dtype == torch.float32:
        closest = next((side for side in found if side is not closest and _rounds_like(side, closest)), closest)
    closest.others = [side for side in found if side is not closest]
    return closest


def _exact(side: Examined, known: list[Examined]) -> Examined:
    """A side that matches in 16 bits, in fp32 if it matches there too, because fp32 is within the noise of 16 bits."""
    if side.context.dtype == torch.float32:
        return side
    context = replace(side.context, dtype=torch.float32, head=Head(), floor=None, _hidden={})
    exact = _examined(side.name, side.capsule, context, None, known)
    return exact if exact.healthy else side


def _closest(sides: list[Examined]) -> Examined:
    """The side that leaves least; the first unless another is clearly closer."""
    closest = min(sides, key=lambda s: s.left.mean)
    return sides[0] if sides[0].left.mean <= _CLEARLY * closest.left.mean else closest


def _dtypes(capsule: Capsule, references: References, like: Examined | None) -> list[torch.dtype]:
    """Possible dtypes of the layers, that of the other side first."""
    known = possible_dtypes(capsule, references.model)
    return known if like is None else sorted(known, key=lambda dtype: dtype != like.context.dtype)


def _heads(capsule: Capsule, dtype: torch.dtype, like: Examined | None) -> list[Head]:
    """The declared head; else that of the other side, or in fp32 and in the layers' dtype, as in transformers."""
    declared = any(dtype_name(capsule.manifest.config.get(key)) for key in ("head_dtype", "logits_dtype"))
    if declared or dtype == torch.float32:
        return [declared_head(capsule)]
    if like is not None and like.healthy and like.context.dtype == dtype:
        return [like.context.head]
    return [Head(), Head(dtype, dtype)]


def _examined(name: str, capsule: Capsule, context: Context, floor: Floor | None, known: list[Examined]) -> Examined:
    like = next((side for side in known if context.computes_like(side.context)), None)
    begin = time.thread_time()
    if like is not None:
        as_is, noise, cost = like.as_is, like.floor, like.cost
    else:
        as_is = context.score(context.declared)
        cost = time.thread_time() - begin
        noise = noise_floor(context, as_is) if floor is None else raise_floor(floor, name_of(context.dtype))
    context.floor = noise
    local = local_errors(context, capsule) if capsule.operators.values else None
    return Examined(name, capsule, context, as_is, context.residual(as_is), noise, local, cost=cost)


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
    """The command whose record decides: operator outputs of the side, which are replayed."""
    engine = side.capsule.manifest.engine
    known = engine if engine in ("hf", "vllm", "rlkernel", "vllm+rlkernel", "hf+rlkernel") else "ENGINE"
    return f"rlkernel-drift capture --engine {known} --model DIR --prompts FILE --operators full --out {side.name}"


_PART = 0.6  # of the difference; a change that leaves less is a better explanation than any single tensor
_REST = 1.3  # noise floors that tokens outside the few that are named may have


def located_diagnosis(side: Examined, outcome: Outcome, region: Region | None) -> Diagnosis:
    """The diagnosis where no change is accepted: the narrowest place that the evidence supports."""
    off = f"the {side.name} side differs by {side.left.mean:.3g}, the noise floor is {side.floor.mean:.3g}"
    statement = f"No change explains it: {off}; {outcome.why}"
    if not outcome.complete:
        statement += "; the time was not enough for all (--seconds)"
    place, parameters, cause = "", dict[str, Scalar](), "unexplained"
    if region is not None and (region.kind != "tokens" or _rest_is_noise(side, region)):
        cause = {"requests": "some-requests", "tokens": "few-tokens"}.get(region.kind, "mid-request")
        place, parameters = region.words, {"tokens": int(region.where.sum())}
        words = {
            "requests": "these requests were computed otherwise than the rest",
            "tokens": "a race or a wrong entry of a few tokens, not a shift of all",
        }.get(region.kind, "weights or settings changed in mid-request, or long contexts are computed otherwise")
        statement = (
            f"The difference is that of {place}; the rest matches the model to the noise floor: {words}. {statement}"
        )
    elif (most := _most_of_it(side, outcome)) is not None:
        return _partly(side, most, outcome)
    elif _in_part(side, outcome):
        statement += "; probably two things differ"
    elif side.left.mean > 3 * side.floor.mean and hasattr(side.context.model, "model"):
        place, words = probable_place(side.left, side.floor, side.suspects)
        if place:
            cause = "weights-differ" if place == "all layers" else "operator"
            parameters = {"operator": place}
            statement = f"{words}. {statement}"
    found = _diagnosis(side, outcome, cause, statement, parameters, side.left.mean, {})
    update = {"location": place, "confidence": "likely" if place else "unknown", "next": _capture(side)}
    return found.model_copy(update=update)


_MOST = 0.25  # of the difference; a change that leaves less is named, as one of two
_LARGE = 8.0  # noise floors
_OF_MANY_NUMBERS = frozenset({"few-tokens", "masked-tokens", "logit-bias"})


def _most_of_it(side: Examined, outcome: Outcome) -> Trial | None:
    """The change that explains nearly all of a large difference, but not all, if it is no fit of many numbers."""
    best = outcome.runner_up
    if best is None or side.over_floor < _LARGE or best.changes[0].cause in _OF_MANY_NUMBERS:
        return None
    return best if best.residual.mean < _MOST * side.left.mean else None


def _partly(side: Examined, trial: Trial, outcome: Outcome) -> Diagnosis:
    """The diagnosis of a change that explains most of a difference; something else differs too."""
    found = accepted_diagnosis(side, trial, replace(outcome, runner_up=None, equal=[]))
    share = 1 - trial.residual.mean / side.left.mean
    statement = (
        f"The {side.name} side is explained to {share:.0%} by: {trial.name}{_shown(trial.parameters)}. "
        f"Mean |d| falls from {side.left.mean:.3g} to {trial.residual.mean:.3g}, which is more than noise "
        f"({side.floor.mean:.3g}): something else differs too, or the change is not exactly this one"
    )
    return found.model_copy(update={"statement": statement, "confidence": "likely", "next": _capture(side)})


def _in_part(side: Examined, outcome: Outcome) -> bool:
    """Whether a change, or a few tokens, explain so much that no single tensor does."""
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
    layers = {layer_of(n) for n, _ in outliers if n.split(".")[-1] == kind} - {None}
    total = len({layer_of(n) for n in side.local} - {None})
    every = total > 1 and {n for n, _ in outliers} >= {n for n in side.local if n.endswith("_proj")}
    where = f"{kind} in every layer" if layers and len(layers) == total > 1 else name
    if every:
        where = "every projection of every layer"
    finite = math.isfinite(ratio)
    size = f"its error on its own recorded input is {ratio:.1f} times its rounding"
    if not finite:
        size = "values are NaN or infinite although its recorded input makes finite ones"
    statement = f"On the {side.name} side {where} computes a different function: {size}"
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
    return found.model_copy(update={"confidence": "proven", "location": "all layers" if every else name})


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
