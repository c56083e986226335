"""transformers' attention interface: `attn_implementation="rlkernel"` replaces the attention of a model, nothing else.

That makes attention batch-invariant, not the model. `apply`, which replaces every layer, sets the same name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlkernel import ops
from rlkernel_transformers.packing import CallError, PackedCall, pack

NAME = "rlkernel"


def attention_interface(
    module: Any,
    query: Tensor,  # [B, H, L, D]
    key: Tensor,  # [B, HK, S, D]
    value: Tensor,  # [B, HK, S, D]
    attention_mask: Tensor | None,  # [B, S]
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # [B, L, H, D]
    """Causal attention of one layer, padded, or packed with `cu_seq_lens_q`.

    Raises:
        CallError: dropout, soft-capping, sinks, a cache, or a mask with a bias.
    """
    b, _, length, _ = query.shape
    for name, value_ in (("dropout", dropout), ("softcap", softcap), ("s_aux", kwargs.get("s_aux"))):
        if value_ is not None and not (isinstance(value_, float | int) and value_ == 0):
            raise CallError(f"{name}={value_} is not supported by attn_implementation='rlkernel'; use 'sdpa'")
    if kwargs.get("cache") is not None:
        raise CallError(
            "attn_implementation='rlkernel' alone does not support continuous batching; call apply(model) first"
        )
    if not getattr(module, "is_causal", True) or key.shape[2] != length:
        raise CallError(
            f"attn_implementation='rlkernel' alone computes complete causal sequences, and the call has {length} "
            f"queries and {key.shape[2]} keys: generate with use_cache=False, or call "
            "rlkernel_transformers.apply(model)"
        )
    packed = pack(
        (b, length),
        query.device,
        attention_mask=attention_mask,
        cu_seqlens=cu_seq_lens_q,
        max_seqlen=max_length_q,
    )
    q, k, v = (packed.gather(t.transpose(1, 2)) for t in (query, key, value))
    out, _ = ops.attention(
        q, k, v, packed.cu_seqlens, max_seqlen_q=packed.max_seqlen, scale=scaling, window=sliding_window
    )
    return packed.scatter(out), None


def attention_weights(
    packed: PackedCall,
    q: Tensor,  # [T, H, D]
    keys: Tensor,  # [B, HK, S, D]
    window: int | None,
) -> Tensor:  # [B, H, L, S]
    """Attention weights for `output_attentions`, by eager torch; zero at padding, in the dtype of q."""
    b = packed.shape[0]
    if packed.keys is None:  # `sequence`: number of each token's sequence from 1 on, 0 at padding
        tokens = torch.arange(q.shape[0], device=q.device)
        sequence = packed.scatter(torch.searchsorted(packed.cu_seqlens.long(), tokens, right=True))
    else:
        sequence = torch.zeros(b, keys.shape[2], dtype=torch.int64, device=q.device)
        sequence[packed.keys] = packed.keys[0] + 1
    position = (sequence > 0).cumsum(1)  # in its row, padding not counted
    query_sequence, query_position = sequence[:, packed.past :, None], position[:, packed.past :, None]
    distance = query_position - position[:, None]
    visible = (query_sequence == sequence[:, None]) & (query_sequence > 0) & (distance >= 0)
    if window is not None:
        visible &= distance < window
    query = packed.scatter(q).transpose(1, 2).float()
    key = keys.float().repeat_interleave(query.shape[1] // keys.shape[1], dim=1)
    scores = query @ key.transpose(2, 3) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible[:, None], torch.finfo(torch.float32).min)
    return (scores.softmax(-1) * visible[:, None]).to(q.dtype)


def _padding_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """The caller's mask, unchanged: zeros at padding."""
    return attention_mask


def register() -> None:
    """Registers the interface with transformers."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention_interface)
    ALL_ATTENTION_FUNCTIONS.register(f"paged|{NAME}", attention_interface)  # the name that continuous batching uses
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _padding_mask)
