"""Variants of `rlkernel/kernels/triton/all_reduce.py` that are compiled ahead of time."""

from __future__ import annotations

from aot import NVIDIA, Variant, with_pdl
from rlkernel.kernels.symmetric_memory import CAPACITY, CONTROL_BYTES, PROGRAMS
from rlkernel.kernels.triton.all_reduce import BLOCK, add_ranks_kernel, one_shot_kernel, two_shot_kernel

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
        variant
        for name, kernel, arguments, block in (
            ("one shot", one_shot_kernel, {}, BLOCK),
            ("two shots", two_shot_kernel, {"PART": "i32:16"}, 2 * BLOCK),
        )
        for ranks in (2, 4, 8)
        for variant in with_pdl(
            Variant(
                f"all_reduce, {name}, {ranks} ranks", kernel,
                {
                    "partial": "*fp32:16", "out": "*bf16:16", "addresses": "*i64:16", "rank": "i32", "SIZE": "i32:16",
                    **arguments, "N": "i32:16", "first": "i32:16",
                },
                {
                    "bias": None, "RANKS": ranks, "HAS_BIAS": False, "PROGRAMS": PROGRAMS, "DATA": CONTROL_BYTES,
                    "HALF": 2 * CAPACITY, "BLOCK": block,
                },
                num_warps=block // 128, main=ranks < 8, targets=NVIDIA,
            )
        )
    ),
)  # fmt: skip
