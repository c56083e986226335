"""A reward model as a reward of GRPO and PPO: `rewards: [{model: DIR}]` or `--reward-model DIR`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlkernel.data.contents import WHERE
from rlkernel.data.errors import InputError
from rlkernel.data.tokenizer import Tokenizer, TokenizerError
from rlkernel.models import CheckpointError, ConfigError, ScalarModel
from rlkernel.training.batch import Trajectory, pack_complete, spans
from rlkernel.training.encoding import Encoder


@torch.no_grad()
def score_trajectories(
    model: ScalarModel, trajectories: Sequence[Trajectory], *, budget: int, device: str
) -> Tensor:  # [B] fp32
    """The reward of each trajectory: the model's value at its last token, without gradients.

    Args:
        budget: tokens per forward, at most; changes no bit.
    """
    found = [
        model.scores(pack_complete(trajectories[span.start : span.stop], device))
        for span in spans([len(one) for one in trajectories], budget)
    ]
    return torch.cat(found)


class ModelReward:
    """A reward with TRL's signature: the value of a reward model at the last token of each completion.

    Prompt and completion are tokenized with the reward model's own tokenizer and chat template, as when it was trained:
    the end of the sequence is appended to a text, also to one that was truncated. A completion's reward depends on no
    other one.

    Args:
        path: directory of a `...ForSequenceClassification` model with one label and its tokenizer.
        device: "cpu" or "cuda".
        budget: tokens per forward, at most; changes no bit.

    Raises:
        InputError: the directory cannot be loaded.
    """

    def __init__(self, path: str | Path, device: str, budget: int):
        self.path, self.device, self.budget = path, device, budget
        try:
            self.model = ScalarModel.load(path, device=device)
            self.encoder = Encoder(self.model.config, Tokenizer(path), max_tokens=0)
        except (ConfigError, CheckpointError, TokenizerError) as error:
            raise InputError(f"reward model: {error}") from None

    def __call__(self, prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        """The rewards, of fp32 precision.

        Raises:
            InputError: prompt and completion do not fit the reward model's context.
        """
        rows = [
            {"prompt": prompt, "completion": completion, WHERE: f"reward model {self.path}"}
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        trajectories = [self.encoder.example(row) for row in rows]
        return score_trajectories(self.model, trajectories, budget=self.budget, device=self.device).tolist()
