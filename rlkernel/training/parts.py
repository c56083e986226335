"""Builds the parts of a run from its settings: device, rewards, prompts, tokenizer, model.

All files are read and encoded before the first step, so that a bad line, a prompt longer than the context or an
unknown token is an error in the first second and not at step 400.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic

import torch
from typing_extensions import TypeVar  # with a default, which typing's has from Python 3.13

from rlkernel.data.characters import save_tokenizer
from rlkernel.data.errors import InputError
from rlkernel.data.files import Row
from rlkernel.data.preferences import load_preferences
from rlkernel.data.prompts import columns_of, load_examples, load_prompts
from rlkernel.data.rewards import Limits, Reward, Rewards
from rlkernel.data.splits import count_prompts, shuffled, split_heldout
from rlkernel.data.tasks import Task, load_task
from rlkernel.data.tokenizer import Tokenizer, TokenizerError
from rlkernel.models import Backbone, CheckpointError, ConfigError, Decoder, ScalarModel, add_adapters, load_model
from rlkernel.models.config import DTYPES, from_hf
from rlkernel.models.scalar_head import is_scalar_model
from rlkernel.ops import VariantError
from rlkernel.training.batch import Trajectory
from rlkernel.training.config import PREFERENCES, RewardSettings, Settings
from rlkernel.training.encoding import Encoder, Prompt
from rlkernel.training.model_reward import ModelReward
from rlkernel.training.pairs import Pair
from rlkernel.training.run_folder import writing

LOADERS = {"sft": load_examples, "dpo": load_preferences, "reward": load_preferences}
"""What reads `data.train`, by algorithm; prompts for the others."""


@dataclass
class Inputs:
    """Rows and reward functions, before anything is encoded.

    Attributes:
        task: the built-in task, or None.
        train, heldout: rows to train on (an endless stream if a task makes them for grpo) and to evaluate on.
        examples: supervised rows of the warm-up (grpo, dpo).
        rewards, heldout_rewards: None except for grpo.
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


Model = TypeVar("Model", bound=Backbone, default=Decoder)


@dataclass
class Parts(Generic[Model]):
    """Everything a trainer needs.

    Attributes:
        device: "cpu" or "cuda".
        model: the model that is trained: the policy, or a reward model.
        tokenizer, tokenizer_dir: the policy's tokenizer and the directory it was read from.
        examples: supervised trajectories: the data (sft) or the warm-up's (grpo, dpo).
        heldout_examples: evaluation trajectories (sft).
        pairs, heldout_pairs: preferences to train on and to evaluate on (dpo, reward).
        prompts: endless stream of training prompts (grpo).
        longest_prompt: most tokens of a prompt, trained or held out; None if prompts are made as the run goes (grpo).
        heldout: evaluation prompts (grpo).
        rewards, heldout_rewards: None except for grpo and ppo.
        value_model: the one of `value.path` (ppo), or None.
        dropped: place and length of each row that exceeds the context and was dropped.
    """

    settings: Settings
    device: str
    model: Model
    tokenizer: Tokenizer
    tokenizer_dir: Path
    examples: list[Trajectory]
    heldout_examples: list[Trajectory] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    heldout_pairs: list[Pair] = field(default_factory=list)
    prompts: Iterator[Prompt] = field(default_factory=lambda: iter(()))
    longest_prompt: int | None = None
    heldout: list[Prompt] = field(default_factory=list)
    rewards: Rewards | None = None
    heldout_rewards: Rewards | None = None
    value_model: ScalarModel | None = None
    dropped: list[str] = field(default_factory=list)


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
    examples: list[Row] = []
    if settings.warmup.steps and settings.warmup.data is not None:
        examples = load_examples(settings.warmup.data)
    elif settings.warmup.steps and task is not None:
        examples = task.sft_examples(settings.warmup.examples, settings.run.seed)
    if settings.algorithm in PREFERENCES:
        return Inputs(task, *(_split_file(settings) if task is None else _preferences(task, settings)), examples)
    rewards, heldout_rewards = _load_rewards(settings, task)
    if task is not None:
        heldout = task.heldout()[: settings.eval.rows]
        rewards.require(columns_of(heldout[:1]), f"task {task.name}")
        return Inputs(task, task.train_prompts(settings.run.seed), heldout, examples, rewards, heldout_rewards)
    train, heldout = _split_file(settings)
    for rows, file in ((train, settings.data.train), (heldout, settings.data.heldout or settings.data.train)):
        if rows:
            rewards.require(columns_of(rows[:1]), str(file))
    return Inputs(task, train, heldout, examples, rewards, heldout_rewards)


