"""Certifies the schedules of an engine on a GPU before vLLM records its decode steps: a recording cannot certify one.

Prefill of long prompts is certified here too, because otherwise a request would wait for it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from rlkernel import ops
from rlkernel.models.config import ConfigError
from rlkernel.ops.warmup import warm_up_linear, warm_up_prefill
from rlkernel_vllm import settings
from rlkernel_vllm.config import model_config
from rlkernel_vllm.convert import ExactRowParallelLinear

HEAD_ROWS = 1024  # vLLM scores prompts in chunks of this many tokens


def certify(model: nn.Module, vllm_config: Any) -> None:
    """Certifies `ops.linear` for each weight shape of the model and each row count of a step, and long prefills.

    Raises:
        VariantError: the requested attention variant does not run here.
    """
    weight = next(model.parameters())
    if weight.device.type != "cuda":
        return
    scheduler = vllm_config.scheduler_config
    rows = scheduler.max_num_batched_tokens
    _certify_attention(weight, vllm_config)
    seen = set()
    for module in model.modules():
        if _method_of(module) != "ExactLinearMethod" or getattr(module, "weight", None) is None:
            continue
        layer: Any = module
        bias, chunks, out_dtype = layer.bias, getattr(layer, "rlkernel_chunks", 1), None
        if isinstance(module, ExactRowParallelLinear):  # its sum over ranks adds the bias and rounds
            bias, out_dtype = None, torch.float32
        key = (layer.weight.shape, layer.weight.dtype, bias is not None, chunks, out_dtype)
        if key not in seen:
            seen.add(key)
            warm_up_linear(layer.weight, bias, rows=rows, chunks=chunks, out_dtype=out_dtype)
            if isinstance(module, ExactRowParallelLinear):  # makes symmetric memory, which a capture cannot
                for m in (1, rows):
                    layer(layer.weight.new_zeros(m, layer.weight.shape[1]))
    processor: Any = getattr(model, "logits_processor", None)
    head: Any = getattr(model, "lm_head", None)
    if _method_of(head) == "ExactEmbeddingMethod":
        weight = head.weight[: processor.org_vocab_size] if head.tp_size == 1 else head.weight
        warm_up_linear(weight, rows=min(rows, scheduler.max_num_seqs, HEAD_ROWS), out_dtype=torch.float32)
    torch.cuda.empty_cache()


def _method_of(module: Any) -> str:
    return type(getattr(module, "quant_method", None)).__name__


def _certify_attention(weight: torch.Tensor, vllm_config: Any) -> None:
    variant = settings.read(vllm_config).attention
    with contextlib.suppress(ConfigError) if variant == "split" else contextlib.nullcontext():
        config = model_config(vllm_config.model_config)  # audit mode admits architectures that rlkernel does not know
        ranks = vllm_config.parallel_config.tensor_parallel_size
        heads = {
            "heads": config.num_heads // ranks,
            "kv_heads": max(1, config.num_kv_heads // ranks),
            "head_dim": config.head_dim,
        }
        if variant != "split":
            ops.check_attention_variant(
                variant,
                weight.device,
                weight.dtype,
                **heads,
                page_size=vllm_config.cache_config.block_size,
                halves=True,
                window=next((w for w in config.windows if w is not None), None),
            )
        elif None in config.windows:
            tokens = vllm_config.scheduler_config.max_num_batched_tokens
            longest = vllm_config.model_config.max_model_len
            warm_up_prefill(weight.device, weight.dtype, **heads, tokens=tokens, longest=longest)
