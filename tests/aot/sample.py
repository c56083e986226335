"""Variants of `rlkernel/kernels/triton/sample.py` that are compiled ahead of time."""

from __future__ import annotations

from aot import Variant
from rlkernel.kernels.triton.sample import (
    WORDS_PER_PROGRAM,
    sample_pick_kernel,
    sample_threshold_kernel,
    sample_tiles_kernel,
)

_ROW = {"logits": "*fp32:16", "temperature": "*fp32:16", "V": "i32:16", "logits_row": "i32:16"}
_BEST = {"best_score": "*fp32:16", "best_token": "*i32:16"}
_FILTER = {"threshold": "*i32:16", "maximum": "*fp32:16"}
AOT: tuple[Variant, ...] = (
    Variant(
        "sample thresholds", sample_threshold_kernel, {**_ROW, **_FILTER, "top_k": "*i32:16", "top_p": "*fp32:16"},
        {"HAS_TOP_K": True, "HAS_TOP_P": True, "BLOCK": 8192}, num_warps=16, main=True,
    ),
    Variant(
        "sample tiles", sample_tiles_kernel,
        {**_ROW, **_BEST, **_FILTER, "seeds": "*i64:16", "positions": "*i64:16", "min_p": "*fp32:16", "kept": "*i32:16",
         "WORDS": "i32"},
        {"HAS_FILTER": True, "HAS_MIN_P": True, "BLOCK": WORDS_PER_PROGRAM}, main=True,
    ),
    Variant(
        "sample pick", sample_pick_kernel, {**_BEST, "tokens": "*i64:16", "PROGRAMS": "i32"}, {"BLOCK": 128},
        num_warps=1,
    ),
)  # fmt: skip
