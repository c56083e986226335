"""Attention on a CPU: `ops.paged_attention` over vLLM's metadata and cache.

vLLM allocates blocks of [HK, N, 2 D] elements, whose layout the backend chooses. Here a block is a page of keys
[N, HK, D] followed by one of values, so the cache is an array of pages: keys have even numbers, values odd ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from rlkernel import ops
from rlkernel_vllm.attention import ExactAttention
from rlkernel_vllm.settings import Settings


class CPUImpl(ExactAttention, CPUAttentionBackendImpl):
    """vLLM's CPU attention, computed by rlkernel."""

    def pages_of(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:  # [B, HK, N, 2 D] -> two [2 B - 1, N, HK, D]
        """Page 2 b of either view holds the keys, or the values, of block b."""
        blocks, heads, size, width = kv_cache.shape
        pages = kv_cache.view(2 * blocks, size, heads, width // 2)
        return pages[:-1], pages[1:]

    def table_of(self, block_table: Tensor) -> Tensor:
        return block_table * 2

    def window_of(self) -> int | None:
        return self.sliding_window if self.sliding_window > 0 else None

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        keys, values = self.pages_of(kv_cache)
        count, size = min(key.shape[0], slot_mapping.shape[0]), kv_cache.shape[2]
        slots = slot_mapping[:count].long()
        slots = torch.where(slots < 0, slots, slots + slots // size * size)
        ops.store_kv_(keys, values, key[:count], value[:count], slots)


def convert_attention(module: Any, requested: Settings) -> tuple[str | None, str | None]:
    """Replaces the implementation of an `Attention` module; returns what `convert._convert` does."""
    if type(module.impl) is not CPUAttentionBackendImpl:
        return None, f"{type(module.impl).__name__} is not vLLM's attention for CPUs"
    module.impl.__class__ = CPUImpl
    return "ops.paged_attention", None
