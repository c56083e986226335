"""Builds the parts of a run from its settings: device, rewards, prompts, tokenizer, model.

All files are read and encoded before the first step, so that a bad line, a prompt longer than the context or an
unknown token is an error in the first second and not at step 400.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlkernel.data import prompts as data
from rlkernel.data.characters import save_tokenizer
from rlkernel.data.errors import InputError
from rlkernel.data.prompts import Row
from rlkernel.data.rewards import Limits, Reward, Rewards
from rlkernel.data.tasks import Task, load_task
from rlkernel.data.tokenizer import Tokenizer, TokenizerError
from rlkernel.models import CheckpointError, ConfigError, Decoder, load_model
from rlkernel.models.config import DTYPES, from_hf
from rlkernel.ops import VariantError
from rlkernel.training.batch import Trajectory
from rlkernel.training.config import Settings
from rlkernel.training.run_folder import writing


@dataclass(frozen=True)
class Prompt:
    """A row of the data with its prompt's token ids."""

    row: Row
    ids: list[int]


@dataclass
class Inputs:
    """Rows and reward functions, before anything is encoded.

    Attributes:
        task: the built-in task, or None.
        train, heldout: rows to train on (an endless stream if a task makes them for grpo) and to evaluate on.
        examples: supervised rows of the warm-up (grpo).
        rewards, heldout_rewards: None for sft.
    """

    task: Task | None
    train: list[Row] | Iterator[Row]
    heldout: list[Row]
    examples: list[Row] = field(default_factory=list)
    rewards: Rewards | None = None
    heldout_rewards: Rewards | None = None

    def close(self) -> None:
        """Ends the rewards' processes."""
        for rewards in (self.rewards, self.heldout_rewards):
            if rewards is not None:
                rewards.close()


@dataclass
class Parts:
    """Everything a trainer needs.

    Attributes:
        device: "cpu" or "cuda".
        model: the policy.
        tokenizer, tokenizer_dir: the policy's tokenizer and the directory it was read from.
        examples: supervised trajectories: the data (sft) or the warm-up's (grpo).
        heldout_examples: evaluation trajectories (sft).
        prompts: endless stream of training prompts (grpo).
        heldout: evaluation prompts (grpo).
        rewards, heldout_rewards: None for sft.
    """

    settings: Settings
    device: str
    model: Decoder
    tokenizer: Tokenizer
    tokenizer_dir: Path
    examples: list[Trajectory]
    heldout_examples: list[Trajectory] = field(default_factory=list)
    prompts: Iterator[Prompt] = field(default_factory=lambda: iter(()))
    heldout: list[Prompt] = field(default_factory=list)
    rewards: Rewards | None = None
    heldout_rewards: Rewards | None = None


def choose_device(wanted: str) -> str:
    """ "cpu" or "cuda" for a setting of "cpu", "cuda" or "auto".

    Raises:
        InputError: cuda was asked for and torch sees no GPU.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise InputError("run.device=cuda, but torch sees no CUDA GPU; use --device cpu")
    return "cuda"


def read_inputs(settings: Settings) -> Inputs:
    """Reads data files and loads reward functions.

    Raises:
        InputError: names the file and line, or the reward.
    """
    task = None if settings.data.task is None else load_task(settings.data.task)
    if settings.algorithm == "sft":
        return Inputs(task, *(_split_file(settings) if task is None else _sft_rows(task, settings)))
    rewards, heldout_rewards = _load_rewards(settings, task)
    examples: list[Row] = []
    if settings.warmup.steps and settings.warmup.data is not None:
        examples = data.load_examples(settings.warmup.data)
    elif settings.warmup.steps and task is not None:
        examples = task.sft_examples(settings.warmup.examples, settings.run.seed)
    if task is not None:
        heldout = task.heldout()[: settings.eval.rows]
        rewards.require(data.columns_of(heldout[:1]), f"task {task.name}")
        return Inputs(task, task.train_prompts(settings.run.seed), heldout, examples, rewards, heldout_rewards)
    train, heldout = _split_file(settings)
    for rows, file in ((train, settings.data.train), (heldout, settings.data.heldout or settings.data.train)):
        if rows:
            rewards.require(data.columns_of(rows[:1]), str(file))
    return Inputs(task, train, heldout, examples, rewards, heldout_rewards)


def _load_rewards(settings: Settings, task: Task | None) -> tuple[Rewards, Rewards]:
    """Rewards of training and of the evaluation; a built-in task's unless the settings name others."""
    if settings.rewards:
        pool = settings.reward_pool
        memory = None if pool.memory_gib is None else int(pool.memory_gib * 2**30)
        limits = Limits(pool.workers, pool.timeout_s, memory, int(pool.output_mib * 2**20))
        named = [
            Reward(r.name or r.function.rpartition(":")[2], r.function, r.weight, r.unit, r.options)
            for r in settings.rewards
        ]
        rewards = Rewards(named, None if pool.in_process else limits)
        return rewards, rewards
    assert task is not None  # its code is ours and needs no limits
    return (
        Rewards([Reward(task.name, task.reward, unit="batch")]),
        Rewards([Reward(task.name, task.heldout_reward, unit="batch")]),
    )


