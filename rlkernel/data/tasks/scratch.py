"""What the tasks with scratch space share: character tokens, rows drawn from a seed, a model of 27 M parameters.

A completion is scratch work, `#`, and the answer; the reward looks at the answer alone. The demonstrations of the
warm-up write scratch work only half of the time, so the policy starts with both habits, and the reward has to teach it
which one leads to right answers.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from rlkernel.data.characters import character_tokenizer
from rlkernel.data.tasks import Task, qwen3_config

MARK = "#"
"""Separates the scratch work from the answer."""
_HELDOUT = 256


class ScratchTask(Task):
    """A task whose rows are drawn at random.

    Attributes:
        alphabet: the characters of prompts and completions.
        columns: names of the row's values that the reward needs.
        longest: tokens of the longest completion of a demonstration.
    """

    alphabet: str
    columns: tuple[str, ...]
    longest: int

    @abstractmethod
    def draw(self, rng: random.Random) -> dict[str, Any]:
        """One row: `prompt` and the columns that the reward needs."""

    @abstractmethod
    def demonstrate(self, row: dict[str, Any], rng: random.Random) -> str:
        """A completion of the row's prompt for the warm-up."""

    @abstractmethod
    def is_right(self, completion: str, row: dict[str, Any]) -> bool:
        """Whether the completion solves the row."""

    @cached_property
    def _heldout(self) -> list[dict[str, Any]]:
        rng = random.Random(f"{self.name} held out")
        rows = {row["prompt"]: row for row in (self.draw(rng) for _ in range(2 * _HELDOUT))}
        return list(rows.values())[:_HELDOUT]

    def _training_rows(self, rng: random.Random) -> Iterator[dict[str, Any]]:
        kept_out = {row["prompt"] for row in self._heldout}
        while True:
            row = self.draw(rng)
            if row["prompt"] not in kept_out:
                yield row

    def tokenizer(self) -> Tokenizer:
        return character_tokenizer(self.alphabet)

    def train_prompts(self, seed: int) -> Iterator[dict[str, Any]]:
        return self._training_rows(random.Random(f"{self.name} prompts {seed}"))

    def heldout(self) -> list[dict[str, Any]]:
        return list(self._heldout)

    def sft_examples(self, n: int, seed: int) -> list[dict[str, Any]]:
        rng = random.Random(f"{self.name} teacher {seed}")
        rows = self._training_rows(rng)
        drawn = (next(rows) for _ in range(n))
        return [{"prompt": row["prompt"], "completion": self.demonstrate(row, rng)} for row in drawn]

    def preferences(self, n: int, seed: int) -> list[dict[str, Any]]:
        """The demonstration is chosen, a demonstration of another row rejected."""
        rng = random.Random(f"{self.name} preferences {seed}")
        rows = self._training_rows(rng)
        pairs: list[dict[str, Any]] = []
        while len(pairs) < n:
            row, rejected = next(rows), self.demonstrate(next(rows), rng)
            if not self.is_right(rejected, row):
                chosen = self.demonstrate(row, rng)
                pairs.append({"prompt": row["prompt"], "chosen": chosen, "rejected": rejected})
        return pairs

    def reward(self, prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[float]:
        rows = ({name: columns[name][i] for name in self.columns} for i in range(len(completions)))
        return [float(self.is_right(completion, row)) for completion, row in zip(completions, rows, strict=True)]

    def model_config(self) -> dict[str, Any]:
        return qwen3_config(
            self.tokenizer(),
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=8,
            head_dim=64,
            initializer_range=0.02,
            max_position_embeddings=512,
        )

    def defaults(self, algorithm: str) -> dict[str, Any]:
        if algorithm in ("dpo", "reward"):
            return {"warmup.examples": 20000, "optimizer.lr": 1e-4, "train.steps": 300, "train.batch_size": 128}
        rollouts = {
            "warmup.steps": 1500,
            "warmup.examples": 384000,
            "warmup.batch_size": 256,
            "warmup.lr": 1e-3,
            "rollout.prompts": 64,
            "rollout.group_size": 8,
            "rollout.max_tokens": self.longest + 8,
            "optimizer.lr": 3e-5,
            "optimizer.betas": [0.9, 0.98],
            "train.steps": 200,
            "eval.every": 20,
            "eval.rows": 256,
            "eval.temperature": 1.0,
        }
        return {**rollouts, "value.lr": 3e-4} if algorithm == "ppo" else rollouts


def answer_of(completion: str) -> str:
    """What follows the mark; empty without a mark."""
    return completion.partition(MARK)[2]
