"""Variants of `rlkernel/kernels/triton/common.py` that are compiled ahead of time."""

from __future__ import annotations

from aot import Variant, with_pdl
from rlkernel.kernels.triton.common import add_partials_kernel

AOT: tuple[Variant, ...] = with_pdl(
    Variant(
        "add_partials", add_partials_kernel,
        {"partials": "*fp32:16", "grad": "*fp32:16", "SEGMENTS": "i32", "WIDTH": "i32:16"},
        {"FRESH": False, "UNROLL": 16, "BLOCK": 32}, num_warps=1,
    )
)  # fmt: skip