def _load_rewards(settings: Settings, task: Task | None) -> tuple[Rewards, Rewards]:
    """Rewards of training and of the evaluation; a built-in task's unless the settings name others."""
    if settings.rewards:
        pool = settings.reward_pool
        memory = None if pool.memory_gib is None else int(pool.memory_gib * 2**30)
        limits = Limits(pool.workers, pool.timeout_s, memory, int(pool.output_mib * 2**20))
        named = [_reward(reward, settings) for reward in settings.rewards]
        rewards = Rewards(named, None if pool.in_process else limits)
        return rewards, rewards
    assert task is not None
    return (
        Rewards([Reward(task.name, task.reward, unit="batch")]),
        Rewards([Reward(task.name, task.heldout_reward, unit="batch")]),
    )


def _reward(reward: RewardSettings, settings: Settings) -> Reward:
    if reward.function is not None:
        name = reward.name or reward.function.rpartition(":")[2]
        return Reward(name, reward.function, reward.weight, reward.unit, reward.options)
    assert reward.model is not None
    device, budget = choose_device(settings.run.device), settings.train.micro_batch_tokens
    return Reward(reward.name or "reward_model", ModelReward(reward.model, device, budget), reward.weight, "batch")


def _sft_rows(task: Task, settings: Settings) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows) of a built-in task's examples."""
    drawn = task.sft_examples(settings.warmup.examples + settings.eval.rows, settings.run.seed)
    return split_heldout(drawn, settings.eval.rows)


def _preferences(task: Task, settings: Settings) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows) of a built-in task's preferences."""
    drawn = task.preferences(settings.warmup.examples + settings.eval.rows, settings.run.seed)
    return split_heldout(drawn, settings.eval.rows)


