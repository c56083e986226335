"""Built-in tasks: a tokenizer, prompts, a verifiable reward and a small model, all made here, nothing downloaded.

A task is what `rlkernel train grpo` runs when no model, data or reward is named.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TASKS = {"arithmetic": "rlkernel.data.tasks.arithmetic:Arithmetic"}
"""Name of each built-in task -> where it lives."""


class Task(ABC):
    """One built-in task.

    A prompt row is a dict with `prompt` (text) and any further columns (`answer`, ...), which reach the rewards as
    keyword arguments, one list a column. All randomness comes from the seeds given here.
    """

    name: str

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The task's tokenizer (see `rlkernel.data.characters.character_tokenizer`), saved with every checkpoint."""

    @abstractmethod
    def train_prompts(self, seed: int) -> Iterator[dict[str, Any]]:
        """Endless stream of training rows; rows of `heldout()` never occur in it."""

    @abstractmethod
    def heldout(self) -> list[dict[str, Any]]:
        """Fixed list of evaluation rows, the same for every seed."""

    @abstractmethod
    def sft_examples(self, n: int, seed: int) -> list[dict[str, Any]]:
        """n rows with `prompt` and `completion` (without the end-of-sequence token) for the warm-up."""

    @abstractmethod
    def reward(self, prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[float]:
        """Training reward of each completion; columns of the rows arrive as lists of the same length."""

    def heldout_reward(self, prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[float]:
        """Reward that the evaluation reports; the training reward unless that one is shaped."""
        return self.reward(prompts, completions, **columns)

    @abstractmethod
    def model_config(self) -> dict[str, Any]:
        """`config.json` of the model made from scratch, in Hugging Face's keys, token ids of `tokenizer()` included."""

    def defaults(self) -> dict[str, Any]:
        """Settings of the run that the task wants, dotted key -> value (`{"optimizer.lr": 1e-3}`).

        They stand between the library's defaults and the user's config file, so that a user's word wins.
        """
        return {}


def load_task(name: str) -> Task:
    """The built-in task of that name.

    Raises:
        ValueError: no such task; the message lists those that exist.
    """
    if name not in TASKS:
        raise ValueError(f"task {name!r} does not exist; built-in tasks: {', '.join(sorted(TASKS))}")
    module, attribute = TASKS[name].split(":")
    return getattr(import_module(module), attribute)()
