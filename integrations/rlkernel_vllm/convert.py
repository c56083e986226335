"""Makes a model that vLLM has built compute with `rlkernel.ops`: its modules change class before weights are loaded.

vLLM's own classes do not change. Parameters keep their names, shapes and loaders, so every way of loading and updating
weights works as before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tp_group
from vllm.model_executor.layers import linear, vocab_parallel_embedding
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT, MRotaryEmbedding, RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.models.utils import extract_layer_index

from rlkernel import ops
from rlkernel.models.checkpoint import hf_layout
from rlkernel.models.config import ConfigError, ModelConfig
from rlkernel.models.rope_table import rope_table
from rlkernel.models.vision_config import MultimodalConfig, hf_names
from rlkernel.ops.all_reduce import register_group
from rlkernel.parallel.tensor import row_parallel_linear
from rlkernel.parallel.vocabulary import parallel_embedding
from rlkernel_vllm.attention import ExactAttention, split_graph_at_attend
from rlkernel_vllm.config import Finding, findings, model_config, multimodal_config, refuse
from rlkernel_vllm.fingerprint import hf_weights
from rlkernel_vllm.settings import Settings
from rlkernel_vllm.vision import ExactMRotaryEmbedding, convert_encoder

GROUP = "vllm tensor parallel"  # a name in compiled graphs, which vLLM stores on disk

# ---- modules -------------------------------------------------------------------------------------


class ExactRMSNorm(RMSNorm):
    """`ops.rms_norm`, fused with the residual addition before it."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        return ops.rms_norm(x, self.weight, self.variance_epsilon, residual)


class ExactSiluAndMul(SiluAndMul):
    """`ops.swiglu`."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.swiglu(x)


class ExactRotaryEmbedding(RotaryEmbeddingBase):
    """`ops.rope` with rlkernel's table: fp32, computed on the CPU from fp64 angles."""

    rlkernel_table: Tensor  # [P, D] fp32

    def forward(self, positions: Tensor, query: Tensor, key: Any = None) -> Any:
        heads = (-1, self.head_size)
        q, k = ops.rope(
            query.unflatten(-1, heads), key.unflatten(-1, heads), positions.flatten(), self.rlkernel_table
        )  # fmt: skip
        return q.view(query.shape), k.view(key.shape)


class ExactLinearMethod(linear.UnquantizedLinearMethod):
    """`ops.linear`. The weight stays a plain parameter, while vLLM's own method repacks and empties it on a CPU."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        return

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return ops.linear(x, layer.weight, bias, chunks=getattr(layer, "rlkernel_chunks", 1))


class ExactRowParallelLinear(linear.RowParallelLinear):
    """`row_parallel_linear` over the tensor-parallel ranks; with one rank vLLM's class calls the method above."""

    rlkernel_chunks: int  # this rank's share of tp_leaves
    rlkernel_group: str

    def forward(self, input_: Tensor) -> Any:
        later = self.bias if self.skip_bias_add else None
        bias = None if self.skip_bias_add else self.bias
        y = row_parallel_linear(input_, self.weight, bias, self.rlkernel_group, chunks=self.rlkernel_chunks)
        return (y, later) if self.return_bias else y


class ExactParallelEmbedding(vocab_parallel_embedding.VocabParallelEmbedding):
    """`parallel_embedding` over the tensor-parallel ranks."""

    rlkernel_group: str

    def forward(self, input_: Tensor) -> Tensor:
        first = self.shard_indices.org_vocab_start_index
        return parallel_embedding(input_.long(), self.weight, first, self.rlkernel_group)


class ExactEmbeddingMethod(vocab_parallel_embedding.UnquantizedEmbeddingMethod):
    """`ops.embedding` for token ids, `ops.linear` for a head."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        return

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        return ops.embedding(input_.long(), layer.weight)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return ops.linear(x, layer.weight, bias, out_dtype=torch.float32)


class ExactLogitsProcessor(LogitsProcessor):
    """Logits are the head's fp32 sums, never rounded to the model's dtype, without the vocabulary's padding.

    Every tensor-parallel rank gathers all logits, from which all ranks draw the same tokens.
    """

    def _get_logits(
        self, hidden_states: Tensor, lm_head: Any, embedding_bias: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        weight = lm_head.weight
        if lm_head.tp_size > 1:
            shard = ops.linear(hidden_states, weight, embedding_bias, out_dtype=torch.float32)
            return self._gather_logits(shard)[:, : self.org_vocab_size].contiguous()
        if weight.shape[0] != self.org_vocab_size:
            weight = weight[: self.org_vocab_size]
        bias = None if embedding_bias is None else embedding_bias[: self.org_vocab_size]
        return ops.linear(hidden_states, weight, bias, out_dtype=torch.float32)


class ExactQKNorm(nn.Module):
    """Mixin of an attention layer with query and key norms: computes `attend` between its projections."""

    def forward(self: Any, positions: Tensor, hidden_states: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        out = torch.empty((qkv.shape[0], self.q_size), dtype=qkv.dtype, device=qkv.device)
        torch.ops.rlkernel_vllm.attend(qkv, out, positions.flatten(), self.attn.layer_name)
        out, _ = self.o_proj(out)
        return out


# ---- conversion ----------------------------------------------------------------------------------


@dataclass
class Conversion:
    """Result of `convert`: module name -> what computes it now, and what cannot be exact."""

    modules: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


@contextlib.contextmanager
def own_rope_cache() -> Iterator[None]:
    """Empties vLLM's cache of rotary embeddings for the block, so that no other model shares a converted one."""
    shared = dict(_ROPE_DICT)
    _ROPE_DICT.clear()
    try:
        yield
    finally:
        _ROPE_DICT.clear()
        _ROPE_DICT.update(shared)


