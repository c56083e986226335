"""Proximal policy optimization with a value model: `PPOTrainer.step` is one step, to be read top to bottom.

The training forward scores every sampled token again, and its bytes are compared before the weights change.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlkernel import ops
from rlkernel.models import ScalarModel
from rlkernel.training.batch import PackedTrajectories, Trajectory, pack_trajectories, packed_sizes
from rlkernel.training.checkpoint import Checkpoint, load_tensors
from rlkernel.training.exactness import Exactness
from rlkernel.training.parts import Parts
from rlkernel.training.policy_metrics import GradedCompletion, known
from rlkernel.training.policy_trainer import PolicyTrainer, minibatches
from rlkernel.training.reward_shaping import RunningMoments, moments, token_rewards, whitened
from rlkernel.training.run_folder import RunFolder
from rlkernel.training.sharded_optimizer import make_optimizer


class PPOTrainer(PolicyTrainer):
    """Advantages of tokens from a value model, which is trained along with the policy.

    Attributes:
        value_model: a copy of the first policy with a scalar head of zeros, or the model of `value.path`.
        moments: running moments of the rewards, for `ppo.whiten_rewards`.

    Source: Schulman et al. 2017, arXiv:1707.06347; for language models Ziegler et al. 2019, arXiv:1909.08593, and
    Ouyang et al. 2022, arXiv:2203.02155.
    """

    def __init__(self, parts: Parts, run: RunFolder):
        super().__init__(parts, run)
        if parts.value_model is None:
            self.value_model = ScalarModel.from_decoder(parts.model)
            torch.nn.init.zeros_(self.value_model.score.weight)
        else:
            self.value_model = parts.value_model
        settings = self.settings.optimizer.model_copy(update={"lr": self.settings.value.lr})
        shard, total = self.settings.train.shard, self.optimizer.total
        self.value_optimizer = make_optimizer(self.value_model, settings, total, self.ranks, shard)
        self.moments = RunningMoments()

    def step(self, step: int) -> tuple[dict[str, Any], Exactness]:
        settings, started = self.settings.ppo, time.perf_counter()

        # Rollout: sample completions with the current weights.
        completions = self.rollout(step)

        # Rewards of the completions.
        scores, rewards = self.judge(completions)
        if settings.whiten_rewards:
            self.moments.add([reward for reward, one in zip(rewards, completions, strict=True) if not one.dropped])
            rewards = self.moments.whiten(rewards)

        # With several updates, all tokens are scored and compared before the first one. The frozen first policy and
        # the value model score them too.
        exact = self.score(completions, step)
        self._score_values(completions)

        # Advantages: each token's reward has the KL to the first policy, the last one's also the completion's reward.
        of_tokens = [
            token_rewards(reward, one.kl, self.kl.coef) for reward, one in zip(rewards, completions, strict=True)
        ]
        packed, cu_seqlens, _ = ops.pack(of_tokens)
        values = torch.cat([known(one.values) for one in completions])
        advantages, returns = ops.gae(packed, values, cu_seqlens, settings.gamma, settings.lam)
        lengths = [len(each) for each in of_tokens]
        for one, mine, target in zip(completions, advantages.split(lengths), returns.split(lengths), strict=True):
            one.advantages, one.returns = mine, target
        if settings.whiten_advantages:
            white = whitened([one.advantages for one in completions], [one.in_loss for one in completions])
            for one, mine in zip(completions, white, strict=True):
                one.advantages = mine

        # Learn: one update of the policy and one of the value model per minibatch and epoch.
        stats, updates = self.learn(completions, exact, step)
        value_metrics = self._learn_values(completions)
        kl = self.adapt_kl(completions)
        row = self.record(step, completions, scores, stats, updates, exact, started)
        return {**row, **kl, **value_metrics}, exact

    def checkpoint(self, step: int) -> Checkpoint:
        made = super().checkpoint(step)
        moments, numbers = self.value_optimizer.state()
        made.tensors |= {"value_model": self.value_optimizer.model_tensors(), "value_optimizer": moments}
        made.state |= {"value_optimizer": numbers, "reward_moments": asdict(self.moments)}
        return made

    def restore(self, checkpoint: Checkpoint) -> None:
        super().restore(checkpoint)
        load_tensors(self.value_model, checkpoint.tensors["value_model"])
        self.value_optimizer.restore(checkpoint.tensors["value_optimizer"], checkpoint.state["value_optimizer"])
        self.moments = RunningMoments(**checkpoint.state["reward_moments"])

    def _values(self, packed: PackedTrajectories) -> Tensor:  # [L] fp32
        """Value of the state in which each sampled token is chosen."""
        return self.value_model.values(packed.batch)[packed.rows]

    @torch.no_grad()
    def _score_values(self, completions: Sequence[GradedCompletion]) -> None:
        def values_of(trajectories: Sequence[Trajectory]) -> Tensor:
            def work(ranges: list[range]) -> Tensor:
                packed = (pack_trajectories(trajectories[span.start : span.stop], self.device) for span in ranges)
                return torch.cat([self._values(one).cpu() for one in packed])

            return self.budget.run(packed_sizes(trajectories), work)

        with self.timed("score"), self.value_optimizer.whole_weights():
            for one, mine in zip(completions, self._over_ranks(completions, values_of), strict=True):
                one.values = mine

    def _learn_values(self, completions: Sequence[GradedCompletion]) -> dict[str, float]:
        """One update of the value model per minibatch and epoch; returns metrics."""
        train, updates = self.settings.train, []
        losses: list[float] = []
        for minibatch in minibatches(completions, train.minibatches) * train.epochs:
            counted = sum(len(one.trajectory.positions) for one in minibatch if one.in_loss)
            if counted == 0:
                continue
            dealt = [[one for one in minibatch if one.leaf == leaf] for leaf in range(self.ranks.leaves)]
            of_leaf = partial(self._value_gradients, counted=counted)
            losses += [loss for leaf in self.ranks.over_leaves(dealt, of_leaf) for loss in leaf]
            with self.timed("optimizer"):
                updates.append(self.value_optimizer.step())
        return {
            "value_loss": math.fsum(losses) / max(1, len(updates)),
            "value_grad_norm": max((update.grad_norm for update in updates), default=0.0),
            "value_explained": explained_variance([one for one in completions if one.in_loss]),
        }

    def _value_gradients(self, chosen: Sequence[GradedCompletion], counted: int) -> list[float]:
        """Adds up the value model's gradients of a leaf of a minibatch with `counted` tokens in the loss; returns the
        losses of its micro-batches."""

        def work(ranges: list[range]) -> list[float]:
            losses = []
            for span in ranges:
                batch = chosen[span.start : span.stop]
                packed = pack_trajectories([one.trajectory for one in batch], self.device)
                old, returns = (
                    torch.cat([known(getattr(one, name)) for one in batch]).to(self.device)
                    for name in ("values", "returns")
                )
                share = torch.cat([torch.full_like(known(one.values), one.in_loss / counted) for one in batch])
                with self.timed("forward"):
                    values = self._values(packed)
                    loss = (value_loss(values, old, returns, self.settings.value.clip) * share.to(self.device)).sum()
                with self.timed("backward"):
                    loss.backward()
                    self.value_optimizer.gather()
                losses.append(float(loss.detach()))
            return losses

        optimizer, losses = self.value_optimizer, list[float]()
        if chosen:
            sizes = packed_sizes([one.trajectory for one in chosen])
            losses = self.budget.run(sizes, work, optimizer.discard_leaf, whole=optimizer.one_backward)
        optimizer.end_leaf()
        return losses


def value_loss(
    values: Tensor,  # [L] fp32
    old_values: Tensor,  # [L] fp32
    returns: Tensor,  # [L] fp32
    clip: float | None,
) -> Tensor:  # [L] fp32
    """Half the squared error of each value: the larger of its own and that of the value clipped to
    [old - clip, old + clip].

    Source: OpenAI Baselines' PPO2; Engstrom et al. 2020, arXiv:2005.12729, section 3.
    """
    error = (values - returns).square()
    if clip is not None:
        clipped = torch.clamp(values, old_values - clip, old_values + clip)
        error = torch.maximum(error, (clipped - returns).square())
    return 0.5 * error


def explained_variance(completions: Sequence[GradedCompletion]) -> float:
    """1 - Var(returns - values) / Var(returns) before the step's updates; 0 if all returns are equal."""
    if not completions:
        return 0.0
    returns, values = (
        torch.cat([known(getattr(one, name)) for one in completions]).double() for name in ("returns", "values")
    )
    of_errors, of_returns = (moments(x.tolist())[1] / len(x) for x in (returns - values, returns))
    return 1.0 - of_errors / of_returns if of_returns else 0.0
