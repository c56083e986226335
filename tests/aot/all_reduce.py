"""Variants of `rlkernel/kernels/triton/all_reduce.py` that are compiled ahead of time."""

from __future__ import annotations

from aot import NVIDIA, Variant
from rlkernel.kernels.symmetric_memory import BLOCKS, FLAG_BYTES
from rlkernel.kernels.triton.all_reduce import BLOCK, add_ranks_kernel, all_reduce_kernel

AOT: tuple[Variant, ...] = (
    Variant(
        "add_ranks", add_ranks_kernel,
        {
            "parts": "*fp32:16", "bias": "*bf16:16", "out": "*bf16:16", "SIZE": "i32:16", "N": "i32:16",
            "first": "i32:16",
        },
        {"RANKS": 8, "HAS_BIAS": True, "BLOCK": BLOCK}, num_warps=8, main=True,
    ),
    *(
        Variant(
            f"all_reduce, {ranks} ranks", all_reduce_kernel,
            {
                "partial": "*fp32:16", "out": "*bf16:16", "addresses": "*i64:16", "rank": "i32", "SIZE": "i32:16",
                "N": "i32:16",
            },
            {
                "bias": None, "RANKS": ranks, "HAS_BIAS": False, "BLOCKS": BLOCKS, "FLAGS": FLAG_BYTES // 4,
                "BLOCK": BLOCK,
            },
            num_warps=8, main=True, targets=NVIDIA,
        )
        for ranks in (2, 4, 8)
    ),
)  # fmt: skip