def convert(model: nn.Module, vllm_config: Any, requested: Settings) -> Conversion:
    """Converts every module of a newly built model that does arithmetic; the result is also `model.rlkernel`.

    Raises:
        UnsupportedError: strict mode, and the configuration or a module cannot be exact.
    """
    done = Conversion(findings=list(findings(vllm_config, requested)))
    config: ModelConfig | None = None
    multimodal: MultimodalConfig | None = None
    try:
        config, multimodal = model_config(vllm_config.model_config), multimodal_config(vllm_config.model_config)
    except ConfigError:  # already a finding
        table = None
    else:
        # In audit mode max_model_len may exceed the model's positions.
        longest = max(config.max_position_embeddings, vllm_config.model_config.max_model_len)
        table = rope_table(replace(config, max_position_embeddings=longest))
        wanted = {part.name for part in hf_layout(config)} if multimodal is None else hf_names(multimodal)
        done.findings += _weight_findings(model, wanted)
    if multimodal is not None:
        done.modules |= convert_encoder(model, multimodal)
    limits = _step_limits(vllm_config)
    for name, module in model.named_modules():
        if name in done.modules:  # of the vision encoder
            if isinstance(module, linear.LinearBase):  # vLLM on a CPU empties the weights of its own method
                module.quant_method.__class__ = ExactLinearMethod
            continue
        converted_to, reason = _convert(module, table, requested)
        if type(module) is MRotaryEmbedding and table is not None and multimodal is not None:
            converted_to, reason = ExactMRotaryEmbedding.replace(module, table, multimodal), None
        if isinstance(getattr(module, "impl", None), ExactAttention):
            module.impl.rlkernel_limits = limits
        if converted_to is not None:
            done.modules[name] = converted_to
        elif reason is not None:
            done.modules[name] = "stock"
            done.findings.append(Finding(name, f"{type(module).__name__}: {reason}"))
    if config is not None:
        done.findings += window_findings(model, config, limits["longest"])
    for name, module in model.named_modules():
        if _has_qk_norm(module):
            kind: Any = type(module)
            module.__class__ = _fused(kind)
            object.__setattr__(module.attn, "rlkernel_layer", module)  # must not be registered as a submodule
            split_graph_at_attend(vllm_config)
            done.modules[name] = "ops.qk_norm_rope"
    refuse(done.findings, requested)
    object.__setattr__(model, "rlkernel", done)
    return done


def _step_limits(vllm_config: Any) -> dict[str, int]:
    """Most tokens and sequences of a step, and most keys of a sequence."""
    steps = vllm_config.scheduler_config
    longest = vllm_config.model_config.max_model_len
    return {"tokens": steps.max_num_batched_tokens, "sequences": steps.max_num_seqs, "longest": longest}


def _weight_findings(model: nn.Module, wanted: set[str]) -> Iterator[Finding]:
    """Weights that vLLM's model lacks or has in addition to the architecture's: it then computes another model."""
    present = {name for name, _ in hf_weights(model)}
    for name in sorted(wanted - present):
        yield Finding(name, "vLLM's model leaves this weight out, so it computes another model")
    for name in sorted(present - wanted):
        yield Finding(name, "vLLM's model has this weight, and the architecture does not")


def window_findings(model: nn.Module, config: ModelConfig, longest: int) -> Iterator[Finding]:
    """Layers whose window in vLLM differs from the architecture's, for sequences of up to `longest` tokens."""
    for name, module in model.named_modules():
        impl = getattr(module, "impl", None)
        if isinstance(impl, ExactAttention):
            wanted = config.windows[extract_layer_index(name)]
            found = impl.window_of()
            if min(found or longest, longest) != min(wanted or longest, longest):
                yield Finding(name, f"vLLM attends to a window of {found} keys, the architecture to one of {wanted}")


