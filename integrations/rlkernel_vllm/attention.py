"""vLLM's attention, computed by `ops.paged_attention` over vLLM's pages: what CPU and CUDA share.

`attend` is one torch op for norms, rope, cache update and attention of a layer with query and key norms. vLLM splits
its graph there, and every op outside a graph costs time on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.attention import get_attention_context, unified_attention_with_output
from vllm.v1.attention.backend import AttentionImpl

from rlkernel import ops

VLLM_ATTENTION = "vllm::unified_attention_with_output"  # the op at which vLLM splits a graph


class ExactAttention(AttentionImpl[Any]):
    """Mixin of an implementation of vLLM's attention; subclasses define `pages_of` and `do_kv_cache_update`."""

    rlkernel_variant = "split"
    rlkernel_limits: Mapping[str, int] | None = None  # most tokens, sequences and keys of a step, set by `convert`

    def pages_of(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as pages [pages, page, HK, D]."""
        raise NotImplementedError

    def table_of(self, block_table: Tensor) -> Tensor:
        """vLLM's block table as numbers of these pages."""
        return block_table

    def window_of(self) -> int | None:
        """Keys that a query attends to, itself included; None for all."""
        raise NotImplementedError

    def scratch_bytes(self, query: Tensor, key: Tensor) -> int:
        """Upper bound of a call's scratch memory."""
        if self.rlkernel_limits is None or self.rlkernel_variant != "split":
            return 0
        return ops.attention_scratch_bytes(query, key, **self.rlkernel_limits)

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
        if m is None:
            if kv_cache is None or not kv_cache.numel():  # vLLM profiles memory: scratch of real steps must count
                torch.empty(self.scratch_bytes(query, key), dtype=torch.uint8, device=query.device)
            return output.fill_(0)
        keys, values = self.pages_of(kv_cache)
        tokens = m.num_actual_tokens
        ops.paged_attention(
            query[:tokens],
            keys,
            values,
            self.table_of(m.block_table),
            m.query_start_loc,
            m.seq_lens,
            max_seqlen_q=m.max_query_len,
            max_seqlen_k=m.max_seq_len,
            scale=self.scale,
            window=self.window_of(),
            variant=self.rlkernel_variant,
            out=output[:tokens],
        )
        return output

    def norm_rope_store(
        self, layer: Any, q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...], kv_cache: Tensor, slots: Tensor
    ) -> Tensor:
        """Normed and rotated q; writes normed and rotated k, and v, into the cache.

        Args:
            rest: arguments of `ops.qk_norm_rope` after q and k.
        """
        q, k = ops.qk_norm_rope(q, k, *rest)
        self.do_kv_cache_update(layer, k, v, kv_cache, slots)
        return q


def attend(qkv: Tensor, out: Tensor, positions: Tensor, name: str) -> None:
    """out [T, H D] from the fused projection qkv [T, (H + 2 HK) D] of the attention layer `name`."""
    _, attention, kv_cache, slots = get_attention_context(name)
    layer = attention.rlkernel_layer
    heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    q, k, v = qkv.view(qkv.shape[0], -1, layer.head_dim).split(heads, dim=1)
    rest = (
        layer.q_norm.weight,
        layer.k_norm.weight,
        layer.q_norm.variance_epsilon,
        positions,
        layer.rotary_emb.rlkernel_table,
    )
    if slots is None:  # vLLM profiles memory
        q, k = ops.qk_norm_rope(q, k, *rest)
    else:
        q = attention.impl.norm_rope_store(attention, q, k, v, rest, kv_cache, slots)
    unified_attention_with_output(q, k, v, out.view(q.shape), name)


_LIBRARY = torch.library.Library("rlkernel_vllm", "DEF")
_LIBRARY.define("attend(Tensor qkv, Tensor(a!) out, Tensor positions, str name) -> ()")
for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("attend", attend, _device)
torch.library.register_fake("rlkernel_vllm::attend", lambda qkv, out, positions, name: None, lib=_LIBRARY)


def split_graph_at_attend(vllm_config: Any) -> None:
    """Makes vLLM split its graph at `attend` if it splits at its own attention."""
    splitting_ops = vllm_config.compilation_config.splitting_ops
    if splitting_ops and VLLM_ATTENTION in splitting_ops and "rlkernel_vllm::attend" not in splitting_ops:
        splitting_ops.append("rlkernel_vllm::attend")
