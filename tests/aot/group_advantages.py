"""Variants of `rlkernel/kernels/triton/group_advantages.py` that are compiled ahead of time."""

from __future__ import annotations

from aot import Variant
from rlkernel.kernels.triton.group_advantages import _LONG, _TILE, deviation_kernel, group_advantages_kernel

_TYPES = {"rewards": "*fp32:16", "out": "*fp32:16", "N": "i32", "G": "i32", "eps": "fp32"}

AOT: tuple[Variant, ...] = (
    Variant(
        "group_advantages", group_advantages_kernel, _TYPES,
        {"spread": None, "LEAVE_ONE_OUT": False, "NORMALIZE": True, "ROWS": 2, **_TILE}, num_warps=1,
    ),
    Variant(
        "group_advantages leave one out", group_advantages_kernel, _TYPES,
        {"spread": None, "LEAVE_ONE_OUT": True, "NORMALIZE": False, "ROWS": 2, **_TILE}, num_warps=1,
    ),
    Variant(
        "group_advantages batch", group_advantages_kernel, {**_TYPES, "spread": "*fp32:16"},
        {"LEAVE_ONE_OUT": False, "NORMALIZE": True, "ROWS": 2, **_TILE}, num_warps=1,
    ),
    Variant(
        "group_advantages deviation", deviation_kernel, {"rewards": "*fp32:16", "spread": "*fp32:16", "B": "i32"},
        _LONG, num_warps=1,
    ),
)  # fmt: skip
