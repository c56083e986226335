"""Attention of an engine on a CPU: vLLM's metadata and pages, `ops.paged_attention` over them.

vLLM hands out blocks of [HK, N, 2 D] elements, and their inside is the backend's own affair. Here a block is a page of
keys [N, HK, D] and then one of values, so the cache is an array of pages: keys have even numbers, values odd ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from rlkernel import ops
from rlkernel_vllm.settings import Settings


def pages_of(kv_cache: Tensor) -> tuple[Tensor, Tensor]:  # [B, HK, N, 2 D] -> two [2 B - 1, N, HK, D]
    """Keys and values as pages; block b has its keys, and its values, in page 2 b of the one and of the other."""
    blocks, heads, size, width = kv_cache.shape
    pages = kv_cache.view(2 * blocks, size, heads, width // 2)
    return pages[:-1], pages[1:]


class CPUImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention, computed by rlkernel."""

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        keys, values = pages_of(kv_cache)
        count, size = min(key.shape[0], slot_mapping.shape[0]), kv_cache.shape[2]
        slots = slot_mapping[:count].long()
        slots = torch.where(slots < 0, slots, slots + slots // size * size)
        ops.store_kv_(keys, values, key[:count], value[:count], slots)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        m = attn_metadata
        if m is None:  # a run that measures memory
            return output.zero_()
        keys, values = pages_of(kv_cache)
        tokens = m.num_actual_tokens
        ops.paged_attention(
            query[:tokens],
            keys,
            values,
            m.block_table * 2,
            m.query_start_loc,
            m.seq_lens,
            max_seqlen_q=m.max_query_len,
            max_seqlen_k=m.max_seq_len,
            scale=self.scale,
            window=self.sliding_window if self.sliding_window > 0 else None,
            out=output[:tokens],
        )
        return output


def adopt(module: Any, asked: Settings) -> tuple[str | None, str | None]:
    """Changes the implementation of an `Attention` module; as `convert._convert`."""
    if type(module.impl) is not CPUAttentionBackendImpl:
        return None, f"{type(module.impl).__name__} is not vLLM's attention for CPUs"
    module.impl.__class__ = CPUImpl
    return "ops.paged_attention", None
