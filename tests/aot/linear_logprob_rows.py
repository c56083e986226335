"""Variants of `rlkernel/kernels/triton/linear_logprob_rows.py` that are compiled ahead of time."""

from __future__ import annotations

from aot import Variant
from rlkernel.contract.orders import K_GROUP, WGRAD_TOKENS
from rlkernel.kernels.triton.linear_logprob_rows import (
    CHANNELS,
    WARPS,
    linear_logprob_gather_kernel,
    linear_logprob_order_kernel,
    linear_logprob_scatter_kernel,
)

_MOVED = {"order": "*i32:16", "C": "i32:16", "TOKENS": "i32:16"}
_FLOATS = ("stats", "dlogp", "dentropy")
AOT: tuple[Variant, ...] = (
    Variant(
        "linear_logprob order", linear_logprob_order_kernel,
        {
            "targets": "*i64:16", **dict.fromkeys(("kept", "order", "counts"), "*i32:16"),
            **dict.fromkeys(_FLOATS, "*fp32:16"), "T": "i32", "V": "i32:16", "WORDS": "i32", "TOKENS": "i32:16",
        },
        {
            "HAS_KEPT": True, "HAS_DLOGP": True, "HAS_DENTROPY": True, "GROUPS": WGRAD_TOKENS // K_GROUP,
            "GROUP": K_GROUP,
        },
        num_warps=WARPS,
    ),
    Variant(
        "linear_logprob gather", linear_logprob_gather_kernel,
        {**_MOVED, "hidden": "*bf16:16", "out": "*bf16:16", "hidden_row": "i32:16"},
        {"hidden_col": 1, "BLOCK": CHANNELS},
    ),
    Variant(
        "linear_logprob scatter", linear_logprob_scatter_kernel,
        {**_MOVED, "totals": "*fp32:16", "dhidden": "*bf16:16"}, {"BLOCK": CHANNELS},
    ),
)  # fmt: skip
