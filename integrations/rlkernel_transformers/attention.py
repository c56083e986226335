"""The attention interface of transformers: `attn_implementation="rlkernel"` puts our attention alone under a model.

`apply` sets the same name on models it replaces whole. Alone it makes attention invariant, not the model.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlkernel import ops
from rlkernel_transformers.packing import CallError, pack

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


def _padding_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """The mask as the caller gave it: zeros at padding."""
    return attention_mask


def register() -> None:
    """Makes the name known to transformers."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention_interface)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _padding_mask)