def _sft_rows(task: Task, settings: Settings) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows) of a built-in task's examples."""
    drawn = task.sft_examples(settings.warmup.examples + settings.eval.rows, settings.run.seed)
    return data.split_heldout(drawn, settings.eval.rows)


def _split_file(settings: Settings) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows) of `data.train`, or of it and `data.heldout`."""
    assert settings.data.train is not None
    load = data.load_prompts if settings.algorithm == "grpo" else data.load_examples
    rows = load(settings.data.train)
    if settings.data.heldout is not None:
        return rows, load(settings.data.heldout)[: settings.eval.rows]
    prompts, wanted = data.count_prompts(rows), settings.data.heldout_rows
    if wanted is None:  # a share of the prompts, because all rows of a held-out prompt leave the training part
        wanted = min(64, prompts // 10)
    train, heldout = data.split_heldout(rows, wanted)
    if not train:
        raise InputError(
            f"data: data.heldout_rows={wanted} leaves no training row of {settings.data.train} (different "
            f"prompts: {prompts}); ask for fewer, or name another file in data.heldout"
        )
    return train, heldout[: settings.eval.rows]


def assemble(settings: Settings, inputs: Inputs, device: str, scratch: Path) -> Parts:
    """Loads tokenizer and model, encodes the data and checks that they fit together.

    Args:
        scratch: folder that receives the tokenizer of a built-in task.

    Raises:
        InputError: names the setting, the file or the row at fault.
    """
    try:
        if settings.model.path is not None:
            tokenizer_dir = Path(settings.model.path)
            dtype = None if settings.model.dtype is None else DTYPES[settings.model.dtype]
            model = load_model(tokenizer_dir, dtype=dtype, device=device, tp_leaves=settings.model.tp_leaves)
        else:
            assert inputs.task is not None
            tokenizer_dir = scratch / "tokenizer"
            with writing(tokenizer_dir):
                save_tokenizer(inputs.task.tokenizer(), tokenizer_dir)
            model = _from_scratch(settings, inputs.task, device)
        tokenizer = Tokenizer(tokenizer_dir)
    except (ConfigError, CheckpointError, TokenizerError) as error:
        raise InputError(str(error)) from None
    try:
        model.set_attention_variant(settings.run.attention, settings.engine.page_size)
    except VariantError as error:
        raise InputError(f"run.attention={settings.run.attention}: {error}") from None
    model.gradient_checkpointing = settings.train.gradient_checkpointing
    encoder = _Encoder(settings, model, tokenizer)
    if settings.algorithm == "sft":
        examples, heldout_examples = ([encoder.example(r) for r in rows] for rows in (inputs.train, inputs.heldout))
        return Parts(settings, device, model, tokenizer, tokenizer_dir, examples, heldout_examples)
    if isinstance(inputs.train, list):
        prompts = data.shuffled([encoder.prompt(row) for row in inputs.train], settings.run.seed)
    else:
        prompts = (encoder.prompt(row) for row in inputs.train)
        prompts = itertools.chain([next(prompts)], prompts)  # encode one now, to find errors before the run begins
    return Parts(
        settings,
        device,
        model,
        tokenizer,
        tokenizer_dir,
        examples=[encoder.example(row) for row in inputs.examples],
        prompts=prompts,
        heldout=[encoder.prompt(row) for row in inputs.heldout],
        rewards=inputs.rewards,
        heldout_rewards=inputs.heldout_rewards,
    )


def _from_scratch(settings: Settings, task: Task, device: str) -> Decoder:
    """The built-in task's model with random weights."""
    values = task.model_config()
    if device.startswith("cuda"):  # the fast kernels need a 2-byte dtype
        values["torch_dtype"] = "bfloat16"
    values |= settings.model.config
    if settings.model.dtype is not None:
        values["torch_dtype"] = settings.model.dtype
    try:
        config = from_hf(values, f"model of task {task.name}")
    except ConfigError as error:
        raise InputError(f"model.config: {error}") from None
    deviation = values.get("initializer_range")
    if deviation is None:
        return Decoder.from_config(config, seed=settings.run.seed, device=device)
    if isinstance(deviation, bool) or not (isinstance(deviation, (int, float)) and 0 <= deviation <= 1e30):
        raise InputError(
            f"model.config: initializer_range is {deviation!r}; expected a finite number of at least 0 (YAML reads "
            "1e-2 as text and 1.0e-2 as a number)"
        )
    return Decoder.from_config(config, seed=settings.run.seed, device=device, std=deviation)


