"""Adds a diagnosis to a verdict: the cause that a failed input gate has named, or else the result of the search.

Without a model, the logits rows that the train side recorded replace it; they suffice for changes of records and
logits. With a model, the effect of a drift on the policy gradient is measured too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkernel_drift.capsule import Capsule, Floor, Sampling, WeightFingerprint
from rlkernel_drift.capsule.fingerprint import weight_fingerprint
from rlkernel_drift.diagnose.context import Context, References, context_of, possible, residual
from rlkernel_drift.diagnose.logits import filters, processing
from rlkernel_drift.diagnose.records import records
from rlkernel_drift.diagnose.run import SECONDS, accepted_diagnosis, alike, diagnose, located_diagnosis
from rlkernel_drift.diagnose.search import Search
from rlkernel_drift.diagnose.sides import Examined
from rlkernel_drift.diagnose.trials import NEAR_FLOOR
from rlkernel_drift.errors import DriftError
from rlkernel_drift.gates import INPUT_GATES, conclude, first_few, skipped
from rlkernel_drift.gates.weights import same_weight
from rlkernel_drift.knowledge import finding
from rlkernel_drift.pair import match
from rlkernel_drift.profiles import FLOOR_MIN, carried_floor, raise_floor
from rlkernel_drift.scoring.model import Head
from rlkernel_drift.scoring.operators import forward, stored
from rlkernel_drift.scoring.sequences import Sequences
from rlkernel_drift.scoring.weights import state_of
from rlkernel_drift.statistics import owners
from rlkernel_drift.verdict import Consequence, Diagnosis, LayerView, Status, Verdict

_THETA = 1e-3  # largest relative difference of equal rotary bases
_NO_LOGPROB = frozenset(
    {"not-finite", "support", "above-zero", "units", "clamped", "rounded-records", "exchanged-requests"}
)
"""Causes in the recorded values themselves, for which no model is needed."""


def diagnose_verdict(
    verdict: Verdict,
    rollout: Capsule,
    train: Capsule,
    references: Callable[[], References] | None,
    floor: Floor | None = None,
    seconds: float | None = None,
) -> Verdict:
    """The verdict with a diagnosis.

    Args:
        references: loads the models; not called if a gate has named the cause. None if there is no model, so that the
            train side's recorded logits stand in for it.
    """
    found = named = _from_gates(verdict)
    update: dict[str, object] = {}
    # Values above zero are not log-probabilities; with a model the search finds out what they are.
    if found is None or (found.cause == "above-zero" and references is not None):
        if verdict.statistics is None or not verdict.statistics.tokens:
            return verdict
        if references is None:
            found = diagnose_recorded(rollout, train, floor)
        else:
            models = references()
            check_model(models, train, rollout)
            searched, layers = diagnose(rollout, train, models, floor, seconds)
            known = named is None or (searched.confidence == "proven" and searched.cause != "none")
            found = searched if known else named
            update["layers"] = _merged(verdict.layers, layers)
            if verdict.status == Status.DRIFT:
                cost = _gradient(rollout, train, models)
                update["consequences"] = verdict.consequences + ([cost] if cost else [])
    if found is None:
        return verdict
    result = verdict.model_copy(update={**update, "diagnosis": found})
    if found.cause != "none" and verdict.status == Status.ALIGNED:
        # A named cause is drift even if every threshold of the profile holds.
        doubt = found.cause == "unexplained" and _within_doubt(found)
        result = _undecided(result, found) if doubt else _failed(result, found)
    return _without_answered(result, found)


def check_model(models: References, train: Capsule, rollout: Capsule) -> None:
    """Refuses a model that did not compute the train side, because its own deviation would be taken for drift.

    A rotary base that the rollout shares with the model is the trainer's fault, not the wrong model.

    Raises:
        DriftError: its shape, rotary base or weights differ from those of the capsule.
    """
    model, manifest = models.model, train.manifest
    theta, other = (side.manifest.config.get("rope_theta") for side in (train, rollout))
    if isinstance(other, (int, float)) and model.theta and abs(model.theta - other) <= _THETA * other:
        theta = None
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
    with ThreadPoolExecutor() as pool:  # hashing and numpy release the GIL
        held = [] if words else list(pool.map(lambda name: _holds(known[name], state[name]), common))
    differ = [name for name, same in zip(common, held, strict=False) if not same]
    if differ:
        words = [f"{len(differ)} of {len(common)} tensors differ ({first_few(differ)})"]
    if words:
        raise DriftError(
            f"--model is not the model that computed the train capsule: {'; '.join(words)}. Name the directory from "
            "which the train side was captured"
        )


def _holds(known: WeightFingerprint, value: Tensor) -> bool:
    """Whether a weight, in the dtype of a fingerprint, matches it; true for dtypes that cannot be compared."""
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    if known.dtype not in dtypes:
        return True
    return same_weight(known, weight_fingerprint(stored(value.to(dtypes[known.dtype]))))


def _within_doubt(found: Diagnosis) -> bool:
    """Whether the noise floor is a guess, or the difference hardly above it."""
    assert found.residual is not None and found.floor is not None
    return found.floor_source == GUESSED or found.residual <= NEAR_FLOOR * found.floor


def _undecided(verdict: Verdict, found: Diagnosis) -> Verdict:
    """Nothing fits, and the noise floor does not decide, so the pair is neither aligned nor drifting."""
    advice = "measure one (`rlkernel-drift floor`) or name --model"
    guess = found.floor_source == GUESSED
    words = f"{found.statement}; {f'the floor is a guess, {advice}' if guess else 'noise may cause it'}"
    return conclude(verdict.with_gate(skipped("statistics", words)))


def _without_answered(verdict: Verdict, diagnosis: Diagnosis) -> Verdict:
    """Removes the advice to diagnose, and the hints that the diagnosis excluded."""
    gates = []
    for gate in verdict.gates:
        findings = [f.model_copy(update={"fix": ""}) if f.cause == "drift" else f for f in gate.findings]
        if gate.name == "statistics":
            findings = [f for f in findings if f.severity == "error" or f.cause not in diagnosis.excluded]
        gates.append(gate.model_copy(update={"findings": findings}))
    return verdict.model_copy(update={"gates": gates})


def _from_gates(verdict: Verdict) -> Diagnosis | None:
    for gate in verdict.gates:
        errors = [f for f in gate.findings if f.severity == "error"]
        if gate.status != "failed" or not errors:
            continue
        first = errors[0]
        if gate.name in INPUT_GATES or (gate.name == "statistics" and first.cause in _NO_LOGPROB):
            statement = f"Named by the gate of {gate.title}: {first.message}"
            return Diagnosis(cause=first.cause, statement=statement, finding=first, confidence="proven")
    return None


def _gradient(rollout: Capsule, train: Capsule, models: References) -> Consequence | None:
    pair = match(rollout, train)
    streams = pair.streams()
    if streams is None:
        return None
    # Both sides in the rollout's order, so that one set of sequences serves both.
    context = context_of(rollout, models, streams[0])
    other = torch.from_numpy(pair.from_train(train.logprobs[streams[1]]))[context.sequences.token]
    return gradient_consequence(context, context.target, other)


def _failed(verdict: Verdict, found: Diagnosis) -> Verdict:
    error = found.finding or finding("drift", found.statement)
    before = verdict.gate("statistics")
    update = {"status": "failed", "summary": found.statement, "findings": [*before.findings, error]}
    return conclude(verdict.with_gate(before.model_copy(update=update)))


def _merged(before: LayerView | None, local: LayerView | None) -> LayerView | None:
    """The local errors of the replay with the accumulated errors of the comparison."""
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


_LEAST_ROWS = 16  # recorded logits rows, below which nothing is diagnosed
_NOISIEST = max(FLOOR_MIN, key=FLOOR_MIN.__getitem__)
_BY_DTYPE = "none measured; by dtype"
GUESSED = f"0 tokens under {_BY_DTYPE}"
"""`Diagnosis.floor_source` if no floor was measured."""


class RecordedLogits:
    """Replaces a reference model: its hidden states are the recorded logits of the counted tokens."""

    path = None
    head_names = ()

    def __init__(self, tokens: Tensor, logits: Tensor) -> None:
        self.row = {int(token): i for i, token in enumerate(tokens)}
        self.logits, self.vocab_size = logits, logits.shape[1]

    def edited(self, *_: object) -> contextlib.AbstractContextManager[None]:
        """A context that changes nothing, because there are no weights."""
        return contextlib.nullcontext()

    configured = edited

    def hidden(self, sequences: Sequences, *_: object) -> Tensor:
        """The recorded logits of these tokens."""
        return self.logits[[self.row[int(token)] for token in sequences.token]]

    def head(self, hidden: Tensor, head: Head | None = None, *_: object) -> Tensor:
        """The recorded logits, rounded if `head` says so."""
        return hidden if head is None or head.logits is None else hidden.to(head.logits).float()


def diagnose_recorded(rollout: Capsule, train: Capsule, floor: Floor | None = None) -> Diagnosis | None:
    """Names a cause from recorded logits; None if the train side recorded too few."""
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
    target = possible(torch.from_numpy(np.array(rollout.logprobs[streams[0]], np.float32))[tokens])
    _, dense = np.unique(owners(rollout.cu_seqlens, tokens.numpy()), return_inverse=True)
    count = int(dense.max()) + 1
    ids = torch.from_numpy(rollout.ids.astype(np.int64))[tokens]
    nothing = [torch.zeros(0)] * count
    sequences = Sequences(nothing, nothing, nothing, ids, torch.from_numpy(dense), [0] * count, tokens)
    model: Any = RecordedLogits(tokens, logits)
    sampling = Sampling() if streams[1].endswith(".raw") else train.manifest.sampling
    context = Context(References(model), sequences, target, sampling, torch.float32, Head())
    as_is = context.score(context.declared)
    left = context.residual(as_is)
    measured = floor or carried_floor(rollout.manifest, train.manifest)
    known = _least(rollout, train) if measured is None else raise_floor(measured, train.manifest.dtype or "float32")
    context.floor = known
    side = Examined("rollout", rollout, context, as_is, left, known)
    if side.healthy:
        statement = (
            f"The rollout fits the train side's recorded logits: mean |d| {left.mean:.3g} over {len(keep)} tokens"
        )
        return Diagnosis(cause="none", statement=statement, residual=left.mean, floor=known.mean, confidence="proven")
    # Recorded rows need not be neighbours, so changes that depend on other tokens cannot be recognised.
    alone = [c for c in records(context) if c.cause not in ("off-by-one", "exchanged-requests", "wrong-candidate")]
    of_logits = [
        c
        for c in itertools.chain(processing(context), filters(context))
        if not c.cause.endswith("penalty") and not c.parameter.startswith("no_repeat")
    ]
    outcome = Search(context, as_is, SECONDS).run([("records", lambda: alone), ("logits", lambda: of_logits)])
    if outcome.accepted is not None:
        own = torch.from_numpy(pair.from_train(train.logprobs[streams[1]]))[tokens].float()
        shared = residual(outcome.accepted.prediction, own, sequences.owner, count)
        if dataclasses.replace(outcome.accepted, residual=shared).near(known):
            return alike(side, outcome.accepted)
        return accepted_diagnosis(side, outcome.accepted, outcome)
    why = f"{outcome.why}; with --model more changes can be tried"
    return located_diagnosis(side, dataclasses.replace(outcome, why=why), None)


def _least(rollout: Capsule, train: Capsule) -> Floor:
    """The floor where none was measured: ten times the smallest difference of two engines of the declared dtypes."""
    least = 10 * max(FLOOR_MIN[side.manifest.dtype or _NOISIEST] for side in (rollout, train))
    return Floor(mean=least, p99=4 * least, maximum=8 * least, permutations=[_BY_DTYPE])


_MAX_PARAMETERS = 2_000_000_000  # of models whose gradients are computed
_MAX_TOKENS = 512  # after which no further sequence is added


def gradient_consequence(context: Context, rollout: Tensor, train: Tensor) -> Consequence | None:
    """Cosine between the policy gradient with true ratios and the one that takes rollout and training for equal.

    The advantages are +1 or -1, drawn at random for each sequence.

    Args:
        context: of the train side; rollout, train: [N] log-probabilities of its counted tokens.
    """
    model = context.model.in_dtype(torch.float32)
    parameters = list(model.parameters())
    if sum(p.numel() for p in parameters) > _MAX_PARAMETERS or not context.sequences.counted:
        return None
    generator = torch.Generator().manual_seed(0)
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
        words=f"cosine {cosine:.4f} between the gradient and the one with true ratios, {length:.3f} times its length",
    )


def _logp(context: Context, model: Any, i: int) -> Tensor:
    sequences = context.sequences
    device = context.model.device
    out = forward(model, sequences.ids[i], sequences.positions[i], grad=True)
    head = model.get_output_embeddings()
    logits = torch.nn.functional.linear(out[sequences.rows[i].to(device)].float(), head.weight.float(), head.bias)
    logits = logits / (context.sampling.temperature or 1.0)
    targets = sequences.targets[sequences.owner == i].to(device)
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)
