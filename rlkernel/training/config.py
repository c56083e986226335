"""Settings of a run, as pydantic models; unknown keys are errors.

Later sources win: the library's defaults, the algorithm's, the built-in task's, the method's, the config file,
command-line options, overrides `a.b=value`. `resolve` merges them.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rlkernel.data.errors import InputError
from rlkernel.training.methods import DEFAULTS, METHODS

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PREFERENCES = ("dpo", "reward")
"""Algorithms that train on preferences."""
_NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)  # ValueError: `!!int x`; RecursionError: nested brackets


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _is_float32(cls, value: Any) -> Any:
        if isinstance(value, float) and value and not 1.4e-45 <= abs(value) <= 3.4e38:
            raise ValueError("must be 0 or have a size between 1.4e-45 and 3.4e38, because it is used in float32")
        return value


class RunSettings(_Section):
    """Where and how the run happens."""

    seed: int = Field(
        default=0, ge=0, description="sets data order, sampling, and the initial weights of a model from scratch"
    )
    backend: Literal["rlkernel", "torch"] = Field(
        default="rlkernel", description="torch: the control arm on stock torch ops"
    )
    attention: Literal["split", "fa3"] = Field(
        default="split", description="variant of attention, in rollout and training; part of the contract id"
    )
    device: Literal["cpu", "cuda", "auto"] = Field(default="auto", description="auto: cuda where torch sees a GPU")
    output: str | None = Field(default=None, description="run folder; default runs/<algorithm>-<task or model>")
    strict: bool = Field(default=True, description="stop at the first mismatching log-probability (backend rlkernel)")
    probe_rollouts: int = Field(
        default=6, ge=0, description="control rollouts on stock torch over the run, for the report"
    )
    tensorboard: bool = Field(default=False, description="the same as tensorboard in run.log_to")
    log_to: list[Literal["tensorboard", "wandb", "trackio"]] = Field(
        default_factory=list, description="also log to these, locally by default; each is an extra"
    )
    metric_names: Literal["rlkernel", "trl", "verl"] = Field(
        default="rlkernel", description="names of the metrics in run.log_to"
    )
    save: bool = Field(default=True, description="write a Hugging Face checkpoint at the end")
    samples: int = Field(default=4, ge=0, description="completions of each step kept in samples.jsonl")


class LoraSettings(_Section):
    """Low-rank adapters in place of full fine-tuning (docs/guides/lora.md)."""

    rank: int = Field(default=0, ge=0, description="rank of the adapters; 0 = full fine-tuning")
    alpha: float = Field(default=32.0, gt=0, description="updates are scaled by alpha / rank")
    targets: list[Target] = Field(
        default_factory=lambda: list(get_args(Target)), min_length=1, description="linears with an adapter"
    )


class ModelSettings(_Section):
    """The policy."""

    path: str | None = Field(
        default=None, description="Hugging Face directory; default: the task's small model, from scratch"
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="default: as saved; a built-in task's model: bfloat16 on a GPU, float32 on a CPU"
    )
    tp_leaves: Literal[1, 2, 4, 8] = Field(
        default=1, description="chunks of K in o_proj and down_proj; changes the bits"
    )
    config: dict[str, Any] = Field(
        default_factory=dict, description="config.json keys to change in the built-in task's model"
    )
    lora: LoraSettings = Field(default_factory=LoraSettings)


class DataSettings(_Section):
    """Prompts."""

    task: str | None = Field(
        default=None, description="built-in task; default arithmetic if neither data, model nor reward is given"
    )
    train: str | None = Field(
        default=None, description="file of prompts (grpo), examples (sft) or preferences (dpo, reward)"
    )
    heldout: str | None = Field(default=None, description="file of evaluation rows; default: drawn from data.train")
    heldout_rows: int | None = Field(
        default=None, ge=0, description="rows drawn from data.train; default a tenth, at most 64"
    )
    overlong: Literal["refuse", "drop"] = Field(
        default="refuse", description="rows that exceed the model's context: an error, or dropped with a count"
    )
    chat_template_args: dict[str, Any] = Field(
        default_factory=dict, description="variables of the chat template, such as {enable_thinking: false}"
    )


class RewardSettings(_Section):
    """One reward: a function or a reward model."""

    function: str | None = Field(
        default=None, description="FILE.py:function, package.module:function or a built-in reward"
    )
    model: str | None = Field(default=None, description="directory of a reward model, instead of a function")
    weight: float = Field(default=1.0, description="factor in the sum of rewards")
    name: str | None = Field(default=None, description="name in the metrics; default the function's, or reward_model")
    unit: Literal["completion", "group", "batch"] = Field(
        default="completion", description="what one call of a function judges, and what a failed call drops"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of each call of a function")

    @model_validator(mode="after")
    def _is_one(self) -> RewardSettings:
        if (self.function is None) == (self.model is None):
            raise ValueError("a reward has either a function or a model")
        if self.model is not None and self.options:
            raise ValueError("options are keyword arguments of a function; a reward model has none")
        return self


class RewardPoolSettings(_Section):
    """Worker processes of the reward functions."""

    workers: int = Field(default=4, ge=1, description="processes that run rewards, at most")
    timeout_s: float = Field(default=30.0, gt=0, description="seconds of one call of a reward, at most")
    memory_gib: float | None = Field(
        default=8.0, gt=0, description="address space of one worker; null = unlimited, for rewards that use a GPU"
    )
    output_mib: float = Field(default=1.0, ge=0, description="printed output that is kept in rewards.log")
    in_process: bool = Field(
        default=False, description="call rewards in the trainer's process, without limits, for a debugger"
    )


class RolloutSettings(_Section):
    """Sampling of completions."""

    prompts: int = Field(default=16, ge=1, description="prompts per step")
    group_size: int = Field(default=8, ge=1, description="completions per prompt")
    max_tokens: int = Field(default=256, ge=1, description="tokens per completion, at most")
    temperature: float = Field(
        default=1.0, ge=1e-5, description="used in sampling and in every log-probability of the loss"
    )
    top_k: int = Field(
        default=0, ge=0, description="0 = off; log-probabilities are then over the kept tokens on both sides"
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="1 = off")
    min_p: float = Field(default=0.0, ge=0, lt=1, description="0 = off")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description="strings that end a completion"
    )
    mask_truncated: bool = Field(
        default=False, description="leave completions cut at max_tokens out of the loss (DAPO)"
    )
    overlong_buffer: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="last share of max_tokens over which overlong_penalty grows (DAPO); 0 = off",
    )
    overlong_penalty: float = Field(
        default=1.0, ge=0, description="subtracted from the reward of a completion of max_tokens"
    )


class EngineSettings(_Section):
    """Memory and batching of the rollout engine; no setting here changes a bit of a result."""

    max_num_seqs: int = Field(default=256, ge=1, description="sequences decoded together, at most")
    max_num_batched_tokens: int = Field(
        default=4096, ge=1, description="tokens of one forward; longer prompts are chunked"
    )
    page_size: int = Field(default=16, ge=1, description="tokens per KV page")
    num_pages: int | None = Field(
        default=None, ge=1, description="KV pages; default: enough for a step's completions at full length"
    )
    sleep: bool = Field(default=True, description="free the KV cache while the model trains")
    prefix_caching: bool = Field(default=True, description="compute the prompt of a group once")
    cuda_graphs: bool | None = Field(
        default=None, description="record decode steps as CUDA graphs; default: on NVIDIA GPUs"
    )


class LossSettings(_Section):
    """The policy loss (`ops.policy_loss`)."""

    type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo", "reinforce"] = Field(
        default="grpo", description="loss"
    )
    ratio_level: Literal["token", "sequence"] = Field(
        default="token", description="level of the importance ratio; gspo uses sequence"
    )
    old_policy: Literal["rollout", "scored"] = Field(
        default="rollout",
        description="old log-probabilities: the sampler's, or a training forward before the first update",
    )
    clip_low: float | None = Field(default=0.2, ge=0, description="ratio clipped below 1 - clip_low; null = off")
    clip_high: float | None = Field(default=0.2, ge=0, description="ratio clipped above 1 + clip_high; null = off")
    clip_dual: float | None = Field(default=None, gt=1, description="dual clip for negative advantages")
    tis_cap: float | None = Field(
        default=None, gt=0, description="truncated importance sampling; needs old_policy=scored"
    )
    kl_coef: float = Field(default=0.0, ge=0, description="weight of the KL to the frozen first policy")
    track_kl: bool = Field(default=False, description="measure that KL even if kl_coef is 0; one more forward per step")
    kl_type: Literal["k1", "k2", "k3"] = Field(default="k3", description="estimator of that KL")
    entropy_coef: float = Field(default=0.0, description="weight of the entropy bonus")


def clip_range(clip: float | None) -> float:
    """A clip range as `ops.policy_loss` takes it: infinity turns clipping off."""
    return math.inf if clip is None else clip


class AdvantageSettings(_Section):
    """From rewards to advantages (`ops.group_advantages`)."""

    mode: Literal["group", "leave_one_out", "batch", "none", "returns"] = Field(
        default="group", description="baseline; returns: of each token, whitened over the batch (REINFORCE++)"
    )
    normalize_std: bool = Field(
        default=True, description="divide by the standard deviation (not for leave_one_out, none)"
    )
    eps: float = Field(default=1e-4, gt=0, description="added to that deviation")


class DPOSettings(_Section):
    """Direct preference optimization."""

    beta: float = Field(default=0.1, gt=0, description="weight of the KL to the initial model; tau of IPO")
    loss: Literal["sigmoid", "ipo"] = Field(default="sigmoid", description="DPO's loss, or IPO's")
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="probability that a preference is wrong (conservative DPO)"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> DPOSettings:
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError("dpo.label_smoothing belongs to dpo.loss=sigmoid; IPO has none; set it to 0")
        return self


class RewardModelSettings(_Section):
    """Training of a reward model."""

    center_rewards_coefficient: float | None = Field(
        default=None, gt=0, description="weight of (chosen + rejected)^2, which centers rewards at 0; null = off"
    )


class KLSettings(_Section):
    """The KL to the frozen first policy inside the reward (ppo, rloo, reinforce++)."""

    coef: float = Field(default=0.0, ge=0, description="weight of logp - ref_logp of each token; grpo: of their sum")
    controller: Literal["fixed", "adaptive"] = Field(default="fixed", description="adaptive: moves coef towards target")
    target: float = Field(default=6.0, gt=0, description="wanted KL, in nats per completion (adaptive)")
    horizon: float = Field(default=10000.0, gt=0, description="completions over which coef adapts (adaptive)")


class PPOSettings(_Section):
    """Advantages of PPO (`ops.gae`)."""

    gamma: float = Field(default=1.0, ge=0, le=1, description="discount")
    lam: float = Field(default=0.95, ge=0, le=1, description="lambda of generalized advantage estimation")
    whiten_rewards: bool = Field(default=False, description="whiten scores with the running moments of the run")
    whiten_advantages: bool = Field(default=True, description="whiten advantages over the tokens of a step")


class ValueSettings(_Section):
    """The value model of PPO."""

    path: str | None = Field(
        default=None,
        description="Hugging Face directory with a scalar head, such as a reward model; default: the policy",
    )
    lr: float = Field(default=1e-5, gt=0, description="peak learning rate; the rest as under optimizer")
    clip: float | None = Field(
        default=0.2, gt=0, description="values stay this close to the old ones in the loss; null = off"
    )


class OptimizerSettings(_Section):
    """AdamW on fp32 master weights."""

    lr: float = Field(default=1e-6, gt=0, description="peak learning rate")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="decay of the two moments")
    eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(default=0.0, ge=0, description="for matrices; norms and biases have none")
    clip_norm: float | None = Field(default=1.0, gt=0, description="limit of the gradient norm; null = off")
    schedule: Literal["constant", "linear", "cosine"] = Field(default="constant", description="after the warm-up")
    warmup_steps: int = Field(default=0, ge=0, description="updates of linear warm-up")
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1, description="learning rate at the end, as a share of the peak")
    states: Literal["fp32", "int8"] = Field(
        default="fp32", description="moments of matrices; int8: 2.03 bytes per parameter in place of 8"
    )
    offload: bool = Field(
        default=False, description="keep masters and moments in pinned host memory (GPU); changes no bit"
    )

    @field_validator("betas")
    @classmethod
    def _in_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0.0 <= beta < 1.0 for beta in value):
            raise ValueError("both must lie in [0, 1)")
        return value


class TrainSettings(_Section):
    """Length of the run and shape of its updates."""

    steps: int = Field(default=100, ge=1, description="rollouts (grpo) or updates")
    minibatches: int = Field(default=1, ge=1, description="optimizer updates per pass over a rollout")
    epochs: int = Field(default=1, ge=1, description="passes over a rollout")
    batch_size: int = Field(default=16, ge=1, description="examples or pairs per update (sft, dpo, reward)")
    gradient_checkpointing: bool = Field(default=False, description="recompute layers in the backward to save memory")
    micro_batch_tokens: int = Field(default=16384, ge=1, description="tokens per packed forward; changes no bit")
    save_every: int = Field(
        default=0, ge=0, description="steps between checkpoints to resume from; 0 = only when the run is stopped"
    )
    keep_last: int = Field(default=2, ge=1, description="checkpoints kept; older ones are removed")


class WarmupSettings(_Section):
    """Supervised steps before the first step (grpo, dpo)."""

    steps: int = Field(default=0, ge=0, description="supervised updates; 0 = none")
    data: str | None = Field(default=None, description="file of examples; default the built-in task's")
    examples: int = Field(default=4096, ge=1, description="examples, or pairs, drawn from the built-in task")
    batch_size: int = Field(default=64, ge=1, description="examples per update")
    lr: float = Field(default=1e-3, gt=0, description="peak learning rate, cosine to zero")


class EvalSettings(_Section):
    """Evaluation on held-out rows: before, every `every` steps, at the end."""

    every: int = Field(default=20, ge=0, description="steps between evaluations; 0 = only before and at the end")
    rows: int = Field(default=128, ge=1, description="held-out rows used, at most")
    temperature: float = Field(default=0.0, ge=0, description="0 = greedy")
    samples: int = Field(default=1, ge=1, description="completions per row, for pass@k (grpo)")
    pass_at: list[Annotated[int, Field(ge=1)]] = Field(
        default_factory=list, description="values of k in pass@k, at most eval.samples"
    )
    solved_at: float = Field(default=1.0, description="reward from which a completion counts as solved in pass@k")

    @field_validator("temperature")
    @classmethod
    def _can_divide(cls, value: float) -> float:
        if 0 < value < 1e-5:
            raise ValueError("must be 0 (greedy) or at least 1e-05")
        return value


class Settings(_Section):
    """Everything that a run depends on; see docs/guides/training.md."""

    algorithm: Literal["grpo", "ppo", "sft", "dpo", "reward"] = Field(default="grpo", description="set by the command")
    method: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo", "rloo", "reinforce++"] | None = Field(
        default=None, description="published method (grpo): its settings are the defaults of the run"
    )
    run: RunSettings = Field(default_factory=RunSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    data: DataSettings = Field(default_factory=DataSettings)
    rewards: list[RewardSettings] = Field(default_factory=list, description="default: the built-in task's reward")
    reward_pool: RewardPoolSettings = Field(default_factory=RewardPoolSettings)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    advantages: AdvantageSettings = Field(default_factory=AdvantageSettings)
    loss: LossSettings = Field(default_factory=LossSettings)
    dpo: DPOSettings = Field(default_factory=DPOSettings)
    reward_model: RewardModelSettings = Field(default_factory=RewardModelSettings)
    kl: KLSettings = Field(default_factory=KLSettings)
    ppo: PPOSettings = Field(default_factory=PPOSettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    value: ValueSettings = Field(default_factory=ValueSettings)
    train: TrainSettings = Field(default_factory=TrainSettings)
    warmup: WarmupSettings = Field(default_factory=WarmupSettings)
    eval: EvalSettings = Field(default_factory=EvalSettings)

    @field_validator("rewards", mode="before")
    @classmethod
    def _names_are_rewards(cls, value: Any) -> Any:
        if isinstance(value, list):
            return [{"function": item} if isinstance(item, str) else item for item in value]
        return value

    @property
    def has_rollouts(self) -> bool:
        """Whether the algorithm samples completions and rewards them."""
        return self.algorithm in ("grpo", "ppo")

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        completions = self.rollout.prompts * self.rollout.group_size
        problem = ""
        alone = self.algorithm == "grpo" and self.rollout.group_size == 1
        if alone and self.advantages.mode not in ("none", "returns"):
            problem = (
                f"rollout.group_size=1 with advantages.mode={self.advantages.mode} makes every advantage zero; "
                "use a group of 2 or more, or advantages.mode=none"
            )
        elif self.method is not None and self.algorithm != "grpo":
            problem = f"method={self.method} is one of `rlkernel train grpo`; leave it out of train {self.algorithm}"
        elif self.kl.controller == "adaptive" and self.kl.coef == 0:
            problem = "kl.controller=adaptive multiplies kl.coef, which is 0; set the first coefficient, such as 0.2"
        elif self.run.attention != "split" and self.run.backend == "torch":
            problem = "run.attention=fa3 needs run.backend=rlkernel; stock torch has no attention variants"
        elif self.train.minibatches > completions:
            problem = f"train.minibatches={self.train.minibatches} exceeds the {completions} completions of a step"
        elif self.loss.tis_cap is not None and self.loss.old_policy != "scored":
            problem = "loss.tis_cap corrects the training forward's log-probabilities; set loss.old_policy=scored"
        elif self.loss.clip_dual is not None and self.loss.type in ("cispo", "reinforce"):
            problem = f"loss.type={self.loss.type} has no dual clip; leave loss.clip_dual out"
        elif self.loss.clip_dual is not None and self.loss.clip_dual <= 1 + clip_range(self.loss.clip_high):
            problem = f"loss.clip_dual={self.loss.clip_dual} must exceed 1 + loss.clip_high"
        elif self.data.task is not None and self.data.train is not None:
            problem = "data.task and data.train exclude each other; give one of them"
        elif self.data.train is None and self.data.task is None:
            problem = "no data: set data.train (--data FILE) or data.task"
        elif self.data.task is None and self.model.path is None:
            problem = "model.path is missing (--model DIR); only a built-in task brings a model of its own"
        elif self.has_rollouts and self.data.task is None and not self.rewards:
            problem = (
                "no reward: use --reward FILE.py:function or --reward-model DIR; only a built-in task brings a reward "
                "of its own"
            )
        elif self.model.path is not None and self.model.config:
            problem = "model.config changes the built-in task's model; it has no effect on a model.path"
        elif self.optimizer.states == "int8" and self.optimizer.offload:
            problem = "8-bit states stay on the GPU; use optimizer.offload=true with optimizer.states=fp32"
        elif self.model.lora.rank and self.model.path is None:
            problem = "model.lora.rank needs a trained model to adapt; set model.path (--model DIR)"
        elif self.model.lora.rank and self.algorithm == "reward":
            problem = "a reward model has no adapters; leave model.lora.rank out"
        elif self.model.lora.rank and self.algorithm in ("grpo", "ppo") and self.warmup.steps:
            problem = "warmup.steps would train the adapters before the first policy; set warmup.steps=0 with LoRA"
        elif self.eval.samples > 1 and self.eval.temperature == 0:
            problem = (
                f"eval.samples={self.eval.samples} with eval.temperature=0 gives the same completion "
                f"{self.eval.samples} times; set eval.temperature, for example to 1.0"
            )
        elif max(self.eval.pass_at, default=0) > self.eval.samples:
            problem = f"eval.pass_at={self.eval.pass_at} needs eval.samples={max(self.eval.pass_at)} or more"
        elif self.warmup.steps and self.warmup.data is None and self.data.task is None:
            problem = "warmup.steps needs warmup.data (a file of examples)"
        if problem:
            raise ValueError(problem)
        return self


def _section(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def dotted_keys(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, description) of every setting, in order; `rewards` is one key."""
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if section is not None:
            yield from dotted_keys(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.description or ""


def nearest(key: str) -> str | None:
    """The existing dotted key most like `key`: by its whole path, else by its last part."""
    keys = [name for name, _ in dotted_keys()]
    by_last = {name.rsplit(".", 1)[-1]: name for name in reversed(keys)}
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
    close_last = difflib.get_close_matches(key.rsplit(".", 1)[-1], list(by_last), n=1, cutoff=0.7)
    return close[0] if close else by_last[close_last[0]] if close_last else None


def flatten(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Dotted keys of nested (or already dotted) settings, such as `{"optimizer.lr": 1e-5}`.

    Raises:
        InputError: an unknown key, with the nearest existing one; the message begins with `source`.
    """
    flat = dict(leaves(values))
    known = [name for name, _ in dotted_keys()]
    for key in flat:
        if not any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in known):
            raise InputError(f"{source}: {_unknown(key, nearest(key))}")
    return flat


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested mappings."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _unknown(key: str, guess: str | None) -> str:
    hint = f"did you mean {guess}?" if guess else "`rlkernel train grpo --dry-run` prints every setting"
    return f"unknown setting {key!r}; {hint}"


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `flatten`."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, last = key.split(".")
        place = nested
        for i, name in enumerate(sections, 1):
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise InputError(f"setting {'.'.join(sections[:i])} is a value; {key!r} cannot be set inside it")
        place[last] = value
    return nested


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Dotted settings of words `a.b=value`, whose values are YAML (`[1, 2]`, `null`, `true`, `1e-3`).

    Raises:
        InputError: a word without `=`, an unknown key, or a value that is not YAML.
    """
    flat: dict[str, Any] = {}
    for word in words:
        key, separator, text = word.partition("=")
        if not separator or not key:
            raise InputError(f"override {word!r}: expected key=value with a dotted key, such as optimizer.lr=1e-5")
        if not text.strip():
            raise InputError(f"override {word!r}: the value is empty; write null for none")
        try:
            value = yaml.safe_load(text)  # YAML reads 1e-3 as text, which pydantic converts
        except _NOT_YAML as error:
            raise InputError(f"override {word!r}: the value is not YAML ({' '.join(str(error).split())})") from None
        flat |= flatten({key: value}, f"override {word!r}")
    return flat


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Dotted settings of a YAML config file.

    Raises:
        InputError: the file is unreadable, not YAML or not a mapping, or has an unknown key.
    """
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"config: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    except _NOT_YAML as error:
        raise InputError(f"config: {path} is not YAML: {' '.join(str(error).split())}") from None
    if loaded is not None and not isinstance(loaded, dict):
        raise InputError(f"config: {path} must hold a mapping of settings, got {type(loaded).__name__}")
    return flatten(loaded or {}, f"config {path}")


def _describe(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":  # in an entry of `rewards`: `flatten` has checked the other keys
            entry, _, name = key.rpartition(".")
            close = difflib.get_close_matches(name, list(RewardSettings.model_fields), n=1)
            lines.append(_unknown(key, f"{entry}.{close[0]}" if close else None))
        elif key:
            lines.append(f"setting {key}: {message[0].lower()}{message[1:]}, got {problem['input']!r}")
        else:
            lines.append(message)
    return "; ".join(lines)


def resolve(
    algorithm: str,
    *,
    file: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> Settings:
    """Settings of a run.

    Args:
        algorithm: "grpo", "ppo", "sft", "dpo" or "reward".
        file: YAML config file.
        options: dotted keys from command-line options; None values are left out.
        overrides: words `a.b=value`.

    Raises:
        InputError: names the setting, what was expected and what to do.
    """
    flat = {} if file is None else load_yaml(file)
    flat |= flatten({key: value for key, value in (options or {}).items() if value is not None}, "options")
    flat |= parse_overrides(overrides)
    if flat.setdefault("algorithm", algorithm) != algorithm:
        wanted = flat["algorithm"]
        raise InputError(
            f"config: algorithm is {wanted!r}, the command trains {algorithm!r}; use `rlkernel train {wanted}`"
        )
    given = [flat.get(key) for key in ("data.task", "data.train", "model.path")]
    if given == [None] * 3 and not flat.get("rewards"):
        # Without any data the built-in task runs; a model or a reward alone means that the data were forgotten.
        flat["data.task"] = "arithmetic"
    task = {} if flat.get("data.task") is None else _task_defaults(str(flat["data.task"]), algorithm)
    flat = {**DEFAULTS.get(algorithm, {}), **task, **METHODS.get(flat.get("method"), {}), **flat}
    try:
        return Settings.model_validate(_nest(flat))
    except ValidationError as error:
        raise InputError(_describe(error)) from None


def _task_defaults(name: str, algorithm: str) -> dict[str, Any]:
    from rlkernel.data.tasks import load_task

    try:
        defaults = load_task(name).defaults(algorithm)
    except ValueError as error:
        raise InputError(f"setting data.task: {error}") from None
    if algorithm == "sft":
        # Supervised training of a built-in task uses its warm-up's settings, because the others are for rollouts.
        renamed = {
            "warmup.lr": "optimizer.lr",
            "warmup.steps": "train.steps",
            "warmup.batch_size": "train.batch_size",
            "warmup.examples": "warmup.examples",
        }
        return {renamed[key]: value for key, value in defaults.items() if key in renamed}
    return defaults


def located(settings: Settings) -> Settings:
    """The settings with absolute paths, so that they mean the same files from any working directory.

    Rewards given as a module stay as they are, and so does a `model.path` that does not exist here, because it may be a
    hub name.
    """
    settings = settings.model_copy(deep=True)
    for model in (settings.model, settings.value):
        if model.path is not None and Path(model.path).exists():
            model.path = str(Path(model.path).absolute())
    for section, name in ((settings.data, "train"), (settings.data, "heldout"), (settings.warmup, "data")):
        value = getattr(section, name)
        if value is not None:
            setattr(section, name, str(Path(value).absolute()))
    if settings.run.output is not None:
        settings.run.output = str(Path(settings.run.output).absolute())
    for reward in settings.rewards:
        if reward.model is not None and Path(reward.model).exists():
            reward.model = str(Path(reward.model).absolute())
        file, _, function = (reward.function or "").rpartition(":")
        if file.endswith(".py"):
            reward.function = f"{Path(file).absolute()}:{function}"
    return settings


def to_yaml(settings: Settings) -> str:
    """The resolved settings as YAML that `--config` reads back."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
