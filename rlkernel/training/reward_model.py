"""A reward model: a decoder with one number at a completion's last token, trained on preferences.

The loss is that of Ouyang et al. 2022 (https://arxiv.org/abs/2203.02155, equation 1) and of TRL's RewardTrainer; the
margin is that of Touvron et al. 2023 (Llama 2, https://arxiv.org/abs/2307.09288, equation 2), and the centering that of
Eisenstein et al. 2023 (https://arxiv.org/abs/2312.09244).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlkernel.models import ScalarModel
from rlkernel.training.batch import pack_complete
from rlkernel.training.checkpoint import Saver
from rlkernel.training.config import RewardModelSettings
from rlkernel.training.display import Display
from rlkernel.training.pairs import Pair, sides
from rlkernel.training.parts import Parts
from rlkernel.training.run_folder import RunFolder
from rlkernel.training.supervised import train


def pairwise_loss(
    chosen: Tensor, rejected: Tensor, margin: float | Tensor = 0.0, center: float | None = None
) -> Tensor:  # [...] fp64 each
    """-log sigmoid(chosen - rejected - margin) + center (chosen + rejected)^2, the Bradley-Terry likelihood.

    Args:
        chosen, rejected: rewards.
        margin: by how much the chosen reward should exceed the other.
        center: weight of the second term, which moves the mean reward to 0, because the first one ignores it.
    """
    loss = -logsigmoid(chosen - rejected - margin)
    return loss if center is None else loss + center * (chosen + rejected) ** 2


class PairRewards(NamedTuple):
    """What `metrics` needs of one pair."""

    loss: float
    chosen: float
    rejected: float


class PairwiseReward:
    """The objective of a reward model: the mean loss over pairs. The two sides of a pair are in the same forward."""

    headline, shown = "accuracy", {"loss": "loss", "accuracy": "accuracy"}

    def __init__(self, model: ScalarModel, settings: RewardModelSettings, device: str):
        self.model, self.settings, self.device = model, settings, device

    def terms(self, items: Sequence[Pair]) -> tuple[Tensor, list[PairRewards]]:
        # One pair at a time, because vectorised functions may round an element by its place in the vector.
        rewards = self.model.scores(pack_complete(sides(items), self.device)).cpu().double().view(-1, 2)
        center = self.settings.center_rewards_coefficient
        losses = torch.stack(
            [pairwise_loss(c, r, pair.margin, center) for pair, (c, r) in zip(items, rewards, strict=True)]
        )
        records = [
            PairRewards(loss, chosen, rejected)
            for loss, (chosen, rejected) in zip(losses.tolist(), rewards.tolist(), strict=True)
        ]
        return losses, records

    def record(self, data: Sequence[Any]) -> PairRewards:
        return PairRewards._make(data)

    def metrics(self, records: list[PairRewards]) -> dict[str, float]:
        """TRL's names."""
        both = [reward for one in records for reward in (one.chosen, one.rejected)]
        return {
            "loss": fmean(one.loss for one in records),
            "accuracy": fmean(float(one.chosen > one.rejected) for one in records),
            "margin": fmean(one.chosen - one.rejected for one in records),
            "min_reward": min(both),
            "mean_reward": fmean(both),
            "max_reward": max(both),
        }

    def count(self, items: Sequence[Pair]) -> int:
        return len(items)

    def packed(self, item: Pair) -> int:
        return len(item.chosen) + len(item.rejected)

    def completion_tokens(self, item: Pair) -> int:
        return item.completion_tokens


def train_reward(parts: Parts[ScalarModel], run: RunFolder, display: Display, saver: Saver) -> dict[str, Any]:
    """Trains a reward model on `parts.pairs`; returns its part of `summary.json`."""
    config = parts.model.config
    if config.pad_token_id in config.eos_token_id:
        display.say(
            "note: the padding token is the end-of-sequence token, so transformers reads the value one token early; "
            "give the tokenizer a padding token of its own"
        )
    objective = PairwiseReward(parts.model, parts.settings.reward_model, parts.device)
    pairs, heldout = parts.pairs, parts.heldout_pairs
    return train(objective, pairs, heldout, parts.settings, parts.device, run, display, saver, parts.ranks)
