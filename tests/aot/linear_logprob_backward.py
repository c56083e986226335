"""Variants of `rlkernel/kernels/triton/linear_logprob_backward.py` that are compiled ahead of time."""

from __future__ import annotations

from aot import Variant
from rlkernel.kernels.triton.linear_logprob_backward import (
    COLUMNS,
    linear_logprob_logits_kernel,
    linear_logprob_probs_kernel,
)

_ROWS = {
    "targets": "*i64:16", "inv_temperature": "*fp32:16", "kept": "*i32:16", "stats": "*fp32:16", "dlogp": "*fp32:16",
    "order": "*i32:16", "WORDS": "i32",
}  # fmt: skip
_BLOCK = {"dz": "*bf16:16", "SPAN": "i32:16", "first": "i32:16", "dz_row": "i32:16"}
_MASKED = {"HAS_TEMPERATURE": True, "HAS_KEPT": True}
AOT: tuple[Variant, ...] = (
    Variant(
        "linear_logprob logits", linear_logprob_logits_kernel,
        {
            **_ROWS, **_BLOCK, **dict.fromkeys(("logits", "entropy", "dentropy"), "*fp32:16"), "logits_row": "i32:16",
        },
        {**_MASKED, "HAS_DLOGP": True, "HAS_DENTROPY": True, "BLOCK": COLUMNS}, main=True,
    ),
    Variant(
        "linear_logprob probs", linear_logprob_probs_kernel,
        {**_ROWS, **_BLOCK, "V": "i32:16", "probs": "*bf16:16", "tile_max": "*fp32:16", "TILES": "i32"},
        {**_MASKED, "BLOCK": COLUMNS}, main=True,
    ),
)  # fmt: skip
