"""Variants of `rlkernel/kernels/triton/swiglu.py` that are compiled ahead of time."""

from __future__ import annotations

from aot import Variant, with_pdl
from rlkernel.kernels.triton.swiglu import swiglu_grad_kernel, swiglu_kernel

AOT: tuple[Variant, ...] = (
    *with_pdl(
        Variant(
            "swiglu", swiglu_kernel, {"gate_up": "*bf16:16", "out": "*bf16:16", "F": "i32:16"},
            {"L2_RESIDENT": True, "BLOCK": 512}, num_warps=2, main=True,
        )
    ),
    Variant(
        "swiglu_grad", swiglu_grad_kernel, {"dy": "*bf16:16", "gate_up": "*bf16:16", "grad": "*bf16:16", "F": "i32:16"},
        {"BLOCK": 512}, num_warps=2, main=True,
    ),
)  # fmt: skip
