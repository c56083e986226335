"""Puts a run together from its settings: device, rewards, prompts, tokenizer, model, each checked before any work.

Files are read and encoded whole at the start, so that a bad line, a prompt that does not fit the context or a token
the model does not know is an error in the first second and not in step 400.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlkernel.data import prompts as data
from rlkernel.data.characters import save_tokenizer
from rlkernel.data.errors import InputError
from rlkernel.data.rewards import Reward, Rewards, load_reward
from rlkernel.data.tasks import Task, load_task
from rlkernel.data.tokenizer import Tokenizer, TokenizerError
from rlkernel.models import CheckpointError, ConfigError, Decoder, load_model
from rlkernel.models.config import DTYPES, from_hf
from rlkernel.ops import VariantError
from rlkernel.training.batch import Sample
from rlkernel.training.config import Settings
from rlkernel.training.run import writing

Row = data.Row


@dataclass(frozen=True)
class Prompt:
    """A row of the data with its prompt's token ids."""

    row: Row
    ids: list[int]


@dataclass
class Inputs:
    """What the data files and reward files gave: read before the run folder is made.

    Attributes:
        task: the built-in task, or None.
        train, heldout: rows of the files (of the task where there is one: an endless stream, a list).
        examples: supervised rows (sft, warm-up).
        rewards, heldout_rewards: None for sft.
    """

    task: Task | None
    train: list[Row] | Iterator[Row]
    heldout: list[Row]
    examples: list[Row]
    rewards: Rewards | None
    heldout_rewards: Rewards | None


@dataclass
class Parts:
    """Everything a trainer needs.

    Attributes:
        device: "cpu" or "cuda".
        model: the policy; tokenizer: its tokenizer; tokenizer_dir: where that came from.
        prompts: endless stream of training prompts (grpo).
        heldout: evaluation prompts (grpo).
        examples, heldout_examples: supervised samples (sft, warm-up).
        rewards, heldout_rewards: None for sft.
    """

    settings: Settings
    device: str
    model: Decoder
    tokenizer: Tokenizer
    tokenizer_dir: Path
    prompts: Iterator[Prompt]
    heldout: list[Prompt]
    examples: list[Sample]
    heldout_examples: list[Sample]
    rewards: Rewards | None
    heldout_rewards: Rewards | None


