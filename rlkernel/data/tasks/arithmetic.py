"""Two-digit addition with a verifiable reward, and a teacher with a systematic error.

The warm-up imitates a teacher whose answer is one too high three times out of four, so the policy starts near a quarter
right and GRPO has to unlearn the error. Sums are written lowest digit first, the order in which carries are made.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from rlkernel.data.characters import character_tokenizer
from rlkernel.data.tasks import Task, qwen3_config

_LIMIT = 100
_HELDOUT = 256
_RIGHT = 0.25
"""Share of the teacher's answers that are right; the others are one too high."""


def _prompt(a: int, b: int) -> str:
    return f"{a:02d}+{b:02d}="


def _answer(total: int) -> str:
    return f"{total:03d}"[::-1]


class Arithmetic(Task):
    """`27+85=` has the answer `211` (112, lowest digit first). Reward 1 for the exact answer, else 0."""

    name = "arithmetic"

    @cached_property
    def _pairs(self) -> list[tuple[int, int]]:
        pairs = [(a, b) for a in range(_LIMIT) for b in range(_LIMIT)]
        random.Random(20260101).shuffle(pairs)
        return pairs

    def tokenizer(self) -> Tokenizer:
        return character_tokenizer("0123456789+=")

    def _row(self, pair: tuple[int, int]) -> dict[str, Any]:
        return {"prompt": _prompt(*pair), "answer": _answer(sum(pair))}

    def train_prompts(self, seed: int) -> Iterator[dict[str, Any]]:
        rng = random.Random(f"prompts {seed}")
        pool = self._pairs[_HELDOUT:]
        while True:
            yield self._row(pool[rng.randrange(len(pool))])

    def heldout(self) -> list[dict[str, Any]]:
        return [self._row(pair) for pair in self._pairs[:_HELDOUT]]

    def sft_examples(self, n: int, seed: int) -> list[dict[str, Any]]:
        rng = random.Random(f"teacher {seed}")
        pool = self._pairs[_HELDOUT:]
        rows = []
        for _ in range(n):
            a, b = pool[rng.randrange(len(pool))]
            total = a + b + (rng.random() >= _RIGHT)
            rows.append({"prompt": _prompt(a, b), "completion": _answer(total)})
        return rows

    def preferences(self, n: int, seed: int) -> list[dict[str, Any]]:
        """The right answer is chosen, the teacher's wrong one rejected."""
        rng = random.Random(f"preferences {seed}")
        rows = []
        for _ in range(n):
            a, b = self._pairs[_HELDOUT:][rng.randrange(len(self._pairs) - _HELDOUT)]
            rows.append({"prompt": _prompt(a, b), "chosen": _answer(a + b), "rejected": _answer(a + b + 1)})
        return rows

    def reward(self, prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[float]:
        return [float(c == answer) for c, answer in zip(completions, columns["answer"], strict=True)]

    def model_config(self) -> dict[str, Any]:
        return qwen3_config(
            self.tokenizer(),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            initializer_range=0.09,
            max_position_embeddings=64,
        )

    def defaults(self, algorithm: str) -> dict[str, Any]:
        if algorithm == "reward":
            return {
                "warmup.examples": 20000,
                "optimizer.lr": 2e-3,
                "optimizer.schedule": "linear",
                "train.steps": 300,
                "train.batch_size": 128,
                "eval.rows": 256,
            }
        if algorithm == "dpo":  # without label smoothing the right answers lose probability too
            return {
                "warmup.steps": 500,
                "warmup.examples": 20000,
                "warmup.batch_size": 128,
                "warmup.lr": 2e-3,
                "dpo.beta": 1.0,
                "dpo.label_smoothing": 0.1,
                "optimizer.lr": 3e-5,
                "train.steps": 100,
                "train.batch_size": 64,
                "eval.rows": 256,
            }
        rollouts = {
            "warmup.steps": 500,
            "warmup.examples": 128000,
            "warmup.batch_size": 256,
            "warmup.lr": 2e-3,
            "rollout.prompts": 64,
            "rollout.group_size": 8,
            "rollout.max_tokens": 5,
            "optimizer.lr": 4e-4,
            "optimizer.betas": [0.9, 0.98],
            "optimizer.schedule": "linear",
            "optimizer.min_lr_ratio": 0.1,
            "train.steps": 120,
            "eval.every": 20,
            "eval.rows": 256,
            "eval.temperature": 1.0,
        }
        if algorithm == "ppo":  # four epochs per step
            rollouts |= {"value.lr": 1e-3, "train.steps": 40, "eval.every": 10}
        return rollouts
