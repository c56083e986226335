"""The attention interface of transformers: `attn_implementation="rlkernel"` puts our attention alone under a model.

`apply` sets the same name on models it replaces whole. Alone it makes attention invariant, not the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlkernel import ops
from rlkernel_transformers.packing import CallError, Packed, pack

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
        CallError: dropout, soft-capping, sinks, a cache or a mask with a bias.
    """
    b, _, length, _ = query.shape
    for name, value_ in (("dropout", dropout), ("softcap", softcap), ("s_aux", kwargs.get("s_aux"))):
        if value_ is not None and not (isinstance(value_, float | int) and value_ == 0):
            raise CallError(f"{name}={value_} is not supported by attn_implementation='rlkernel'; use 'sdpa'")
    if kwargs.get("cache") is not None:
        raise CallError("attn_implementation='rlkernel' alone takes no continuous batching; call apply(model) first")
    if not getattr(module, "is_causal", True) or key.shape[2] != length:
        raise CallError(
            f"attn_implementation='rlkernel' alone has {length} queries and {key.shape[2]} keys; it computes whole "
            "causal sequences: generate with use_cache=False, or call rlkernel_transformers.apply(model)"
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
    packed: Packed,
    q: Tensor,  # [T, H, D]
    keys: Tensor,  # [B, HK, S, D]
    window: int | None,
) -> Tensor:  # [B, H, L, S]
    """Weights of attention for `output_attentions`, by eager torch; zero at padding, in the dtype of q."""
    b = packed.shape[0]
    if packed.keys is None:  # numbers of sequences from 1 on, 0 at padding
        tokens = torch.arange(q.shape[0], device=q.device)
        sequence = packed.scatter(torch.searchsorted(packed.cu_seqlens.long(), tokens, right=True))
    else:
        sequence = torch.zeros(b, keys.shape[2], dtype=torch.int64, device=q.device)
        sequence[packed.keys] = packed.keys[0] + 1
    place = (sequence > 0).cumsum(1)  # in its row, padding left out
    own, own_place = sequence[:, packed.past :, None], place[:, packed.past :, None]
    distance = own_place - place[:, None]
    seen = (own == sequence[:, None]) & (own > 0) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    query = packed.scatter(q).transpose(1, 2).float()
    key = keys.float().repeat_interleave(query.shape[1] // keys.shape[1], dim=1)
    scores = query @ key.transpose(2, 3) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen[:, None], torch.finfo(torch.float32).min)
    return (scores.softmax(-1) * seen[:, None]).to(q.dtype)


def _padding_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """The mask as the caller gave it: zeros at padding."""
    return attention_mask


def register() -> None:
    """Makes the name known to transformers."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention_interface)
    ALL_ATTENTION_FUNCTIONS.register(f"paged|{NAME}", attention_interface)  # asked for by continuous batching
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _padding_mask)
