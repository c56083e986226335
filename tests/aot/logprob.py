"""Variants of `rlkernel/kernels/triton/logprob.py` that are compiled ahead of time."""

from __future__ import annotations

from aot import Variant, with_pdl
from aot.logprob_backward import INPUTS, SIZES
from rlkernel.kernels.triton.logprob import (
    SHARE_GROUPS,
    logprob_combine_kernel,
    logprob_rows_kernel,
    logprob_tiles_kernel,
)

_TILES = {"memory": "*i32:16", "TILES": "i32", "PLANE": "i32:16"}
_RESULTS = dict.fromkeys(("logp", "entropy", "lse", "stats"), "*fp32:16")
_NVIDIA, _AMD = ("sm_80", "sm_90", "sm_100"), ("gfx942", "gfx90a")
_FILTER = {"HAS_TEMPERATURE": True, "HAS_KEPT": True, "PACKED": False}
_PLAIN = {"HAS_TEMPERATURE": False, "HAS_KEPT": False, "PACKED": True}


def _forward_variants(name: str, flags: dict[str, bool], targets: tuple[str, ...]) -> tuple[Variant, ...]:
    types = {**INPUTS, **SIZES, **_TILES}
    return (
        Variant(
            f"logprob rows, {name}", logprob_rows_kernel,
            {**types, **_RESULTS, "target_z": "*fp32:16", "whole_rows": "i32"},
            {**flags, "GROUP": 64, "WIDTH": 32, "CHUNK": 2048, "SHARE": SHARE_GROUPS * 64}, num_warps=8, main=True,
            targets=targets,
        ),
        Variant(
            f"logprob tiles, {name}", logprob_tiles_kernel, {**types, "target_z": "*fp32:16", "T": "i32"},
            {**flags, "GROUP": 32, "WIDTH": 32}, main=True, targets=targets,
        ),
    )  # fmt: skip


AOT: tuple[Variant, ...] = (
    *_forward_variants("packed", _PLAIN, _NVIDIA),
    *_forward_variants("plain", {**_PLAIN, "PACKED": False}, _AMD),
    *_forward_variants("filtered", _FILTER, _NVIDIA + _AMD),
    *with_pdl(
        Variant(
            "logprob combine", logprob_combine_kernel,
            {"tile_max": "*fp32:16", "tile_sum": "*i32:16", "tile_entropy": "*i32:16", "target_z": "*fp32:16",
             **_RESULTS, "first": "i32", "T": "i32", "TILES": "i32"},
            {"ROWS": 1, "CHUNK": 2048}, num_warps=8, main=True,
        )
    ),
)  # fmt: skip
