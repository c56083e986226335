"""Variants of `rlkernel/kernels/triton/logprob_backward.py` that are compiled ahead of time."""

from __future__ import annotations

from aot import Variant
from rlkernel.kernels.triton.logprob_backward import DGRAD_BLOCK, logprob_dgrad_kernel

# types of the arguments that the forward and backward kernels share
INPUTS = {"logits": "*bf16:16", "targets": "*i64:16", "inv_temperature": "*fp32:16", "kept": "*i32:16"}
SIZES = {"V": "i32:16", "WORDS": "i32", "logits_row": "i32:16"}
AOT: tuple[Variant, ...] = (
    Variant(
        "logprob_dgrad", logprob_dgrad_kernel,
        {**INPUTS, **dict.fromkeys(("stats", "entropy", "dlogp", "dentropy"), "*fp32:16"), "dlogits": "*bf16:16",
         **SIZES},
        {"HAS_TEMPERATURE": True, "HAS_KEPT": True, "HAS_DLOGP": True, "HAS_DENTROPY": True, "BLOCK": DGRAD_BLOCK},
        num_warps=2, main=True,
    ),
)  # fmt: skip
