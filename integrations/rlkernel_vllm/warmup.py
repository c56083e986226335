"""Schedules of an engine on a GPU, settled before its decode steps are recorded: under recording nothing is certified.

A shape class of `linear` covers rows up to one of `BUCKETS`; one call at the upper end of each certifies it, or finds
the verdict that an earlier process left on disk. Long prompts would meet theirs in the middle of a request.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from rlkernel import ops
from rlkernel.kernels.cuda.linear_shapes import BUCKETS, bucket
from rlkernel.models.config import ConfigError, ModelConfig
from rlkernel_vllm import settings
from rlkernel_vllm.config import model_config

HEAD_ROWS = 1024  # vLLM scores prompts in chunks of it


def settle(model: nn.Module, vllm_config: Any) -> None:
    """Calls `ops.linear` once for each weight shape of the model and each class of rows a step can have; settles the
    classes of attention that long prompts have.

    Raises:
        VariantError: the attention variant that was asked for does not run here.
    """
    place = next(model.parameters())
    if place.device.type != "cuda":
        return
    asked = settings.read(vllm_config)
    scheduler = vllm_config.scheduler_config
    most = scheduler.max_num_batched_tokens
    if asked.attention == "split":
        with contextlib.suppress(ConfigError):  # audit mode lets an architecture through that is not ours
            _long_prefill(place, model_config(vllm_config.model_config), most, vllm_config.model_config.max_model_len)
    else:
        config = model_config(vllm_config.model_config)
        ops.check_attention_variant(
            asked.attention,
            place.device,
            place.dtype,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=vllm_config.cache_config.block_size,
            halves=True,
            window=next((w for w in config.windows if w is not None), None),
        )
    rows = BUCKETS[1 : BUCKETS.index(bucket(most)) + 1]
    seen = set()
    with torch.inference_mode():
        for module in model.modules():
            method = type(getattr(module, "quant_method", None)).__name__
            weight = getattr(module, "weight", None)
            if method != "ExactLinearMethod" or weight is None:
                continue
            bias = getattr(module, "bias", None)
            key = (weight.shape, weight.dtype, bias is not None)
            if key in seen:
                continue
            seen.add(key)
            for m in rows:
                ops.linear(
                    torch.zeros(min(m, most), weight.shape[1], dtype=weight.dtype, device=weight.device), weight, bias
                )
        processor: Any = getattr(model, "logits_processor", None)
        head: Any = getattr(model, "lm_head", None)
        if type(getattr(head, "quant_method", None)).__name__ == "ExactEmbeddingMethod":
            weight = head.weight[: processor.org_vocab_size]
            for m in rows:
                if m <= bucket(min(scheduler.max_num_seqs, HEAD_ROWS)):
                    ops.linear(weight.new_zeros(m, weight.shape[1]), weight, out_dtype=torch.float32)
    torch.cuda.empty_cache()


def _long_prefill(place: torch.Tensor, config: ModelConfig, tokens: int, longest: int) -> None:
    """Certifies what attends to the longest prompts: its kernels take a while to compile."""
    from rlkernel.kernels.cuda.attention import paged_classes, prefill

    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    if None in config.windows:
        for key in paged_classes(place.get_device(), place.dtype, *heads, tokens, longest):
            prefill.verdict_of(key)