def _convert(module: Any, table: Tensor | None, requested: Settings) -> tuple[str | None, str | None]:
    """(what computes the module now, None), or (None, why it is unchanged), or (None, None) if it has no arithmetic."""
    kind = type(module)
    if kind is RMSNorm:
        if not module.has_weight or module.variance_size_override is not None:
            return None, "no weight, or a variance over part of the row"
        module.__class__ = ExactRMSNorm
        return "ops.rms_norm", None
    if kind is SiluAndMul:
        module.__class__ = ExactSiluAndMul
        return "ops.swiglu", None
    if isinstance(module, RotaryEmbedding):
        if table is None or not module.is_neox_style or module.rotary_dim != module.head_size:
            return None, "only rotation of the full head by halves, with rlkernel's own table, is supported"
        place = module.cos_sin_cache.device
        module.__class__ = ExactRotaryEmbedding
        module.register_buffer("rlkernel_table", table.to(place), persistent=False)
        return "ops.rope", None
    if isinstance(module, (linear.LinearBase, vocab_parallel_embedding.VocabParallelEmbedding)):
        return _convert_weight(module, requested)
    if isinstance(module, LogitsProcessor):
        if module.soft_cap is not None or module.scale != 1.0:
            return None, "scaled or capped logits are not supported"
        module.__class__ = ExactLogitsProcessor
        return "ops.linear, fp32 logits", None
    if isinstance(module, Attention):
        return _convert_attention(module, requested)
    computes = not list(module.children()) and (list(module.parameters()) or kind.__module__.startswith("vllm.model_"))
    if computes and kind.__name__ not in _IDLE:
        return None, "a kind of module that rlkernel does not compute"
    return None, None


# Submodules of converted modules that are no longer called, and placeholders.
_IDLE = ("ApplyRotaryEmb", "PPMissingLayer", "StageMissingLayer", "ModuleList", "QuantFP8")


def _has_qk_norm(module: Any) -> bool:
    """Whether a module is Qwen3's attention layer with all its parts converted."""
    return (
        type(module).__name__ == "Qwen3Attention"
        and type(getattr(module, "q_norm", None)) is ExactRMSNorm
        and type(getattr(module, "k_norm", None)) is ExactRMSNorm
        and type(getattr(module, "rotary_emb", None)) is ExactRotaryEmbedding
        and module.q_norm.variance_epsilon == module.k_norm.variance_epsilon
        and isinstance(module.attn.impl, ExactAttention)
        and getattr(module.attn, "query_quant", None) is None
    )


@functools.cache
def _fused(kind: Any) -> Any:
    return type(f"Exact{kind.__name__}", (ExactQKNorm, kind), {})


def _convert_weight(module: Any, requested: Settings) -> tuple[str | None, str | None]:
    kind, method, ranks = type(module), type(module.quant_method), module.tp_size
    row_parallel = kind is linear.RowParallelLinear
    if ranks > 1 and requested.tp_leaves % ranks:
        return None, f"tensor_parallel_size={ranks} does not divide tp_leaves={requested.tp_leaves}"
    if not (getattr(module, "input_is_parallel", True) and getattr(module, "reduce_results", True)):
        return None, "its input is not split over the ranks, or its result is not summed over them"
    if method is linear.UnquantizedLinearMethod:
        module.quant_method.__class__ = ExactLinearMethod
        if row_parallel:
            module.rlkernel_chunks = requested.tp_leaves // ranks
        if not row_parallel or ranks == 1:
            return "ops.linear", None
        module.__class__ = ExactRowParallelLinear
        module.rlkernel_group = register_group(get_tp_group().device_group, GROUP)
        return "row_parallel_linear", None
    if method is vocab_parallel_embedding.UnquantizedEmbeddingMethod:
        module.quant_method.__class__ = ExactEmbeddingMethod
        if kind is vocab_parallel_embedding.ParallelLMHead:
            return "ops.linear, fp32 logits", None
        if ranks == 1:
            return "ops.embedding", None
        module.__class__ = ExactParallelEmbedding
        module.rlkernel_group = register_group(get_tp_group().device_group, GROUP)
        return "parallel_embedding", None
    return None, f"{method.__name__} is not supported"


def _convert_attention(module: Any, requested: Settings) -> tuple[str | None, str | None]:
    impl = module.impl
    for name in ("alibi_slopes", "sinks", "logits_soft_cap", "kv_sharing_target_layer_name"):
        if getattr(impl, name, None) not in (None, 0, 0.0):
            return None, f"{name} is not supported"
    if str(impl.attn_type) not in ("decoder", "AttentionType.DECODER"):
        return None, f"attention of type {impl.attn_type} is not supported"
    if module.kv_cache_torch_dtype != module.dtype:
        return None, f"keys and values are kept in {module.kv_cache_dtype}, the model computes in {module.dtype}"
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from rlkernel_vllm.attention_cpu import convert_attention
    else:
        from rlkernel_vllm.attention_cuda import convert_attention
    return convert_attention(module, requested)
