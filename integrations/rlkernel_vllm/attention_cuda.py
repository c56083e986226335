"""Attention on a GPU: a vLLM backend whose metadata is exactly the arguments of `ops.paged_attention`.

vLLM stores a head's key and value as one row of 2 D elements, [pages, HK, page, 2 D] with a page's tokens outermost in
memory; the op reads both halves in place. One call per layer serves prefill, chunked prefill and decode in one batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from rlkernel import ops
from rlkernel.ops.attention import MAX_HEAD_DIM
from rlkernel.ops.qk_norm_rope import qk_norm_rope_is_fused
from rlkernel_vllm.attention import ExactAttention
from rlkernel_vllm.settings import Settings


@dataclass
class Metadata:
    """A step's batch: the packed new tokens of all requests, and the pages of their keys."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor  # [B+1] int32
    max_seq_len: int
    seq_lens: Tensor  # [B] int32
    block_table: Tensor  # [B, P] int32
    slot_mapping: Tensor  # [T] int64
    use_cascade: bool = False
    causal: bool = True


class Builder(AttentionMetadataBuilder[Metadata]):
    """Passes vLLM's common metadata on. Every batch can be captured in a CUDA graph."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # vLLM declares it abstract, with a complete body
        super().__init__(*args, **kwargs)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        m = common_attn_metadata
        return Metadata(
            m.num_actual_tokens,
            m.max_query_len,
            m.query_start_loc,
            m.max_seq_len,
            m.seq_lens,
            m.block_table_tensor,
            m.slot_mapping,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Metadata:
        built = self.build(0, common_attn_metadata)
        built.seq_lens.fill_(1)  # the capture computes them, and long sequences take long
        return built


class Impl(ExactAttention, TritonAttentionImpl):
    """`ops.paged_attention` of a layer."""

    def pages_of(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        return halves(kv_cache)

    def window_of(self) -> int | None:
        window: int = self.sliding_window[0]
        return window + 1 if window >= 0 else None

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        keys, values = halves(kv_cache)
        _custom_ops.reshape_and_cache_flash(
            key, value, keys, values, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale
        )

    def norm_rope_store(
        self, layer: Any, q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...], kv_cache: Tensor, slots: Tensor
    ) -> Tensor:
        if not qk_norm_rope_is_fused(q.device, q.shape[2]):
            return super().norm_rope_store(layer, q, k, v, rest, kv_cache, slots)
        missing = q.shape[0] - slots.shape[0]
        if missing > 0:  # padding of a CUDA graph's batch
            slots = torch.nn.functional.pad(slots, (0, missing), value=-1)
        cache: tuple[Any, ...] = (*halves(kv_cache), slots[: q.shape[0]])
        return ops.qk_norm_rope_store(q, k, v, *rest, *cache)


def halves(kv_cache: Tensor) -> tuple[Tensor, Tensor]:  # [pages, HK, page, 2 D] -> two [pages, page, HK, D]
    """Views of the keys and of the values.

    Raises:
        ValueError: the cache has another memory layout, which the op would have to copy.
    """
    _, heads, _, width = kv_cache.shape
    tokens = kv_cache.transpose(1, 2)
    if tokens.stride(1) != heads * width:
        raise ValueError(
            f"rlkernel_vllm: the cache has strides {kv_cache.stride()}; expected tokens before heads in memory (layout "
            "NHD): unset VLLM_KV_CACHE_LAYOUT"
        )
    return tokens[..., : width // 2], tokens[..., width // 2 :]


class Backend(TritonAttentionBackend):
    """The backend that the plugin registers with vLLM as CUSTOM."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:  # up to vLLM 0.30
        return "NHD"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:  # vLLM from 0.31 on
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout.LBNHC,)

    @staticmethod
    def use_cascade_attention(*args: Any, **kwargs: Any) -> bool:
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == "decoder"

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        return False


def convert_attention(module: Any, requested: Settings) -> tuple[str | None, str | None]:
    """Prepares an `Attention` module that was built with our backend; returns what `convert._convert` does."""
    impl = module.impl
    if type(impl) is not Impl:
        return None, f"its backend is {type(impl).__name__}, not CUSTOM"
    impl.rlkernel_variant = requested.attention
    return (
        "ops.paged_attention" if requested.attention == "split" else f"ops.paged_attention, {requested.attention}",
        None,
    )
