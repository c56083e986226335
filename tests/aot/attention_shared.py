"""Variants of `rlkernel/kernels/triton/attention_shared.py` that are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from aot import Variant, with_pdl
from rlkernel.kernels.triton.attention_shared import prefix_kernel, suffix_kernel
from rlkernel.kernels.triton.attention_tiles import forward_tile

_TYPES = {
    **dict.fromkeys(("q", "k", "v"), "*bf16:16"), **dict.fromkeys(("table", "prefix", "lens"), "*i32:16"),
    **dict.fromkeys(("o_parts", "lse_parts", "sums"), "*fp32:16"),
    "B": "i32", "q_stride": "i32:16", "COLUMNS": "i32", "MOST": "i32", "PAGES": "i32", "SPLIT": "i32:16",
    "scale_log2e": "fp32",
}  # fmt: skip


def _variants(family: str, targets: tuple[str, ...]) -> Iterator[Variant]:
    shape = {"HK": 8, "GROUP": 2, "D": 128, "KV_HEAD": 128, "BLOCK_D": 128, "PAGE": 16, "BRANCH": family == "hopper"}
    tile, own = forward_tile(128, 128, 2, family), forward_tile(2, 128, 2, family)
    yield from with_pdl(Variant(
        f"attention {family} shared prefix", prefix_kernel, {**_TYPES, "groups": "*i32:16", "TILES": "i32"},
        {**shape, "BLOCK_M": tile.rows}, tile.warps, tile.stages, matmul=True, main=family == "hopper", targets=targets,
    ))  # fmt: skip
    yield from with_pdl(Variant(
        f"attention {family} after a shared prefix", suffix_kernel,
        {**_TYPES, "out": "*bf16:16", "lse": "*fp32:16", "SPLITS": "i32"}, {**shape, "BLOCK_M": own.rows}, own.warps,
        own.stages, matmul=True, main=family == "hopper", targets=targets, stack=16,
    ))  # fmt: skip


AOT: tuple[Variant, ...] = (
    *_variants("hopper", ("sm_90",)),
    *_variants("ampere", ("sm_80",)),
    *_variants("blackwell", ("sm_100",)),
    *_variants("amd", ("gfx942", "gfx90a")),
)
