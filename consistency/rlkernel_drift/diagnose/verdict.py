"""Puts a diagnosis into a verdict: a failed input gate has named the cause already, the battery names the rest.

From two files alone the train side's recorded logits rows stand in for the model. They decide what is said about
temperature, kept tokens, padded vocabulary, rounded logits and shifts; hypotheses that need another forward need the
model. With it comes what the mismatch does to the gradient: the tokens were drawn from the rollout's distribution, and
a trainer that takes them for its own computes another one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkernel_drift.capsule import Capsule, Floor, Sampling, WeightFingerprint
from rlkernel_drift.capsule.fingerprint import weight_fingerprint
from rlkernel_drift.compare import conclude
from rlkernel_drift.diagnose.battery import semantic_battery, trial_of
from rlkernel_drift.diagnose.context import Context, References, context_of
from rlkernel_drift.diagnose.hypothesis import decide, healthy, residual
from rlkernel_drift.diagnose.run import Examined, accepted_diagnosis, alike, diagnose, unexplained_diagnosis
from rlkernel_drift.errors import DriftError
from rlkernel_drift.gates.common import INPUT_GATES, skipped, some
from rlkernel_drift.gates.weights import same_weight
from rlkernel_drift.knowledge import finding
from rlkernel_drift.pair import match
from rlkernel_drift.profiles import FLOOR_MIN, at_least, carried_floor
from rlkernel_drift.scoring.model import Head
from rlkernel_drift.scoring.operators import stored
from rlkernel_drift.scoring.semantics import IMPOSSIBLE
from rlkernel_drift.scoring.sequences import Sequences
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


_LEAST_ROWS = 16
_NOISIEST = max(FLOOR_MIN, key=FLOOR_MIN.__getitem__)
_BY_DTYPE = "none measured; by dtype"
GUESSED = f"0 tokens under {_BY_DTYPE}"
"""`Diagnosis.floor_source` where no floor was measured."""


class RecordedLogits:
    """Stands for a reference model whose logits are known: its hidden states are the logits themselves."""

    def head(self, hidden: Tensor, head: Head | None = None, weight: Tensor | None = None) -> Tensor:
        """The recorded logits, rounded where asked for."""
        return hidden if head is None or head.logits is None else hidden.to(head.logits).float()


def diagnose_recorded(rollout: Capsule, train: Capsule, floor: Floor | None = None) -> Diagnosis | None:
    """Names a cause from recorded logits; None where the train side recorded too few."""
    pair = match(rollout, train)
    streams = pair.streams()
    rows = train.distribution
    if streams is None or rows is None or len(rows.rows) < _LEAST_ROWS:
        return None
    place = {int(t): i for i, t in enumerate(pair.train_token) if t >= 0}
    chosen = [(k, place[int(t)]) for k, t in enumerate(rows.rows) if int(t) in place]
    keep = [(k, i) for k, i in chosen if pair.mask[i]]
    if len(keep) < _LEAST_ROWS:
        return None
    tokens = torch.tensor([i for _, i in keep])
    logits = torch.from_numpy(rows.logits.float32()[[k for k, _ in keep]].copy())
    target = torch.from_numpy(np.array(rollout.logprobs[streams[0]], np.float32))[tokens]
    target = torch.where(torch.isneginf(target), torch.full_like(target, IMPOSSIBLE), target)
    owner = np.searchsorted(rollout.cu_seqlens, tokens.numpy(), side="right") - 1
    _, dense = np.unique(owner, return_inverse=True)
    count = int(dense.max()) + 1
    ids = torch.from_numpy(rollout.ids.astype(np.int64))[tokens]
    sequences = Sequences([torch.zeros(0)] * count, [], [], ids, torch.from_numpy(dense), [], tokens)
    model: Any = RecordedLogits()
    sampling = Sampling() if streams[1].endswith(".raw") else train.manifest.sampling
    context = Context(References(model), sequences, target, sampling, torch.float32, Head())
    as_is = context.predict(logits)
    left = residual(as_is, target, sequences.owner, count)
    measured = floor or carried_floor(rollout.manifest, train.manifest)
    known = _least(rollout, train) if measured is None else at_least(measured, train.manifest.dtype or "float32")
    side = Examined("rollout", rollout, context, as_is, logits, left, known)
    if healthy(left, known):
        statement = (
            f"The rollout fits the train side's recorded logits: mean |d| {left.mean:.3g} over {len(keep)} tokens"
        )
        return Diagnosis(cause="none", statement=statement, residual=left.mean, floor=known.mean)
    trials = [
        trial_of(context, hypothesis, prediction)
        for hypothesis in semantic_battery(context, logits)
        # Recorded rows need not be neighbours, so that nothing can be said about shifts.
        if hypothesis.cause != "off-by-one" and (prediction := hypothesis.predict(context)) is not None
    ]
    accepted, runner_up, why = decide(trials, left, known)
    if accepted is not None:
        own = torch.from_numpy(pair.from_train(train.logprobs[streams[1]]))[tokens].float()
        shared = residual(accepted.prediction.values, own, sequences.owner, count)
        if dataclasses.replace(accepted, residual=shared).near(known):
            return alike(side, accepted)
        return accepted_diagnosis(side, accepted, runner_up, trials)
    return unexplained_diagnosis(side, trials, f"{why}; with --model more hypotheses can be tried")


def _least(rollout: Capsule, train: Capsule) -> Floor:
    """Without a measured floor: what engines of the declared dtypes differ by, at least ten times the smallest."""
    least = 10 * max(FLOOR_MIN[side.manifest.dtype or _NOISIEST] for side in (rollout, train))
    return Floor(mean=least, p99=4 * least, maximum=8 * least, permutations=[_BY_DTYPE])


_MAX_PARAMETERS = 2_000_000_000
_MAX_TOKENS = 512


def gradient_consequence(context: Context, rollout: Tensor, train: Tensor, seed: int = 0) -> Consequence | None:
    """Cosine of the two gradients, with advantages of one sign a sequence drawn at random.

    Args:
        context: of the train side; rollout, train: [N] log-probabilities of its counted tokens.
    """
    model = context.model.in_dtype(torch.float32)
    parameters = list(model.parameters())
    if sum(p.numel() for p in parameters) > _MAX_PARAMETERS or not context.sequences.counted:
        return None
    generator = torch.Generator().manual_seed(seed)
    sign = (torch.rand(len(context.sequences), generator=generator) < 0.5).float() * 2 - 1
    ratio = (train - rollout).clamp(-20, 20).exp()
    known = torch.isfinite(ratio)
    weighted = [torch.zeros_like(p) for p in parameters]
    plain = [torch.zeros_like(p) for p in parameters]
    seen = 0
    for p in parameters:
        p.requires_grad_(True)
    try:
        for i in range(len(context.sequences)):
            mine = context.sequences.owner == i
            logp = _logp(context, model, i)
            weight = torch.where(known[mine], ratio[mine], torch.zeros(())).to(logp.device)
            for target, w in ((weighted, weight), (plain, (weight > 0).float())):
                loss = -(logp * w * sign[i]).sum()
                grads = torch.autograd.grad(loss, parameters, retain_graph=target is weighted, allow_unused=True)
                for total, g in zip(target, grads, strict=True):
                    if g is not None:
                        total += g
            seen += int(mine.sum())
            if seen >= _MAX_TOKENS:
                break
    finally:
        for p in parameters:
            p.requires_grad_(False)
    dot = lambda a, b: sum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))
    scale = (dot(weighted, weighted) * dot(plain, plain)) ** 0.5
    if scale == 0:
        return None
    cosine, length = dot(weighted, plain) / scale, (dot(plain, plain) / dot(weighted, weighted)) ** 0.5
    return Consequence(
        name="gradient",
        setting=f"{seen} tokens, advantages of random sign",
        cosine=cosine,
        length=length,
        words=f"cosine {cosine:.4f} between the gradient and the one with true ratios, {length:.3f} times as long",
    )


def _logp(context: Context, model: object, i: int) -> Tensor:
    sequences = context.sequences
    device = context.model.device
    out = model.base_model(  # type: ignore[attr-defined]
        input_ids=sequences.ids[i][None].to(device),
        position_ids=sequences.positions[i][None].to(device),
        attention_mask=torch.ones_like(sequences.ids[i][None]).to(device),
        use_cache=False,
    ).last_hidden_state[0]
    head = model.get_output_embeddings()  # type: ignore[attr-defined]
    logits = torch.nn.functional.linear(out[sequences.rows[i].to(device)].float(), head.weight.float(), head.bias)
    logits = logits / (context.sampling.temperature or 1.0)
    targets = sequences.targets[sequences.owner == i].to(device)
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)
