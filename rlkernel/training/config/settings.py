"""All settings of a run, and the checks that span sections."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import attrgetter
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlkernel.training.config.sections import (
    AdvantageSettings,
    ConstraintSettings,
    DataSettings,
    DPOSettings,
    EngineSettings,
    EvalSettings,
    KLSettings,
    LossSettings,
    ModelSettings,
    OptimizerSettings,
    PPOSettings,
    RewardModelSettings,
    RewardPoolSettings,
    RewardSettings,
    RolloutSettings,
    RunSettings,
    Section,
    TrainSettings,
    ValueSettings,
    WarmupSettings,
    clip_range,
)

PREFERENCES = ("dpo", "reward")
"""Algorithms that train on preferences."""
ROLLOUTS = ("grpo", "ppo")
"""Algorithms that sample completions and reward them."""
READERS: dict[str, tuple[str, ...]] = {
    "method": ("grpo",),
    **dict.fromkeys(("rewards", "reward_pool", "rollout", "loss", "kl", "run.strict", "run.probe_rollouts"), ROLLOUTS),
    **dict.fromkeys(("train.minibatches", "train.epochs"), ROLLOUTS),
    **dict.fromkeys(("eval.temperature", "eval.samples", "eval.pass_at", "eval.solved_at"), ROLLOUTS),
    **dict.fromkeys(("warmup.steps", "warmup.data", "warmup.batch_size", "warmup.lr"), (*ROLLOUTS, "dpo")),
    "train.batch_size": ("sft", *PREFERENCES),
    "advantages": ("grpo",),
    "constraint": ("grpo",),
    "ppo": ("ppo",),
    "value": ("ppo",),
    "dpo": ("dpo",),
    "reward_model": ("reward",),
}
"""Sections and settings that only some algorithms read; elsewhere they must keep their defaults."""
SWITCHES: dict[str, tuple[str, Any]] = {
    "kl.target": ("kl.controller", "fixed"),
    "kl.horizon": ("kl.controller", "fixed"),
    **dict.fromkeys(
        ("constraint.limit", "constraint.multiplier_lr", "constraint.multiplier"), ("constraint.cost", None)
    ),
    "model.lora.alpha": ("model.lora.rank", 0),
    "model.lora.targets": ("model.lora.rank", 0),
    "rollout.max_turns": ("rollout.environment", None),
    "rollout.overlong_penalty": ("rollout.overlong_buffer", 0),
}
"""Settings that are not read if another one has this value."""


class Settings(Section):
    """Everything that a run depends on; see docs/guides/training.md."""

    algorithm: Literal["grpo", "ppo", "sft", "dpo", "reward"] = Field(default="grpo", description="set by the command")
    method: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo", "rloo", "reinforce++"] | None = Field(
        default=None, description="published method of grpo, whose settings become the defaults of the run"
    )
    run: RunSettings = Field(default_factory=RunSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    data: DataSettings = Field(default_factory=DataSettings)
    rewards: list[RewardSettings] = Field(default_factory=list, description="default: the built-in task's reward")
    reward_pool: RewardPoolSettings = Field(default_factory=RewardPoolSettings)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    advantages: AdvantageSettings = Field(default_factory=AdvantageSettings)
    constraint: ConstraintSettings = Field(default_factory=ConstraintSettings)
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
        return self.algorithm in ROLLOUTS

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        checks = (
            self._data_problems,
            self._policy_problems,
            self._training_problems,
            self._ranks_problems,
            self._unread,
        )
        for problem in chain.from_iterable(check() for check in checks):
            raise ValueError(problem)
        return self

    def _data_problems(self) -> Iterator[str]:
        data = self.data
        if data.task is not None and data.train is not None:
            yield "data.task and data.train exclude each other; give one of them"
        if data.train is None and data.task is None:
            yield "no data: set data.train (--data FILE) or data.task"
        if data.task is None and self.model.path is None:
            yield "model.path is missing (--model DIR); only a built-in task brings a model of its own"
        if self.has_rollouts and data.task is None and not self.rewards:
            yield (
                "no reward: use --reward FILE.py:function or --reward-model DIR; only a built-in task brings a reward "
                "of its own"
            )
        is_called = self.rollout.environment is not None or any(reward.function for reward in self.rewards)
        if not is_called and self.reward_pool != RewardPoolSettings():
            yield "reward_pool has no effect without a function in rewards or a rollout.environment; leave it out"
        if data.task is not None and (data.heldout is not None or data.heldout_rows is not None):
            yield "data.heldout and data.heldout_rows belong to data.train; a built-in task has its own held-out rows"
        if data.heldout is not None and data.heldout_rows is not None:
            yield "data.heldout_rows are drawn from data.train if there is no data.heldout; leave one of them out"
        if self.warmup.steps and self.warmup.data is None and data.task is None:
            yield "warmup.steps needs warmup.data (a file of examples)"
        if self.model.path is not None and self.model.config:
            yield "model.config changes the built-in task's model; it has no effect on a model.path"

    def _policy_problems(self) -> Iterator[str]:
        rollout, loss, evaluation = self.rollout, self.loss, self.eval
        mode, completions = self.advantages.mode, rollout.prompts * rollout.group_size
        if self.algorithm == "grpo" and rollout.group_size == 1 and mode not in ("none", "returns"):
            yield (
                f"rollout.group_size=1 with advantages.mode={mode} makes every advantage zero; "
                "use a group of 2 or more, or advantages.mode=none"
            )
        if self.kl.controller == "adaptive" and self.kl.coef == 0:
            yield "kl.controller=adaptive multiplies kl.coef, which is 0; set the first coefficient, such as 0.2"
        cost, weights = self.constraint.cost, {reward.label: reward.weight for reward in self.rewards}
        if cost is not None and weights.get(cost) != 0:
            found = "it is none of rewards" if cost not in weights else f"its weight is {weights[cost]}"
            yield f"constraint.cost={cost}: {found}; give the reward of that name weight 0, so that it is a cost alone"
        if cost is not None and mode == "returns":
            yield "constraint.cost belongs to one advantage per completion; advantages.mode=returns has one per token"
        if self.train.minibatches > completions:
            yield f"train.minibatches={self.train.minibatches} exceeds the {completions} completions of a step"
        if loss.tis_cap is not None and loss.old_policy != "scored":
            yield "loss.tis_cap corrects the training forward's log-probabilities; set loss.old_policy=scored"
        if loss.clip_dual is not None and loss.type in ("cispo", "reinforce"):
            yield f"loss.type={loss.type} has no dual clip; leave loss.clip_dual out"
        if loss.clip_dual is not None and loss.clip_dual <= 1 + clip_range(loss.clip_high):
            yield f"loss.clip_dual={loss.clip_dual} must exceed 1 + loss.clip_high"
        if evaluation.samples > 1 and evaluation.temperature == 0:
            yield (
                f"eval.samples={evaluation.samples} with eval.temperature=0 gives the same completion "
                f"{evaluation.samples} times; set eval.temperature, for example to 1.0"
            )
        if max(evaluation.pass_at, default=0) > evaluation.samples:
            yield f"eval.pass_at={evaluation.pass_at} needs eval.samples={max(evaluation.pass_at)} or more"

    def _training_problems(self) -> Iterator[str]:
        rank = self.model.lora.rank
        if self.run.attention != "split" and self.run.backend == "torch":
            yield "run.attention=fa3 needs run.backend=rlkernel; stock torch has no attention variants"
        if self.optimizer.states == "int8" and self.optimizer.offload:
            yield "8-bit states stay on the GPU; use optimizer.offload=true with optimizer.states=fp32"
        if rank and self.model.path is None:
            yield "model.lora.rank needs a trained model to adapt; set model.path (--model DIR)"
        if rank and self.algorithm == "reward":
            yield "a reward model has no adapters; leave model.lora.rank out"
        if rank and self.has_rollouts and self.warmup.steps:
            yield "warmup.steps would train the adapters before the first policy; set warmup.steps=0 with LoRA"

    def _ranks_problems(self) -> Iterator[str]:
        shard = self.train.shard
        if shard == "states":
            return
        if self.train.leaves == 1:
            yield f"train.shard={shard} belongs to updates with leaves; set train.leaves=8 (the default under torchrun)"
        if self.run.backend == "torch":
            yield f"train.shard={shard} needs run.backend=rlkernel; stock torch ops leave their gradients in `grad`"
        if shard == "weights" and self.model.lora.rank:
            yield "train.shard=weights shards trained weights, and adapters are small; set train.shard=states with LoRA"
        if shard == "weights" and self.engine.cuda_graphs:
            yield "engine.cuda_graphs needs weights that stay in place; leave it out with train.shard=weights"

    def _unread(self) -> Iterator[str]:
        """Settings that the algorithm would ignore, or that another setting turns off."""
        defaults = type(self).model_construct()
        for key, (switch, off) in SWITCHES.items():
            if attrgetter(key)(self) != attrgetter(key)(defaults) and attrgetter(switch)(self) == off:
                shown = "null" if off is None else off
                yield f"{key} has no effect with {switch}={shown}; change {switch} or leave {key} out"
        for key, readers in READERS.items():
            value, default = attrgetter(key)(self), attrgetter(key)(defaults)
            if self.algorithm in readers or value == default:
                continue
            if isinstance(value, Section):
                key += "." + next(
                    name for name in type(value).model_fields if getattr(value, name) != getattr(default, name)
                )
            yield f"train {self.algorithm} does not read {key}; leave it out (it belongs to train {', '.join(readers)})"
