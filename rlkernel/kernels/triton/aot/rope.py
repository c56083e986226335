"""Variants of `rope` that are compiled ahead of time."""

from __future__ import annotations

from rlkernel.kernels.triton.aot import Variant, early_too
from rlkernel.kernels.triton.rope import _tile, rope_kernel


def _variant(h: int, hk: int) -> Variant:
    types = dict.fromkeys(("q", "k", "q_out", "k_out"), "*bf16:16")
    types |= {"positions": "*i64:16", "cos_sin": "*fp32:16", "P": "i32", "H": "i32:16", "HK": "i32"}
    types |= dict.fromkeys(("q_row", "q_head", "k_row", "k_head"), "i32:16")
    meta = _tile(h, hk, 128)
    warps = meta.pop("num_warps")
    return Variant(f"rope {h} + {hk}", rope_kernel, types, {"INVERSE": False, **meta}, num_warps=warps, main=True)


AOT: tuple[Variant, ...] = (*early_too(_variant(16, 8)), *early_too(_variant(32, 8)))
