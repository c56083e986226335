"""Keys and values of earlier calls: transformers' dynamic and static caches, and the pages of its continuous batching.

Every cache must return all keys of a sequence in order, because the bits of attention depend on each key's position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlkernel_transformers.packing import CallError, PackedCall, Pages

_KNOWN = ("DynamicCache", "StaticCache")


def new_cache() -> Any:
    """An empty cache that keeps every key, also outside of a sliding window."""
    from transformers import DynamicCache

    return DynamicCache()


def check_cache(cache: Any, new_tokens: int) -> None:
    """Makes an empty DynamicCache keep every key; raises CallError for a cache that cannot.

    Args:
        cache: past_key_values of a call.
        new_tokens: tokens per row that the call adds.
    """
    from transformers.cache_utils import DynamicLayer

    kind = type(cache).__name__
    if kind not in _KNOWN:
        raise CallError(
            f"past_key_values is a {kind}; rlkernel fills a {' or a '.join(_KNOWN)}: leave cache_implementation out, "
            "or generate with rlkernel_transformers.remove(model)"
        )
    past = int(cache.get_seq_length())
    sliding = [i for i, layer in enumerate(cache.layers) if getattr(layer, "is_sliding", False)]
    if sliding and (past or kind != "DynamicCache"):
        raise CallError(
            f"past_key_values is a {kind} that drops keys outside of the sliding window, and the bits of attention "
            "depend on their positions; pass past_key_values=transformers.DynamicCache(), or leave "
            "cache_implementation out"
        )
    for i in sliding:
        cache.layers[i] = DynamicLayer()
    capacity = min((layer.max_cache_len for layer in cache.layers), default=0) if kind == "StaticCache" else None
    if capacity is not None and past + new_tokens > capacity:
        raise CallError(
            f"past_key_values is a StaticCache of {capacity} tokens, and {past + new_tokens} are to be stored; make it "
            "larger"
        )


def update_cache(module: Any, packed: PackedCall, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Stores new keys and values [T, HK, D] of an attention layer in the call's cache.

    Returns:
        Packed keys and values that the call attends to, and all keys in the caller's shape [B, HK, S, D].
    """
    if packed.pages is not None:
        pages = packed.pages
        new = [t.transpose(0, 1)[None] for t in (k, v)]
        return *pages.cache.update(*new, module.layer_idx, read_index=pages.read, write_index=pages.write), None
    new = [packed.scatter(t).transpose(1, 2) for t in (k, v)]
    # A static cache returns its full capacity.
    keys, values = (t[:, :, : packed.past + packed.shape[1]] for t in packed.cache.update(*new, module.layer_idx))
    if packed.keys is None:
        return k, v, keys
    return keys.transpose(1, 2)[packed.keys], values.transpose(1, 2)[packed.keys], keys


def pack_pages(shape: tuple[int, int], position_ids: Tensor, windows: Any, kwargs: dict[str, Any]) -> PackedCall:
    """A batch of transformers' continuous batching: tokens of several sequences in one row, with a paged cache.

    Raises:
        CallError: keys cannot be gathered in order.
    """
    remedy = "turn use_transformers_continuous_batching off, or generate with rlkernel_transformers.remove(model)"
    if any(window is not None for window in windows):
        raise CallError(f"continuous batching of transformers drops keys outside of sliding windows: {remedy}")
    if kwargs.get("block_table") is not None:
        raise CallError(
            "continuous batching of transformers passes a block table, which rlkernel does not read: set "
            f"max_blocks_per_request=0 in its ContinuousBatchingConfig, {remedy}"
        )
    return PackedCall(
        shape,
        position_ids.flatten().long(),
        kwargs["cu_seq_lens_q"].to(torch.int32),
        int(kwargs["max_seqlen_q"]),
        pages=Pages(kwargs["cache"], kwargs["read_index"], kwargs["write_index"]),
        cu_seqlens_k=kwargs["cu_seq_lens_k"].to(torch.int32),
        max_seqlen_k=int(kwargs["max_seqlen_k"]),
        longest=int(kwargs["max_seqlen_k"]),
    )
