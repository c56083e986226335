"""Variants of `rlkernel/kernels/triton/sample.py` and `sample_threshold.py` that are compiled ahead of time."""

from __future__ import annotations

from aot import Variant
from rlkernel.kernels.triton.sample import (
    GROUP,
    filter_logits_kernel,
    sample_draw_kernel,
    sample_finish_kernel,
    sample_maxima_kernel,
)
from rlkernel.kernels.triton.sample_threshold import sample_threshold_kernel

_ROW = {"logits": "*fp32:16", "temperature": "*fp32:16", "V": "i32:16", "logits_row": "i32:16"}
_TILES = {**_ROW, "TILES": "i32", "WORDS": "i32", "PLANE": "i32", "memory": "*i32:16", "kept": "*i32:16"}
_BEST = {"best_score": "*fp32:16", "best_token": "*i32:16"}
_FILTER = {"threshold": "*i32:16", "maximum": "*fp32:16", "min_p": "*fp32:16"}
_LIST = {**_FILTER, "tiles": "*i32:16", "count": "*i32:16"}
_DRAW = {**_TILES, **_BEST, "seeds": "*i64:16", "positions": "*i64:16"}
_NONE = dict.fromkeys(("threshold", "maximum", "min_p", "tiles", "count", "kept"))
_FINISH = {
    **_ROW, **_BEST, "TILES": "i32", "PROGRAMS": "i32", "PLANE": "i32", "count": "*i32:16", "memory": "*i32:16",
    "memory_of_all": "*i32:16", "tokens": "*i64:16", "logp": "*fp32:16", "full_logp": "*fp32:16",
}  # fmt: skip
AOT: tuple[Variant, ...] = (
    Variant("sample maxima", sample_maxima_kernel, _TILES, {"HAS_SUMS": False, "GROUP": GROUP}, main=True),
    Variant("sample maxima, sums", sample_maxima_kernel, _TILES, {"HAS_SUMS": True, "GROUP": GROUP}, main=True),
    Variant(
        "sample thresholds", sample_threshold_kernel,
        {**_ROW, **_LIST, "TILES": "i32", "SCRATCH": "i32:16", "tile_max": "*fp32:16", "scratch": "*i32:16",
         "top_k": "*i32:16", "top_p": "*fp32:16"},
        {"HAS_TOP_K": True, "HAS_TOP_P": True, "HAS_MIN_P": True, "CHUNK": 2048}, num_warps=8, main=True,
    ),
    Variant(
        "sample draw, filtered", sample_draw_kernel, {**_DRAW, **_LIST},
        {"HAS_FILTER": True, "HAS_MIN_P": True, "HAS_LOGP": True, "GROUP": GROUP}, main=True,
    ),
    Variant(
        "sample draw", sample_draw_kernel, {k: t for k, t in _DRAW.items() if k != "kept"},
        {**_NONE, "HAS_FILTER": False, "HAS_MIN_P": False, "HAS_LOGP": True, "GROUP": GROUP}, main=True,
    ),
    Variant(
        "sample finish", sample_finish_kernel, _FINISH,
        {"HAS_FILTER": True, "HAS_LOGP": True, "HAS_FULL": True, "GROUP": GROUP, "BLOCK": 64, "CHUNK": 2048},
    ),
    Variant(
        "sample filter logits", filter_logits_kernel, {**_ROW, **_FILTER},
        {"HAS_FILTER": True, "HAS_MIN_P": True, "BLOCK": 4096},
    ),
)  # fmt: skip
