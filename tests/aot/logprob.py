"""Variants of `rlkernel/kernels/triton/logprob.py` that are compiled ahead of time."""

from __future__ import annotations

from aot import Variant, with_pdl
from aot.logprob_backward import INPUTS, SIZES
from rlkernel.kernels.triton.logprob import logprob_combine_kernel, logprob_tiles_kernel

_TILES = {"memory": "*i32:16", "TILES": "i32", "PLANE": "i32:16", "target_z": "*fp32:16", "T": "i32"}
_RESULTS = dict.fromkeys(("logp", "entropy", "lse", "stats"), "*fp32:16")


def _tiles(name: str, filtered: bool) -> Variant:
    flags = {"HAS_TEMPERATURE": filtered, "HAS_KEPT": filtered, "GROUP": 32, "WIDTH": 32}
    return Variant(f"logprob tiles, {name}", logprob_tiles_kernel, {**INPUTS, **SIZES, **_TILES}, flags, main=True)


AOT: tuple[Variant, ...] = (
    _tiles("plain", False),
    _tiles("filtered", True),
    *with_pdl(
        Variant(
            "logprob combine", logprob_combine_kernel,
            {"tile_max": "*fp32:16", "tile_sum": "*i32:16", "tile_entropy": "*i32:16", "target_z": "*fp32:16",
             **_RESULTS, "T": "i32", "TILES": "i32"},
            {"ROWS": 1, "CHUNK": 2048}, num_warps=8, main=True,
        )
    ),
)  # fmt: skip
