"""Variants of `rlkernel/kernels/triton/qk_norm_rope.py` that are compiled ahead of time."""

from __future__ import annotations

from aot import Variant, with_pdl
from rlkernel.kernels.triton.qk_norm_rope import _tile, qk_norm_rope_kernel


def _variant(h: int, hk: int, store: bool = False) -> Variant:
    types = dict.fromkeys(("q", "k", "q_weight", "k_weight", "q_out", "k_out"), "*bf16:16")
    types |= {"positions": "*i64:16", "cos_sin": "*fp32:16", "eps": "fp32", "P": "i32", "H": "i32:16", "HK": "i32"}
    types |= dict.fromkeys(("q_row", "q_head", "k_row", "k_head", "v_row", "v_head"), "i32:16")
    types |= {"slot_row": "i32:16", "slot_head": "i32:16", "SIZE": "i32"}
    meta = _tile(h, hk, 128) | {"STORE": store}
    if store:
        types |= {"v": "*bf16:16", "v_out": "*bf16:16", "slots": "*i64:16"}
    else:
        meta |= {"v": None, "v_out": None, "slots": None}
    warps = meta.pop("num_warps")
    name = f"qk_norm_rope {h} + {hk}{', stored' * store}"
    return Variant(name, qk_norm_rope_kernel, types, meta, num_warps=warps)


AOT: tuple[Variant, ...] = (
    *with_pdl(_variant(16, 8)),
    *with_pdl(_variant(32, 8)),
    *with_pdl(_variant(32, 8, store=True)),
)
