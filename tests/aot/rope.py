"""Variants of `rlkernel/kernels/triton/rope.py` that are compiled ahead of time."""

from __future__ import annotations

from aot import Variant, with_pdl
from rlkernel.kernels.triton.rope import _tile, rope_kernel


def _variant(h: int, hk: int) -> Variant:
    types = dict.fromkeys(("q", "k", "q_out", "k_out"), "*bf16:16")
    types |= {"positions": "*i64:16", "cos_sin": "*fp32:16", "P": "i32", "H": "i32:16", "HK": "i32"}
    types |= dict.fromkeys(("q_row", "q_head", "k_row", "k_head"), "i32:16")
    meta = _tile(h, hk, 128)
    warps = meta.pop("num_warps")
    return Variant(f"rope {h} + {hk}", rope_kernel, types, {"INVERSE": False, **meta}, num_warps=warps, main=True)


AOT: tuple[Variant, ...] = (*with_pdl(_variant(16, 8)), *with_pdl(_variant(32, 8)))