def choose_device(wanted: str) -> str:
    """ "cpu" or "cuda".

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
        InputError: naming file and line, or the reward.
    """
    task = None if settings.data.task is None else load_task(settings.data.task)
    rewards = heldout_rewards = None
    if settings.algorithm == "grpo":
        if settings.rewards:
            loaded = [(r, load_reward(r.function)) for r in settings.rewards]
            rewards = Rewards([Reward(r.name or r.function.rpartition(":")[2], f, r.weight) for r, f in loaded])
            heldout_rewards = rewards
        elif task is not None:
            rewards = Rewards([Reward(task.name, task.reward)])
            heldout_rewards = Rewards([Reward(task.name, task.heldout_reward)])
    examples: list[Row] = []
    if settings.algorithm == "grpo" and settings.warmup.steps:
        if settings.warmup.data is not None:
            examples = data.load_examples(settings.warmup.data)
        elif task is not None:
            examples = task.sft_examples(settings.warmup.examples, settings.run.seed)
    if task is not None:
        return _of_task(task, settings, examples, rewards, heldout_rewards)
    assert settings.data.train is not None
    load = data.load_prompts if settings.algorithm == "grpo" else data.load_examples
    rows = load(settings.data.train)
    if settings.data.heldout is not None:
        heldout = load(settings.data.heldout)
    else:
        prompts, wanted = data.different(rows), settings.data.heldout_rows
        if wanted is None:  # a share of the prompts, because all rows of a drawn prompt leave the training part
            wanted = min(64, prompts // 10)
        rows, heldout = data.split_heldout(rows, wanted)
        if not rows:
            raise InputError(
                f"data: data.heldout_rows={wanted} leaves no training row of {settings.data.train} (different "
                f"prompts: {prompts}); ask for fewer, or name another file in data.heldout"
            )
    if rewards is not None:
        rewards.require(data.columns_of(rows[:1]), str(settings.data.train))
        if heldout:
            rewards.require(data.columns_of(heldout[:1]), str(settings.data.heldout or settings.data.train))
    return Inputs(task, rows, heldout[: settings.eval.rows], examples, rewards, heldout_rewards)


def _of_task(
    task: Task, settings: Settings, examples: list[Row], rewards: Rewards | None, heldout_rewards: Rewards | None
) -> Inputs:
    if settings.algorithm == "grpo":
        heldout = task.heldout()[: settings.eval.rows]
        assert rewards is not None
        rewards.require(data.columns_of(heldout[:1]), f"task {task.name}")
        return Inputs(task, task.train_prompts(settings.run.seed), heldout, examples, rewards, heldout_rewards)
    drawn = task.sft_examples(settings.warmup.examples + settings.eval.rows, settings.run.seed)
    rows, heldout = data.split_heldout(drawn, settings.eval.rows)
    return Inputs(task, rows, heldout, [], None, None)


def assemble(settings: Settings, inputs: Inputs, device: str, scratch: Path) -> Parts:
    """Loads tokenizer and model, encodes the data and checks that all of it fits together.

    Args:
        scratch: folder that receives the tokenizer of a built-in task.

    Raises:
        InputError: naming what does not fit.
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
    seed = settings.run.seed
    if settings.algorithm == "sft":
        rows = list(inputs.train)
        samples = [encoder.sample(row) for row in rows]
        heldout_examples = [encoder.sample(row) for row in inputs.heldout]
        return Parts(
            settings, device, model, tokenizer, tokenizer_dir, iter(()), [], samples, heldout_examples, None, None
        )
    if isinstance(inputs.train, list):
        encoded = [{"prompt": encoder.prompt(row)} for row in inputs.train]
        stream: Iterator[Prompt] = (item["prompt"] for item in data.shuffled(encoded, seed))
    else:
        stream = (encoder.prompt(row) for row in inputs.train)
        stream = itertools.chain([next(stream)], stream)
    heldout = [encoder.prompt(row) for row in inputs.heldout]
    examples = [encoder.sample(row) for row in inputs.examples]
    return Parts(
        settings,
        device,
        model,
        tokenizer,
        tokenizer_dir,
        stream,
        heldout,
        examples,
        [],
        inputs.rewards,
        inputs.heldout_rewards,
    )


def _from_scratch(settings: Settings, task: Task, device: str) -> Decoder:
    values = task.model_config()
    if device.startswith("cuda"):  # fast kernels are of two bytes an element
        values["torch_dtype"] = "bfloat16"
    values |= settings.model.config
    if settings.model.dtype is not None:
        values["torch_dtype"] = settings.model.dtype
    try:
        config = from_hf(values, f"model of task {task.name}")
    except ConfigError as error:
        raise InputError(f"model.config: {error}") from None
    model = Decoder.from_config(config, seed=settings.run.seed, device=device)
    deviation = values.get("initializer_range")
    if deviation is not None:
        if isinstance(deviation, bool) or not (isinstance(deviation, (int, float)) and 0 <= deviation <= 1e30):
            raise InputError(
                f"model.config: initializer_range is {deviation!r}; expected a finite number of at least 0 (in YAML, "
                "1e-2 is text and 1.0e-2 a number)"
            )
        # A released model's 0.02 suits a width of thousands; a small one learns faster from what its task asks for.
        generator = torch.Generator().manual_seed(settings.run.seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    drawn = torch.empty(parameter.shape, device="cpu").normal_(0.0, deviation, generator=generator)
                    parameter.copy_(drawn)
    return model


class _Encoder:
    """Rows to token ids, with the checks that need both tokenizer and model."""

    def __init__(self, settings: Settings, model: Decoder, tokenizer: Tokenizer):
        self.settings, self.model, self.tokenizer = settings, model, tokenizer
        self.limit = model.config.max_position_embeddings
        self._known: dict[tuple[str, bool], list[int]] = {}

    def prompt(self, row: Row) -> Prompt:
        """A prompt that leaves room for `rollout.max_tokens`."""
        where = row.get(data.WHERE, "prompt of the built-in task")
        ids = self._encode(row["prompt"], where)
        room = self.limit - len(ids)
        if room < self.settings.rollout.max_tokens:
            raise InputError(
                f"{where}: the prompt has {len(ids)} tokens, which leaves {max(room, 0)} of the model's context of "
                f"{self.limit} for rollout.max_tokens={self.settings.rollout.max_tokens}; shorten one of them"
            )
        return Prompt(row, ids)

    def sample(self, row: Row) -> Sample:
        """A supervised sample; the end-of-sequence token is appended to a text completion."""
        where = row.get(data.WHERE, "example of the built-in task")
        prompt, completion = row["prompt"], row["completion"]
        prompt_ids = self._encode(prompt, where)
        if data.is_chat(prompt):
            start = self._template(prompt, where, generation=True)
            whole = self._template([*prompt, *completion], where, generation=False)
            if not whole.startswith(start):
                raise InputError(
                    f"{where}: the chat template renders the conversation differently once the answer is added, so the "
                    "answer's tokens cannot be told apart; give prompt and completion as text"
                )
            ids = self._ids(whole[len(start) :], False)
        else:
            ids = self._ids(completion, False)
            ids = [*ids, *([] if self._end() is None else [self._end()])]
        self._check(ids, where)
        if not ids:
            raise InputError(f"{where}: the completion has no token")
        if len(prompt_ids) + len(ids) > self.limit:
            raise InputError(
                f"{where}: prompt and completion have {len(prompt_ids) + len(ids)} tokens, the model's context is "
                f"{self.limit}; shorten them"
            )
        return Sample(prompt_ids, ids)

    def _end(self) -> Any:
        own = self.tokenizer.eos_token_id
        ends = self.model.config.eos_token_id
        return own if own is not None and (not ends or own in ends) else (ends[0] if ends else None)

    def _encode(self, prompt: Any, where: str) -> list[int]:
        if data.is_chat(prompt):
            ids = self._ids(self._template(prompt, where, generation=True), False)
        else:
            ids = self._ids(prompt, True)
        if not ids:
            raise InputError(f"{where}: the prompt {str(prompt)[:60]!r} has no token; it must have at least one")
        self._check(ids, where)
        return ids

    def _ids(self, text: str, special: bool) -> list[int]:
        """Token ids; short texts are remembered, for a small task repeats them a hundred thousand times."""
        key = (text, special)
        if key in self._known:
            return self._known[key]
        ids = self.tokenizer.encode(text, add_special_tokens=special)
        if len(text) < 32 and len(self._known) < 65536:
            self._known[key] = ids
        return ids

    def _template(self, messages: list[dict[str, Any]], where: str, generation: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=generation)
        except TokenizerError as error:
            raise InputError(f"{where}: {error}") from None

    def _check(self, ids: list[int], where: str) -> None:
        size = self.model.config.vocab_size
        if ids and max(ids) >= size:
            token = max(ids)
            raise InputError(
                f"{where}: token id {token} ({self.tokenizer.token(token)!r}) is not below the model's vocab_size "
                f"{size}; tokenizer and model do not belong together"
            )