def _split_file(settings: Settings) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows) of `data.train`, or of it and `data.heldout`."""
    assert settings.data.train is not None
    load = LOADERS.get(settings.algorithm, load_prompts)
    rows = load(settings.data.train)
    if settings.data.heldout is not None:
        return rows, load(settings.data.heldout)[: settings.eval.rows]
    prompts, wanted = count_prompts(rows), settings.data.heldout_rows
    if wanted is None:  # a share of the prompts, because all rows of a held-out prompt leave the training part
        wanted = min(64, prompts // 10)
    train, heldout = split_heldout(rows, wanted)
    if not train:
        raise InputError(
            f"data: data.heldout_rows={wanted} leaves no training row of {settings.data.train} (different "
            f"prompts: {prompts}); ask for fewer, or name another file in data.heldout"
        )
    return train, heldout[: settings.eval.rows]


def assemble(settings: Settings, inputs: Inputs, device: str, scratch: Path) -> Parts[Any]:
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
            is_scalar = settings.algorithm == "reward" and is_scalar_model(tokenizer_dir)
            load = ScalarModel.load if is_scalar else load_model
            model: Backbone = load(tokenizer_dir, dtype=dtype, device=device, tp_leaves=settings.model.tp_leaves)
        else:
            assert inputs.task is not None
            tokenizer_dir = scratch / "tokenizer"
            with writing(tokenizer_dir):
                save_tokenizer(inputs.task.tokenizer(), tokenizer_dir)
            model = _from_scratch(settings, inputs.task, device)
        tokenizer = Tokenizer(tokenizer_dir)
        if settings.algorithm == "reward" and isinstance(model, Decoder):
            model = ScalarModel.from_decoder(model, settings.run.seed, tokenizer.pad_token_id)
    except (ConfigError, CheckpointError, TokenizerError) as error:
        raise InputError(str(error)) from None
    try:
        model.set_attention_variant(settings.run.attention, settings.engine.page_size)
    except VariantError as error:
        raise InputError(f"run.attention={settings.run.attention}: {error}") from None
    lora = settings.model.lora
    if lora.rank:
        assert isinstance(model, Decoder)
        add_adapters(model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, seed=settings.run.seed)
    model.gradient_checkpointing = settings.train.gradient_checkpointing
    encoder = Encoder(
        model.config,
        tokenizer,
        max_tokens=settings.rollout.max_tokens,
        template_args=settings.data.chat_template_args,
        drops=settings.data.overlong == "drop",
    )
    if settings.algorithm == "sft":
        return Parts(
            settings,
            device,
            model,
            tokenizer,
            tokenizer_dir,
            examples=encoder.all_of(inputs.train, encoder.example, "data.train"),
            heldout_examples=encoder.all_of(inputs.heldout, encoder.example, "data.heldout"),
            dropped=encoder.dropped,
        )
    if settings.algorithm in PREFERENCES:
        pair = lambda row: Pair(*encoder.preference(row), row.get("margin", 0.0))
        return Parts(
            settings,
            device,
            model,
            tokenizer,
            tokenizer_dir,
            examples=encoder.all_of(inputs.examples, encoder.example, "warmup.data"),
            pairs=encoder.all_of(inputs.train, pair, "data.train"),
            heldout_pairs=encoder.all_of(inputs.heldout, pair, "data.heldout"),
            dropped=encoder.dropped,
        )
    heldout, longest = encoder.all_of(inputs.heldout, encoder.prompt, "data.heldout"), None
    if isinstance(inputs.train, list):
        trained = encoder.all_of(inputs.train, encoder.prompt, "data.train")
        longest = max(len(prompt.ids) for prompt in (*trained, *heldout))
        prompts = shuffled(trained, settings.run.seed)
    else:
        prompts = (encoder.prompt(row) for row in inputs.train)
        prompts = itertools.chain([next(prompts)], prompts)  # encode one now, to find errors before the run begins
    return Parts(
        settings,
        device,
        model,
        tokenizer,
        tokenizer_dir,
        examples=encoder.all_of(inputs.examples, encoder.example, "warmup.data"),
        prompts=prompts,
        longest_prompt=longest,
        heldout=heldout,
        rewards=inputs.rewards,
        heldout_rewards=inputs.heldout_rewards,
        value_model=_value_model(settings, model),
        dropped=encoder.dropped,
    )


def _value_model(settings: Settings, policy: Backbone) -> ScalarModel | None:
    """The value model of `value.path`, on the policy's device."""
    if settings.algorithm != "ppo" or settings.value.path is None:
        return None
    where, leaves = f"value.path={settings.value.path}", settings.model.tp_leaves
    try:
        model = ScalarModel.load(settings.value.path, device=policy.device, tp_leaves=leaves)
        model.set_attention_variant(settings.run.attention)
    except (ConfigError, CheckpointError, VariantError) as error:
        raise InputError(f"{where}: {error}") from None
    mine, its = policy.config, model.config
    if its.vocab_size != mine.vocab_size or its.max_position_embeddings < mine.max_position_embeddings:
        raise InputError(
            f"{where} has {its.vocab_size} tokens and a context of {its.max_position_embeddings}, the policy "
            f"{mine.vocab_size} and {mine.max_position_embeddings}; name a model that reads the policy's token ids"
        )
    model.gradient_checkpointing = settings.train.gradient_checkpointing
    return model


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
    unread = (settings.model.config.keys() & config.extra.keys()) - task.model_config().keys()
    if unread:
        keys = ", ".join(task.model_config())
        raise InputError(f"model.config: no model reads {min(unread)!r}; the keys of task {task.name} are {keys}")
    deviation = values.get("initializer_range")
    if deviation is None:
        return Decoder.from_config(config, seed=settings.run.seed, device=device)
    if isinstance(deviation, bool) or not (isinstance(deviation, (int, float)) and 0 <= deviation <= 1e30):
        raise InputError(
            f"model.config: initializer_range is {deviation!r}; expected a finite number of at least 0 (YAML reads "
            "1e-2 as text and 1.0e-2 as a number)"
        )
    return Decoder.from_config(config, seed=settings.run.seed, device=device, std=deviation)
