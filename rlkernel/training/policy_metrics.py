"""The records of a policy-gradient step: its row of `metrics.jsonl` and its rows of `samples.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlkernel.contract import compare_bitwise
from rlkernel.data.rewards import Scores
from rlkernel.data.tokenizer import Tokenizer
from rlkernel.training.batch import Trajectory
from rlkernel.training.config import Settings
from rlkernel.training.exactness import Exactness, hex_bits
from rlkernel.training.optimizer import Update
from rlkernel.training.turns import Completion

SAMPLE_TOKENS = 64
_EXTREMES = {"ratio_min": min, "ratio_max": max, "drift_max": max}
"""Statistics whose value for a step is an extreme of the micro-batches; the others are token-weighted means."""


@dataclass
class GradedCompletion:
    """A completion with what the losses read of it.

    Attributes:
        in_loss: False where it is dropped, and where `rollout.mask_truncated` leaves it out.
        dropped: it has no reward.
        advantages: fp32, [1] for the whole completion or [L] for its tokens.
        training_logp: [L] fp32 log-probabilities from the training forward, once it has run.
        ref_logp: [L] fp32 from the frozen first policy, or None.
        values, returns: [L] fp32 of the value model before the step's first update (ppo), and its targets.
        leaf: of an update's gradients, to which the completions of its prompt belong.
    """

    completion: Completion
    in_loss: bool
    advantages: Tensor
    dropped: bool = False
    training_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    leaf: int = 0

    @property
    def trajectory(self) -> Trajectory:
        """Prompt and completion as token ids, with the rollout's log-probabilities."""
        return self.completion.trajectory

    @property
    def kl(self) -> Tensor:  # [L] fp32
        """logp - ref_logp of each sampled token, in nats; 0 without a frozen first policy."""
        logp = known(self.trajectory.logp).cpu()
        return torch.zeros_like(logp) if self.ref_logp is None else logp - self.ref_logp


def known(value: Tensor | None) -> Tensor:
    """A tensor that has been computed by now."""
    assert value is not None
    return value


def metrics_row(
    settings: Settings,
    completions: Sequence[GradedCompletion],
    scores: Scores,
    stats: Sequence[dict[str, float]],
    updates: Sequence[Update],
    exact: Exactness,
) -> dict[str, Any]:
    """One row of `metrics.jsonl`, without times and memory."""
    lengths = [len(one.trajectory.positions) for one in completions]
    turns = {}
    if settings.rollout.environment is not None:
        turns["turns"] = sum(one.completion.turns for one in completions) / len(completions)
    size = settings.rollout.group_size
    judged = [[r for r in scores.total[i : i + size] if r is not None] for i in range(0, len(completions), size)]
    groups = [group for group in judged if group]
    return {
        "reward": scores.mean,
        "reward_std": float(torch.tensor(scores.known, dtype=torch.float64).std(correction=0)),
        "dropped": len(scores.dropped),
        **{f"dropped/{reason}": number for reason, number in scores.reasons.items()},
        **_reward_means(scores.parts),
        **{f"logged/{name}": value for name, value in scores.metrics.items()},
        "groups_all_equal": sum(len(set(group)) == 1 for group in groups) / len(groups),
        "length": sum(lengths) / len(completions),
        "length_max": max(lengths),
        **turns,
        "truncated": sum(one.completion.truncated for one in completions) / len(completions),
        "masked": sum(not one.in_loss and not one.dropped for one in completions),
        **_combine(stats, settings.train.epochs * settings.train.minibatches),
        "updates": len(updates),
        "grad_norm": max((update.grad_norm for update in updates), default=0.0),
        "lr": updates[-1].lr if updates else 0.0,
        **exact.row(),
        "tokens": sum(lengths),
    }


def _reward_means(parts: dict[str, list[float | None]]) -> dict[str, float]:
    """Mean of each reward function over the completions that it judged; empty for a single function."""
    if len(parts) < 2:
        return {}
    known = {name: [value for value in values if value is not None] for name, values in parts.items()}
    return {f"reward_{name}": math.fsum(values) / len(values) for name, values in known.items() if values}


def _combine(stats: Sequence[dict[str, float]], updates: int) -> dict[str, float]:
    """Statistics of a step from those of its micro-batches."""
    combined: dict[str, float] = {"loss": math.fsum(stat["loss"] for stat in stats) / max(1, updates)}
    seen = [stat for stat in stats if stat["tokens"] > 0]
    tokens = math.fsum(stat["tokens"] for stat in seen)
    for name in stats[0] if stats else ():
        if name in ("loss", "tokens", "sequences"):
            continue
        values = [stat[name] for stat in seen]
        if not values:
            combined[name] = 0.0
        elif name in _EXTREMES:
            combined[name] = _EXTREMES[name](values)
        else:
            combined[name] = math.fsum(v * s["tokens"] for v, s in zip(values, seen, strict=True)) / tokens
    return combined


def sample_row(step: int, one: GradedCompletion, reward: float | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """One row of `samples.jsonl`, with the bits of both sides for each token."""
    rollout, training = known(one.trajectory.logp), known(one.training_logp)
    ids = one.trajectory.targets[:SAMPLE_TOKENS]
    tokens = [
        {"id": token, "text": text, "logp": sampled, "rollout": hex_bits(sampled), "training": hex_bits(trained)}
        for token, text, sampled, trained in zip(
            ids, tokenizer.token_texts(ids), rollout.tolist(), training.tolist(), strict=False
        )
    ]
    return {
        "step": step,
        "prompt": one.completion.prompt.row["prompt"],
        "completion": one.completion.shown,
        "reward": reward,
        "advantage": math.fsum(one.advantages.tolist()) / len(one.advantages),
        "exact": compare_bitwise(training, rollout).mismatches == 0,
        "tokens": tokens,
    }
