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
from rlkernel.data.rewards import Environment, Limits, Reward, Rewards
from rlkernel.data.splits import count_prompts, shuffled, split_heldout
from rlkernel.data.tasks import Task, load_task
from rlkernel.data.tokenizer import Tokenizer, TokenizerError
from rlkernel.models import Backbone, CheckpointError, ConfigError, Decoder, ScalarModel, add_adapters, load_model
from rlkernel.models.config import DTYPES, from_hf
from rlkernel.models.scalar_head import is_scalar_model
from rlkernel.models.vision_config import VISION_FAMILIES, from_hf_multimodal
from rlkernel.models.vision_decoder import VisionDecoder
from rlkernel.ops import VariantError
from rlkernel.parallel.ranks import Ranks
from rlkernel.training.batch import Trajectory
from rlkernel.training.config import PREFERENCES, RewardSettings, Settings
from rlkernel.training.encoding import Encoder
from rlkernel.training.media import ImagePrompts, Prompt
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
        train, heldout: rows to train on (an endless stream if a task makes prompts) and to evaluate on.
        examples: supervised rows of the warm-up.
        rewards, heldout_rewards: None unless completions are sampled (grpo, ppo), and on ranks other than 0.
        environment: of `rollout.environment` (grpo, ppo), or None.
    """

    task: Task | None
    train: list[Row] | Iterator[Row]
    heldout: list[Row]
    examples: list[Row] = field(default_factory=list)
    rewards: Rewards | None = None
    heldout_rewards: Rewards | None = None
    environment: Environment | None = None

    def close(self) -> None:
        """Ends the processes of rewards and environment."""
        for called in (self.rewards, self.heldout_rewards, self.environment):
            if called is not None:
                called.close()


Model = TypeVar("Model", bound=Backbone, default=Decoder)


@dataclass
class Parts(Generic[Model]):
    """Everything a trainer needs.

    Attributes:
        device: "cpu" or "cuda".
        model: the model that is trained: the policy, or a reward model.
        tokenizer, tokenizer_dir: the policy's tokenizer and the directory it was read from.
        examples: supervised trajectories: the data (sft) or the warm-up's.
        heldout_examples: evaluation trajectories (sft).
        pairs, heldout_pairs: preferences to train on and to evaluate on (dpo, reward).
        prompts: endless stream of training prompts (grpo, ppo).
        longest_prompt: most tokens of a prompt, trained or held out; None if a task makes prompts during the run.
        heldout: evaluation prompts (grpo, ppo).
        rewards, heldout_rewards: None unless completions are sampled (grpo, ppo), and on ranks other than 0.
        environment: answers the turns of a completion (grpo, ppo); None if a completion is one turn.
        value_model: the one of `value.path` (ppo), or None.
        dropped: place and length of each row that exceeds the context and was dropped.
        ranks: this process's place among those of the run.
    """

    settings: Settings
    device: str
    model: Model
    tokenizer: Tokenizer
    tokenizer_dir: Path
    examples: list[Trajectory] = field(default_factory=list)
    heldout_examples: list[Trajectory] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    heldout_pairs: list[Pair] = field(default_factory=list)
    prompts: Iterator[Prompt] = field(default_factory=lambda: iter(()))
    longest_prompt: int | None = None
    heldout: list[Prompt] = field(default_factory=list)
    rewards: Rewards | None = None
    heldout_rewards: Rewards | None = None
    environment: Environment | None = None
    value_model: ScalarModel | None = None
    dropped: list[str] = field(default_factory=list)
    ranks: Ranks = field(default_factory=Ranks)


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


def read_inputs(settings: Settings, ranks: Ranks = Ranks()) -> Inputs:
    """Reads data files and loads reward functions.

    Raises:
        InputError: names the file and line, or the reward.
    """
    task = None if settings.data.task is None else load_task(settings.data.task)
    if settings.algorithm == "sft":
        return Inputs(task, *_fixed_rows(settings, task))
    examples: list[Row] = []
    if settings.warmup.steps and settings.warmup.data is not None:
        examples = load_examples(settings.warmup.data)
    elif settings.warmup.steps and task is not None:
        examples = task.sft_examples(settings.warmup.examples, settings.run.seed)
    if settings.algorithm in PREFERENCES:
        return Inputs(task, *_fixed_rows(settings, task), examples)
    rewards, heldout_rewards = _load_rewards(settings, task) if ranks.leads else (None, None)
    reference = settings.rollout.environment
    environment = None if reference is None else Environment(reference, _limits(settings))
    train: list[Row] | Iterator[Row]
    if task is not None:
        train, heldout = task.train_prompts(settings.run.seed), task.heldout()[: settings.eval.rows]
        sources = [(heldout, f"task {task.name}")]
    else:
        train, heldout = _fixed_rows(settings, task)
        sources = [(train, str(settings.data.train)), (heldout, str(settings.data.heldout or settings.data.train))]
    for rows, source in sources:
        for called in (rewards, environment):
            if rows and called is not None:
                called.require(columns_of(rows[:1]), source)
    return Inputs(task, train, heldout, examples, rewards, heldout_rewards, environment)


def _load_rewards(settings: Settings, task: Task | None) -> tuple[Rewards, Rewards]:
    """Rewards of training and of the evaluation; a built-in task's unless the settings name others."""
    if settings.rewards:
        rewards = Rewards([_reward(reward, settings) for reward in settings.rewards], _limits(settings))
        return rewards, rewards
    assert task is not None
    return (
        Rewards([Reward(task.name, task.reward, unit="batch")]),
        Rewards([Reward(task.name, task.heldout_reward, unit="batch")]),
    )


