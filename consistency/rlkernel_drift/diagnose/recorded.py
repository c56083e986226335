"""Diagnosis from two files alone: the train side's recorded logits rows stand in for the model.

They decide what is said about temperature, kept tokens, padded vocabulary, rounded logits and shifts; hypotheses that
need another forward need the model.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkernel_drift.capsule import Capsule, Floor, Sampling
from rlkernel_drift.diagnose.battery import trial_of
from rlkernel_drift.diagnose.context import Context, References
from rlkernel_drift.diagnose.decide import decide, healthy
from rlkernel_drift.diagnose.residual import residual
from rlkernel_drift.diagnose.run import Examined, accepted_diagnosis, alike, unexplained_diagnosis
from rlkernel_drift.diagnose.semantic import semantic_battery
from rlkernel_drift.pair import match
from rlkernel_drift.profiles import FLOOR_MIN, at_least, carried_floor
from rlkernel_drift.scoring.model import Head
from rlkernel_drift.scoring.semantics import IMPOSSIBLE
from rlkernel_drift.scoring.sequences import Sequences
from rlkernel_drift.verdict import Diagnosis

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
