"""Group relative policy optimization and its family: `GRPOTrainer.step` is one step, to be read top to bottom.

The training forward scores every sampled token again, and its bytes are compared before the weights change.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlkernel import ops
from rlkernel.data.rewards import Scores
from rlkernel.training.advantages import advantages_of
from rlkernel.training.checkpoint import Checkpoint
from rlkernel.training.exactness import Exactness
from rlkernel.training.parts import Parts
from rlkernel.training.policy_metrics import GradedCompletion
from rlkernel.training.policy_trainer import PolicyTrainer
from rlkernel.training.reward_shaping import token_rewards, whitened
from rlkernel.training.run_folder import RunFolder


class GRPOTrainer(PolicyTrainer):
    """Advantages relative to the other completions of a step, without a value model.

    Source: DeepSeekMath, arXiv:2402.03300; docs/guides/grpo.md has the family and its papers.
    """

    def __init__(self, parts: Parts, run: RunFolder):
        super().__init__(parts, run)
        self.multiplier = torch.tensor(self.settings.constraint.multiplier)

    def step(self, step: int) -> tuple[dict[str, Any], Exactness]:
        started = time.perf_counter()

        # Rollout: sample a group of completions for each prompt with the current weights.
        completions = self.rollout(step)

        # Rewards of the completions.
        scores, rewards = self.judge(completions)

        # With several updates per step, all tokens are scored and compared before the first one. The frozen first
        # policy, if a KL needs it, scores them too.
        exact = self.score(completions, step)

        # Advantages relative to the other completions of the same prompt, or of the step.
        for one, advantages in zip(completions, self.advantages(completions, rewards), strict=True):
            one.advantages = advantages
        cost = self.constrain(completions, scores)

        # Learn: one update per minibatch and epoch; a step's only update compares its own forward with the rollout.
        stats, updates = self.learn(completions, exact, step)
        kl = self.adapt_kl(completions)
        return {**self.record(step, completions, scores, stats, updates, exact, started), **kl, **cost}, exact

    def advantages(self, completions: Sequence[GradedCompletion], rewards: Sequence[float]) -> list[Tensor]:
        """fp32 advantages of each completion, [1], or of its tokens, [L], in mode "returns"."""
        settings, coef = self.settings.advantages, self.kl.coef
        if settings.mode == "returns":
            of_tokens = [token_rewards(reward, one.kl, coef) for reward, one in zip(rewards, completions, strict=True)]
            return whitened(returns_to_go(of_tokens), [one.in_loss for one in completions])
        if coef:
            kl = [math.fsum(one.kl.tolist()) for one in completions]
            rewards = [reward - coef * each for reward, each in zip(rewards, kl, strict=True)]
        known = [None if one.dropped else reward for reward, one in zip(rewards, completions, strict=True)]
        return list(advantages_of(known, self.settings.rollout.group_size, settings).split(1))

    def constrain(self, completions: Sequence[GradedCompletion], scores: Scores) -> dict[str, float]:
        """Subtracts the advantages of the cost, and moves its multiplier for the next step; returns both as metrics.

        A step in which the cost judged no completion changes neither.
        """
        settings = self.settings.constraint
        if settings.cost is None:
            return {}
        costs = [
            None if one.dropped else cost for one, cost in zip(completions, scores.parts[settings.cost], strict=True)
        ]
        judged = [cost for cost in costs if cost is not None]
        if not judged:
            return {"multiplier": float(self.multiplier)}
        of_cost = advantages_of(costs, self.settings.rollout.group_size, self.settings.advantages)
        gains = torch.cat([one.advantages for one in completions])
        for one, advantage in zip(
            completions, ops.constrained_advantages(gains, of_cost, self.multiplier), strict=True
        ):
            one.advantages = advantage.unsqueeze(0)
        used = self.multiplier
        self.multiplier = ops.update_multiplier(used, torch.tensor(judged), settings.limit, settings.multiplier_lr)
        return {"cost": math.fsum(judged) / len(judged), "multiplier": float(used)}

    def checkpoint(self, step: int) -> Checkpoint:
        found = super().checkpoint(step)
        found.state["multiplier"] = float(self.multiplier)
        return found

    def restore(self, checkpoint: Checkpoint) -> None:
        super().restore(checkpoint)
        self.multiplier = torch.tensor(checkpoint.state.get("multiplier", 0.0))


def returns_to_go(rewards: Sequence[Tensor]) -> list[Tensor]:  # [L_i] fp32 each
    """Sum of the rewards from each token to the last one: `ops.gae` with values of 0 and gamma = lam = 1."""
    packed, cu_seqlens, _ = ops.pack(rewards)
    return list(ops.gae(packed, torch.zeros_like(packed), cu_seqlens).advantages.split([len(each) for each in rewards]))
