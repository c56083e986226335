"""Variants of `rlkernel/kernels/triton/attention_pages.py` that are compiled ahead of time."""

from __future__ import annotations

from aot import Variant
from rlkernel.kernels.triton.attention_pages import gather_kernel, store_kv_kernel

AOT: tuple[Variant, ...] = (
    Variant(
        "attention gather", gather_kernel,
        {"k": "*bf16:16", "v": "*bf16:16", "table": "*i32:16", "lens": "*i32:16", "k_out": "*bf16:16",
         "v_out": "*bf16:16", "COLUMNS": "i32", "PAGES": "i32", "CAPACITY": "i32"},
        {"HK": 8, "D": 128, "KV_HEAD": 256, "PAGE": 16, "BLOCK": 1024},
    ),
    Variant(
        "store_kv", store_kv_kernel,
        {"k_cache": "*bf16:16", "v_cache": "*bf16:16", "k": "*bf16:16", "v": "*bf16:16", "slots": "*i64:16",
         "k_stride": "i32:16", "v_stride": "i32:16", "SIZE": "i64"},
        {"ROW": 1024, "BLOCK": 1024},
    ),
)  # fmt: skip