class _Encoder:
    """Encodes rows as token ids, with the checks that need both tokenizer and model."""

    def __init__(self, settings: Settings, model: Decoder, tokenizer: Tokenizer):
        self.settings, self.model, self.tokenizer = settings, model, tokenizer
        self.limit = model.config.max_position_embeddings
        self._cache: dict[tuple[str, bool], list[int]] = {}

    def prompt(self, row: Row) -> Prompt:
        """A prompt that leaves `rollout.max_tokens` of the context for its completion."""
        where = row.get(data.WHERE, "prompt of the built-in task")
        ids = self._prompt_ids(row["prompt"], where)
        left = self.limit - len(ids)
        if left < self.settings.rollout.max_tokens:
            raise InputError(
                f"{where}: the prompt has {len(ids)} tokens, which leaves {max(left, 0)} of the model's context of "
                f"{self.limit} for rollout.max_tokens={self.settings.rollout.max_tokens}; shorten one of them"
            )
        return Prompt(row, ids)

    def example(self, row: Row) -> Trajectory:
        """A supervised example; the end-of-sequence token is appended to a text completion."""
        where = row.get(data.WHERE, "example of the built-in task")
        prompt, completion = row["prompt"], row["completion"]
        prompt_ids = self._prompt_ids(prompt, where)
        if data.is_chat(prompt):
            start = self._template(prompt, where, generation=True)
            full = self._template([*prompt, *completion], where, generation=False)
            if not full.startswith(start):
                raise InputError(
                    f"{where}: the chat template renders the conversation differently once the answer is added, so the "
                    "answer's tokens cannot be separated; give prompt and completion as text"
                )
            ids = self._ids(full[len(start) :], where, special=False)
        else:
            end = self._end()
            ids = [*self._ids(completion, where, special=False), *([] if end is None else [end])]
        if not ids:
            raise InputError(f"{where}: the completion has no token")
        self._check(ids, where)
        if len(prompt_ids) + len(ids) > self.limit:
            raise InputError(
                f"{where}: prompt and completion have {len(prompt_ids) + len(ids)} tokens, the model's context is "
                f"{self.limit}; shorten them"
            )
        return Trajectory(prompt_ids, ids)

    def _end(self) -> int | None:
        """The tokenizer's end-of-sequence token if the model ends at it too, else the model's first."""
        own, ends = self.tokenizer.eos_token_id, self.model.config.eos_token_id
        if own is not None and (not ends or own in ends):
            return own
        return ends[0] if ends else None

    def _prompt_ids(self, prompt: Any, where: str) -> list[int]:
        if data.is_chat(prompt):
            ids = self._ids(self._template(prompt, where, generation=True), where, special=False)
        else:
            ids = self._ids(prompt, where, special=True)
        if not ids:
            raise InputError(f"{where}: the prompt {str(prompt)[:60]!r} has no token; it must have at least one")
        self._check(ids, where)
        return ids

    def _ids(self, text: str, where: str, *, special: bool) -> list[int]:
        """Token ids; short texts are cached, because a small task repeats them a hundred thousand times."""
        key = (text, special)
        if key in self._cache:
            return self._cache[key]
        try:
            ids = self.tokenizer.encode(text, add_special_tokens=special)
        except TokenizerError as error:
            raise InputError(f"{where}: {error}") from None
        if len(text) < 32 and len(self._cache) < 65536:
            self._cache[key] = ids
        return ids

    def _template(self, messages: list[dict[str, Any]], where: str, generation: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=generation)
        except TokenizerError as error:
            raise InputError(f"{where}: {error}") from None

    def _check(self, ids: list[int], where: str) -> None:
        size, token = self.model.config.vocab_size, max(ids)
        if token >= size:
            raise InputError(
                f"{where}: token id {token} ({self.tokenizer.token(token)!r}) is not below the model's vocab_size "
                f"{size}; tokenizer and model do not belong together"
            )
