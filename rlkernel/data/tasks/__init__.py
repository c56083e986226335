"""Built-in tasks: a tokenizer, prompts, a verifiable reward and a small model; nothing is downloaded.

`rlkernel train grpo` runs one if no model, data or reward is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlkernel.data.characters import EOS_TOKEN, PAD_TOKEN

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TASKS = {
    "arithmetic": "rlkernel.data.tasks.arithmetic:Arithmetic",
    "shapes": "rlkernel.data.tasks.shapes:Shapes",
    "chain": "rlkernel.data.tasks.chain:Chain",
    "countdown": "rlkernel.data.tasks.countdown:Countdown",
    "sorting": "rlkernel.data.tasks.sorting:Sorting",
}
"""Name of each built-in task -> its module and class."""


class Task(ABC):
    """One built-in task.

    A prompt row is a dict with `prompt` (text) and further columns (`answer`, ...), which are passed to the rewards as
    keyword arguments, one list per column. All randomness comes from the seeds given here.
    """

    name: str

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The task's tokenizer (see `rlkernel.data.characters.character_tokenizer`), saved with every checkpoint."""

    @abstractmethod
    def train_prompts(self, seed: int) -> Iterator[dict[str, Any]]:
        """Endless stream of training rows without those of `heldout()`."""

    @abstractmethod
    def heldout(self) -> list[dict[str, Any]]:
        """Fixed list of evaluation rows, the same for every seed."""

    @abstractmethod
    def sft_examples(self, n: int, seed: int) -> list[dict[str, Any]]:
        """n rows with `prompt` and `completion` (without the end-of-sequence token) for the warm-up."""

    @abstractmethod
    def preferences(self, n: int, seed: int) -> list[dict[str, Any]]:
        """n rows with `prompt`, `chosen` and `rejected` (without the end-of-sequence token)."""

    @abstractmethod
    def reward(self, prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[float]:
        """Training reward of each completion; columns of the rows arrive as lists of the same length."""

    def heldout_reward(self, prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[float]:
        """Reward reported by the evaluation; by default the training reward."""
        return self.reward(prompts, completions, **columns)

    def images(self, row: dict[str, Any]) -> list[Any]:
        """Images of a row, as Pillow has them, in the order of their placeholders in the prompt."""
        return []

    @abstractmethod
    def model_config(self) -> dict[str, Any]:
        """`config.json` of the model, with Hugging Face's keys and the token ids of `tokenizer()`."""

    def defaults(self, algorithm: str) -> dict[str, Any]:
        """The task's settings of a run, dotted key -> value (`{"optimizer.lr": 1e-3}`); the user's settings win."""
        return {}


def qwen3_config(tokenizer: Tokenizer, **sizes: Any) -> dict[str, Any]:
    """`config.json` of a Qwen3 model for a character tokenizer; `sizes` are the keys that differ between tasks."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "float32",
        "eos_token_id": tokenizer.token_to_id(EOS_TOKEN),
        "pad_token_id": tokenizer.token_to_id(PAD_TOKEN),
        **sizes,
    }


def load_task(name: str) -> Task:
    """The built-in task of that name.

    Raises:
        ValueError: there is no such task; the message lists the existing ones.
    """
    if name not in TASKS:
        raise ValueError(f"task {name!r} does not exist; built-in tasks: {', '.join(sorted(TASKS))}")
    module, attribute = TASKS[name].split(":")
    return getattr(import_module(module), attribute)()
