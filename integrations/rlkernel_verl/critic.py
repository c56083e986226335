"""verl's critic on rlkernel's ops: the decoder of `rlkernel_transformers`, and a value head with fp32 values."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from verl.utils.fsdp_utils import get_init_weight_context_manager
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

import rlkernel_transformers
from rlkernel import ops
from rlkernel_transformers.forwards import rounded, unsharded
from rlkernel_transformers.support import Method
from rlkernel_verl import checks
from rlkernel_verl.engine import ExactUpdate


class ExactCritic(ExactUpdate):
    """The engine of the critic: a token classifier of transformers with one output."""

    @classmethod
    def stock(cls) -> type:
        return FSDPEngineWithValueHead

    findings = staticmethod(checks.of_critic)

    def _build_module(self) -> Any:
        """verl loads the same class, with the attention kernels of a library that our forwards do not need."""
        settings = self.model_config
        config = settings.hf_config
        config.num_labels, config.classifier_dropout = 1, 0.0
        with get_init_weight_context_manager(use_meta_tensor=not config.tie_word_embeddings, mesh=self.device_mesh)():
            module = AutoModelForTokenClassification.from_pretrained(
                settings.local_path,
                dtype=PrecisionType.to_dtype(self.engine_config.model_dtype),
                config=config,
                attn_implementation="sdpa",
            )
        if settings.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return apply(module, settings.rl_kernel_tp_leaves, settings.rl_kernel_attention)

    def disable_adapter(self) -> Any:
        """Of no effect: verl asks the critic too where the actor's model without its adapter is the reference."""
        return contextlib.nullcontext()

    def outputs(self, micro_batch: TensorDict) -> dict[str, Tensor]:
        found = self.module(
            input_ids=micro_batch["input_ids"].values()[None],
            position_ids=micro_batch["position_ids"].values()[None],
            use_cache=False,
        )
        return {"values": found.logits[0, :, 0]}


def apply(model: Any, tp_leaves: int, variant: str) -> Any:
    """Replaces the forwards of a token classifier's decoder and head.

    Raises:
        UnsupportedModelError: the decoder cannot be computed exactly.
    """
    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    causal.model = model.model
    rlkernel_transformers.apply(causal, join_weights=False, tp_leaves=tp_leaves, attention_variant=variant)
    model.score.forward = Method(_value_forward, model.score)
    return model


def _value_forward(self: nn.Linear, x: Tensor) -> Tensor:  # [..., C] -> [..., 1] fp32
    out = ops.linear(x, rounded(unsharded(self.weight), x.dtype), out_dtype=torch.float32)
    return out if self.bias is None else out + unsharded(self.bias).float()
