"""Variants of `rlkernel/kernels/triton/all_reduce.py` that are compiled ahead of time."""

from __future__ import annotations

from aot import NVIDIA, Variant
from rlkernel.kernels.symmetric_memory import CAPACITY, FLAG_BYTES, PROGRAMS
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
        Variant(
            f"all_reduce, {name}, {ranks} ranks", kernel,
            {
                "partial": "*fp32:16", "out": "*bf16:16", "addresses": "*i64:16", "rank": "i32", size: "i32:16",
                "N": "i32:16",
            },
            {
                "bias": None, "RANKS": ranks, "HAS_BIAS": False, "PROGRAMS": PROGRAMS, "DATA": FLAG_BYTES,
                "BLOCK": BLOCK, **constants,
            },
            num_warps=8, main=ranks < 8, targets=NVIDIA,
        )
        for name, kernel, size, constants in (
            ("one shot", one_shot_kernel, "SIZE", {}),
            ("two shots", two_shot_kernel, "PART", {"RESULTS": FLAG_BYTES + CAPACITY}),
        )
        for ranks in (2, 4, 8)
    ),
)  # fmt: skip
