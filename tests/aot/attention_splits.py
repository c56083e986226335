"""Variants of `rlkernel/kernels/triton/attention_splits.py` that are compiled ahead of time."""

from __future__ import annotations

from aot import Variant, with_pdl
from rlkernel.kernels.triton.attention_splits import merge_kernel

AOT: tuple[Variant, ...] = with_pdl(
    Variant(
        "attention merge", merge_kernel,
        {"o_parts": "*fp32:16", "lse_parts": "*fp32:16", "cu_q": "*i32:16", "lens": "*i32:16", "out": "*bf16:16",
         "lse": "*fp32:16", "T": "i32", "window": "i32", "SPLIT": "i32:16", "SPLITS": "i32"},
        {"H": 16, "D": 128, "HEADS": 1, "BLOCK_D": 128, "HAS_WINDOW": False, "LENGTHS": True}, 1,
    ),
)  # fmt: skip
