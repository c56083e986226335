"""The sections of the settings, each with the limits of its own values."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Section(BaseModel):
    """A group of settings; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _is_float32(cls, value: Any) -> Any:
        if isinstance(value, float) and value and not 1.4e-45 <= abs(value) <= 3.4e38:
            raise ValueError("must be 0 or have a size between 1.4e-45 and 3.4e38, because it is used in float32")
        return value


class RunSettings(Section):
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
    rank_timeout_s: float = Field(
        default=1800.0, gt=0, description="several ranks: seconds that one waits for the others, at most"
    )


class LoraSettings(Section):
    """Low-rank adapters in place of full fine-tuning (docs/guides/lora.md)."""

    rank: int = Field(default=0, ge=0, description="rank of the adapters; 0 = full fine-tuning")
    alpha: float = Field(default=32.0, gt=0, description="updates are scaled by alpha / rank")
    targets: list[Target] = Field(
        default_factory=lambda: list(get_args(Target)), min_length=1, description="linears with an adapter"
    )


class ModelSettings(Section):
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


class DataSettings(Section):
    """Prompts."""

    task: str | None = Field(
        default=None, description="built-in task; default arithmetic if neither data, model nor reward is given"
    )
    train: str | None = Field(
        default=None, description="file of prompts (grpo, ppo), examples (sft) or preferences (dpo, reward)"
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


class RewardSettings(Section):
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

    @property
    def label(self) -> str:
        """The name in the metrics."""
        return self.name or ("reward_model" if self.function is None else self.function.rpartition(":")[2])


class RewardPoolSettings(Section):
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


class RolloutSettings(Section):
    """Sampling of completions."""

    prompts: int = Field(default=16, ge=1, description="prompts per step")
    group_size: int = Field(default=8, ge=1, description="completions per prompt")
    max_tokens: int = Field(default=256, ge=1, description="tokens per completion, at most, with observations")
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
    environment: str | None = Field(
        default=None, description="FILE.py:function or package.module:function that answers each turn (multi_turn.md)"
    )
    max_turns: int = Field(default=8, ge=1, description="turns of the assistant per completion, at most (environment)")
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


class EngineSettings(Section):
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


class LossSettings(Section):
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


class AdvantageSettings(Section):
    """From rewards to advantages in grpo (`ops.group_advantages`)."""

    mode: Literal["group", "leave_one_out", "batch", "none", "returns"] = Field(
        default="group",
        description="baseline; returns: rewards from each token on, whitened over the batch (REINFORCE++)",
    )
    normalize_std: bool = Field(
        default=True, description="divide by the standard deviation (not for leave_one_out, none)"
    )
    eps: float = Field(default=1e-4, gt=0, description="added to that deviation")


class DPOSettings(Section):
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


class RewardModelSettings(Section):
    """Training of a reward model."""

    center_rewards_coefficient: float | None = Field(
        default=None, gt=0, description="weight of (chosen + rejected)^2, which centers rewards at 0; null = off"
    )


class KLSettings(Section):
    """The KL to the frozen first policy inside the reward (ppo, rloo, reinforce++)."""

    coef: float = Field(default=0.0, ge=0, description="weight of logp - ref_logp of each token; grpo: of their sum")
    controller: Literal["fixed", "adaptive"] = Field(default="fixed", description="adaptive: moves coef towards target")
    target: float = Field(default=6.0, gt=0, description="wanted KL, in nats per completion (adaptive)")
    horizon: float = Field(default=10000.0, gt=0, description="completions over which coef adapts (adaptive)")


class ConstraintSettings(Section):
    """A limit on the mean of a cost, held by a Lagrange multiplier (grpo)."""

    cost: str | None = Field(default=None, description="name of the reward, of weight 0, whose mean is limited")
    limit: float = Field(default=0.0, description="largest mean of the cost")
    multiplier_lr: float = Field(
        default=0.05, gt=0, description="step of the multiplier per unit of mean cost above the limit"
    )
    multiplier: float = Field(default=0.0, ge=0, description="its first value")


class PPOSettings(Section):
    """Advantages of PPO (`ops.gae`)."""

    gamma: float = Field(default=1.0, ge=0, le=1, description="discount")
    lam: float = Field(default=0.95, ge=0, le=1, description="lambda of generalized advantage estimation")
    whiten_rewards: bool = Field(default=False, description="whiten scores with the running moments of the run")
    whiten_advantages: bool = Field(default=True, description="whiten advantages over the tokens of a step")


class ValueSettings(Section):
    """The value model of PPO."""

    path: str | None = Field(
        default=None,
        description="Hugging Face directory with a scalar head, such as a reward model; default: the policy",
    )
    lr: float = Field(default=1e-5, gt=0, description="peak learning rate; the rest as under optimizer")
    clip: float | None = Field(
        default=0.2, gt=0, description="values stay this close to the old ones in the loss; null = off"
    )


class OptimizerSettings(Section):
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


class TrainSettings(Section):
    """Length of the run and shape of its updates."""

    steps: int = Field(default=100, ge=1, description="rollouts (grpo, ppo) or updates")
    minibatches: int = Field(default=1, ge=1, description="optimizer updates per pass over a rollout")
    epochs: int = Field(default=1, ge=1, description="passes over a rollout")
    batch_size: int = Field(default=16, ge=1, description="examples or pairs per update (sft, dpo, reward)")
    leaves: Literal[1, 2, 4, 8, 16, 32, 64] = Field(
        default=1, description="parts of an update that ranks share, see several_gpus.md; changes the bits; torchrun: 8"
    )
    shard: Literal["states", "gradients", "weights"] = Field(
        default="states",
        description="what ranks keep only their part of: optimizer states, also gradients, also weights",
    )
    gradient_checkpointing: bool = Field(default=False, description="recompute layers in the backward to save memory")
    micro_batch_tokens: int = Field(default=16384, ge=1, description="tokens per packed forward")
    save_every: int = Field(
        default=0, ge=0, description="steps between checkpoints to resume from; 0 = only when the run is stopped"
    )
    keep_last: int = Field(default=2, ge=1, description="checkpoints kept; older ones are removed")


class WarmupSettings(Section):
    """Supervised steps before the first step (grpo, ppo, dpo)."""

    steps: int = Field(default=0, ge=0, description="supervised updates; 0 = none")
    data: str | None = Field(default=None, description="file of examples; default the built-in task's")
    examples: int = Field(default=4096, ge=1, description="examples, or pairs, drawn from the built-in task")
    batch_size: int = Field(default=64, ge=1, description="examples per update")
    lr: float = Field(default=1e-3, gt=0, description="peak learning rate, cosine to zero")


class EvalSettings(Section):
    """Evaluation on held-out rows: before, every `every` steps, at the end."""

    every: int = Field(default=20, ge=0, description="steps between evaluations; 0 = only before and at the end")
    rows: int = Field(default=128, ge=1, description="held-out rows used, at most")
    temperature: float = Field(default=0.0, ge=0, description="0 = greedy")
    samples: int = Field(default=1, ge=1, description="completions per row, for pass@k")
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
