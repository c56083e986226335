"""A tiny run for the trainer's tests: a few thousand parameters, a made-up task, everything in a temporary folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlkernel import ops
from rlkernel.contract import contract_id
from rlkernel.training.config import Settings, resolve
from rlkernel.training.grpo import GRPOTrainer
from rlkernel.training.parts import Parts, assemble, read_inputs
from rlkernel.training.policy_trainer import PolicyTrainer
from rlkernel.training.ppo import PPOTrainer
from rlkernel.training.run_folder import RunFolder

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
QUICK = [
    "data.task=arithmetic",
    "engine.page_size=4",
    "optimizer.lr=0.01",
    "optimizer.schedule=constant",
    "train.steps=2",
    "warmup.steps=0",
    "eval.rows=4",
    "run.device=cpu",
]
ROLLOUTS = [
    "rewards=[training.tiny:digits]",
    "reward_pool.in_process=true",  # a worker would import torch for it
    "rollout.prompts=3",
    "rollout.group_size=4",
    "rollout.max_tokens=12",
]


def settings_of(folder: Path, *overrides: str, algorithm: str = "grpo", **config: Any) -> Settings:
    """Settings of a tiny run in `folder`; `config` changes keys of the model's config.json."""
    options = {"run.output": str(folder / "run"), "model.config": {**TINY, **config}}
    words = [*QUICK, *(ROLLOUTS if algorithm in ("grpo", "ppo") else []), *overrides]
    return resolve(algorithm, options=options, overrides=words)


def digits(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs between completions of an untrained model: the share of digits above 4."""
    return [sum(c in "56789" for c in text) / 12 for text in completions]


def echo(messages: list[dict[str, Any]], **_: Any) -> str | None:
    """An environment that answers the first turn with its last character."""
    return messages[-1]["content"][-1:] or "=" if len(messages) < 3 else None


def parts_of(settings: Settings, folder: Path) -> Parts:
    """The parts of a run; the built-in task's reward is replaced where the settings name one."""
    return assemble(settings, read_inputs(settings), settings.run.device, folder)


def trainer_of(settings: Settings, folder: Path) -> tuple[PolicyTrainer, RunFolder]:
    """A trainer and its open run."""
    run = RunFolder(settings, contract_id())
    with ops.stock(settings.run.backend == "torch"):
        trainer_class = {"grpo": GRPOTrainer, "ppo": PPOTrainer}[settings.algorithm]
        return trainer_class(parts_of(settings, folder), run), run


def weights(trainer: PolicyTrainer) -> dict[str, Any]:
    """A copy of the model's weights."""
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}
