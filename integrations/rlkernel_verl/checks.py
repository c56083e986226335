"""Settings of verl under which rollout and trainer cannot be equal, by name, each with its reason and the remedy."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from rlkernel_transformers.comparison import ExactnessLostError

logger = logging.getLogger("rlkernel_verl")

_select = OmegaConf.select  # None for a key that a recipe's configuration does not have
Finding = tuple[str, str]  # a setting with its value, and why it cannot be exact


def report_inexact(strict: bool, found: list[Finding]) -> None:
    """Raises ExactnessLostError that lists the findings in strict mode, else logs them."""
    if not found:
        return
    lines = "\n".join(f"- {setting}: {reason}" for setting, reason in found)
    text = f"use_rl_kernel_backend: rollout and training log-probabilities cannot be equal with\n{lines}"
    if strict:
        raise ExactnessLostError(f"{text}\nrl_kernel_strict=False logs this and continues.")
    logger.warning("%s", text)


def check_run(config: Any) -> None:
    """Checks the configuration of a run, before Ray starts.

    Raises:
        ExactnessLostError: a setting loses exactness, in strict mode.
    """
    parts = config.actor_rollout_ref
    report_inexact(parts.model.get("rl_kernel_strict", True), list(_of_run(config)))


def _of_run(config: Any) -> Iterator[Finding]:
    parts = config.actor_rollout_ref
    strategy = parts.actor.strategy
    if strategy != "fsdp2":
        yield f"actor_rollout_ref.actor.strategy={strategy}", _STRATEGY
    if parts.rollout.name != "vllm":
        yield f"actor_rollout_ref.rollout.name={parts.rollout.name}", _ROLLOUT
    size = parts.actor.get("ulysses_sequence_parallel_size", 1)
    if size > 1:
        yield f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={size}", _ULYSSES
    if _select(config, "critic.model.use_rl_kernel_backend") and config.critic.strategy != "fsdp2":
        yield f"critic.strategy={config.critic.strategy}", _STRATEGY
    mode = _select(config, "trainer.v1.trainer_mode")
    if not _select(config, "trainer.use_v1"):
        yield "trainer.use_v1=False", "its batches do not carry the rollout's log-probabilities to the engine; use True"
    elif mode != "sync":
        yield (
            f"trainer.v1.trainer_mode={mode}",
            "samples may come from older weights than the trainer's; use sync",
        )
    if _select(config, "distillation.enabled"):
        yield "distillation.enabled=True", "its top-k losses run on stock operators; use False"
    yield from of_policy(parts.model)
    yield from of_rollout(parts.rollout)


_STRATEGY = "the trainer is exact over FSDP2 only, not over Megatron, FSDP1 or other engines; use fsdp2"
_ULYSSES = "a sequence's tokens, and so its gradients, are split over ranks; use 1"
_ROLLOUT = "the rollout is exact in vLLM only, which has rlkernel's plugin; use vllm"


def of_model(model: Any) -> Iterator[Finding]:
    """Findings in the model's configuration."""
    if model.use_fused_kernels:
        yield (
            "model.use_fused_kernels=True",
            "its kernels compute log-probabilities with a head of their own; use False",
        )
    if model.get("use_liger", False):
        yield "model.use_liger=True", "Liger's kernels replace the layers that rlkernel replaces; use False"
    if (model.get("tiled_mlp") or {}).get("enabled", False):
        yield "model.tiled_mlp.enabled=True", "it replaces the MLP that rlkernel replaces; use False"
    if (model.get("mtp") or {}).get("enable", False):
        yield "model.mtp.enable=True", "there are no layers for multi-token prediction in a supported model; use False"


def of_policy(model: Any) -> Iterator[Finding]:
    """Findings in the configuration of a model that is rolled out."""
    yield from of_model(model)
    if _has_adapter(model) and not (model.get("lora") or {}).get("merge", False):
        yield "model.lora.merge=False", "vLLM's adapter kernels are not batch-invariant; use True"


def of_critic(model: Any) -> Iterator[Finding]:
    """Findings in the configuration of a critic's model."""
    yield from of_model(model)
    if _has_adapter(model):
        yield f"critic.model.lora_rank={model.lora_rank}", "a critic's adapter runs on stock operators; use 0"


def _has_adapter(model: Any) -> bool:
    rank = (model.get("lora") or {}).get("rank", 0) or model.get("lora_rank", 0)
    return bool(rank > 0 or model.get("lora_adapter_path"))


def of_rollout(rollout: Any) -> Iterator[Finding]:
    """Findings in the rollout's configuration; vLLM's plugin checks the rest of the engine's."""
    if not rollout.calculate_log_probs:
        yield "rollout.calculate_log_probs=False", "there is nothing to compare the trainer with; use True"
    if rollout.logprobs_mode != "processed_logprobs":
        yield (
            f"rollout.logprobs_mode={rollout.logprobs_mode}",
            "the trainer's include the temperature; use processed_logprobs",
        )
    for name, off in (("top_p", 1), ("top_k", -1), ("repetition_penalty", 1)):
        value = rollout.get(name, off)
        if value != off:
            yield f"rollout.{name}={value}", f"verl's trainer scores without it; use {off}"
    if rollout.temperature <= 0:
        yield f"rollout.temperature={rollout.temperature}", "the trainer divides logits by it; use a positive value"
    backend = rollout.checkpoint_engine.backend
    if backend != "naive":
        yield (
            f"rollout.checkpoint_engine.backend={backend}",
            "weights arrive in vLLM without the trainer's fingerprints; use naive",
        )
    if (rollout.get("disaggregation") or {}).get("enabled", False):
        yield "rollout.disaggregation.enabled=True", "prefill and decode in different engines are not tested; use False"


def of_engine(engine: Any) -> Iterator[Finding]:
    """Findings in the configuration of an FSDP engine."""
    size = engine.ulysses_sequence_parallel_size
    if size > 1:
        yield f"ulysses_sequence_parallel_size={size}", _ULYSSES
    precision = engine.mixed_precision or {}
    if precision.get("reduce_dtype", "fp32") not in ("fp32", "float32"):
        yield (
            f"mixed_precision.reduce_dtype={precision['reduce_dtype']}",
            "gradients of leaves are added in fp32; use fp32",
        )
    if engine.get("qat") is not None and engine.qat.enable:
        yield "qat.enable=True", "a quantized model has other weights in training than in vLLM; use False"


def of_optimizer(optimizer: Any) -> Iterator[Finding]:
    """Findings in the configuration of an FSDP engine's optimizer."""
    name = f"{optimizer.optimizer_impl}.{optimizer.optimizer}"
    if name != "torch.optim.AdamW":
        yield f"optim.optimizer={name}", "updates are equal on any number of ranks with torch.optim.AdamW only"
    unknown = sorted(set(optimizer.override_optimizer_config or {}) - {"eps"})
    if unknown:
        yield f"optim.override_optimizer_config={', '.join(unknown)}", "only eps can be set"