def _limits(settings: Settings) -> Limits | None:
    """Limits of the worker processes; None if functions are called in this process."""
    pool = settings.reward_pool
    memory = None if pool.memory_gib is None else int(pool.memory_gib * 2**30)
    limits = Limits(pool.workers, pool.timeout_s, memory, int(pool.output_mib * 2**20))
    return None if pool.in_process else limits


def _reward(reward: RewardSettings, settings: Settings) -> Reward:
    if reward.function is not None:
        return Reward(reward.label, reward.function, reward.weight, reward.unit, reward.options)
    assert reward.model is not None
    device, budget = choose_device(settings.run.device), settings.train.micro_batch_tokens
    return Reward(reward.label, ModelReward(reward.model, device, budget), reward.weight, "batch")


def _fixed_rows(settings: Settings, task: Task | None) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows): drawn from a built-in task, or read from `data.train` and `data.heldout`."""
    if task is not None:
        draw = task.preferences if settings.algorithm in PREFERENCES else task.sft_examples
        return split_heldout(draw(settings.warmup.examples + settings.eval.rows, settings.run.seed), settings.eval.rows)
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


def assemble(settings: Settings, inputs: Inputs, device: str, scratch: Path, ranks: Ranks = Ranks()) -> Parts[Any]:
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
            if ranks.leads:
                with writing(tokenizer_dir):
                    save_tokenizer(inputs.task.tokenizer(), tokenizer_dir)
            ranks.barrier()
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
        images=_image_prompts(settings, inputs.task, model),
    )
    parts: Parts[Any] = Parts(settings, device, model, tokenizer, tokenizer_dir, dropped=encoder.dropped, ranks=ranks)
    if settings.algorithm == "sft":
        parts.examples = encoder.all_of(inputs.train, encoder.example, "data.train")
        parts.heldout_examples = encoder.all_of(inputs.heldout, encoder.example, "data.heldout")
        return parts
    parts.examples = encoder.all_of(inputs.examples, encoder.example, "warmup.data")
    if settings.algorithm in PREFERENCES:
        pair = lambda row: Pair(*encoder.preference(row), row.get("margin", 0.0))
        parts.pairs = encoder.all_of(inputs.train, pair, "data.train")
        parts.heldout_pairs = encoder.all_of(inputs.heldout, pair, "data.heldout")
        return parts
    parts.heldout = encoder.all_of(inputs.heldout, encoder.prompt, "data.heldout")
    if isinstance(inputs.train, list):
        trained = encoder.all_of(inputs.train, encoder.prompt, "data.train")
        parts.longest_prompt = max(len(prompt.ids) for prompt in (*trained, *parts.heldout))
        parts.prompts = shuffled(trained, settings.run.seed)
    else:
        prompts = (encoder.prompt(row) for row in inputs.train)
        parts.prompts = itertools.chain([next(prompts)], prompts)  # encodes one now, to find errors early
    if encoder.images is not None:
        encoder.images.check(parts.heldout)
    parts.rewards, parts.heldout_rewards = inputs.rewards, inputs.heldout_rewards
    parts.environment = inputs.environment
    parts.value_model = _value_model(settings, model)
    return parts


def _image_prompts(settings: Settings, task: Task | None, model: Backbone) -> ImagePrompts | None:
    """What puts a built-in task's images into its prompts; None for a model without an encoder.

    Raises:
        InputError: an algorithm or an option that prompts with images do not have.
    """
    if not isinstance(model, VisionDecoder):
        return None
    for asked, name in (
        (settings.algorithm != "grpo", f"rlkernel train {settings.algorithm}"),
        (task is None, "data.train"),
        (settings.model.lora.rank > 0, "model.lora"),
        (settings.model.tp_leaves > 1, "model.tp_leaves"),
        (settings.rollout.environment is not None, "rollout.environment"),
    ):
        if asked:
            raise InputError(
                f"{name} with a vision-language model is not supported; use rlkernel train grpo with data.task=shapes, "
                "or TRL, which has the datasets and processors"
            )
    assert task is not None
    return ImagePrompts(model, task.images)


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
    multimodal = None
    try:
        if values["model_type"] in VISION_FAMILIES:
            multimodal = from_hf_multimodal(values, f"model of task {task.name}")
        config = from_hf(values, f"model of task {task.name}") if multimodal is None else multimodal.text
    except ConfigError as error:
        raise InputError(f"model.config: {error}") from None
    unread = (settings.model.config.keys() & config.extra.keys()) - task.model_config().keys()
    if unread:
        keys = ", ".join(task.model_config())
        raise InputError(f"model.config: no model reads {min(unread)!r}; the keys of task {task.name} are {keys}")
    deviation = values.get("initializer_range")
    deviation = 0.02 if deviation is None else deviation
    if isinstance(deviation, bool) or not (isinstance(deviation, (int, float)) and 0 <= deviation <= 1e30):
        raise InputError(
            f"model.config: initializer_range is {deviation!r}; expected a finite number of at least 0 (YAML reads "
            "1e-2 as text and 1.0e-2 as a number)"
        )
    if multimodal is not None:
        return VisionDecoder.from_multimodal(multimodal, settings.run.seed, device, deviation)
    return Decoder.from_config(config, seed=settings.run.seed, device=device, std=deviation)
