"""Variants of `rlkernel/kernels/triton/linear_logprob.py` that are compiled ahead of time."""

from __future__ import annotations

from dataclasses import replace

from aot import Variant
from rlkernel.kernels.triton.linear_logprob import fused_tile, linear_logprob_dz_kernel, linear_logprob_kernel
from rlkernel.kernels.triton.matrix import Tile


def _types(kind: str, *more: str) -> dict[str, str]:
    floats = ("inv_temperature", "tile_max", "target_z", "stats", "entropy", "dlogp", "dentropy")
    known = {n: "*fp32:16" for n in floats} | {n: f"*{kind}:16" for n in ("hidden", "weight", "dz")}
    known |= {"targets": "*i64:16", "kept": "*i32:16", "tile_sum": "*i32:16", "tile_entropy": "*i32:16"}
    known |= {"T": "i32", "V": "i32:16", "C": "i32:16", "WORDS": "i32", "hidden_row": "i32:16", "weight_row": "i32:16"}
    known |= {"TILES": "i32", "first": "i32:16", "order": "*i32:16", "dz_row": "i32:16"}
    known |= {"WIDTH": "i32:16", "logits": "*fp32:16"}
    names = ("hidden", "weight", "targets", "inv_temperature", "T", "V", "C", "WORDS", "hidden_row", "weight_row")
    return {n: known[n] for n in (*names, *more)}


def _constants(tile: Tile, **flags: bool) -> dict[str, object]:
    sizes = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP": 8, "hidden_col": 1, "weight_col": 1}
    return {**sizes, "HAS_TEMPERATURE": True, "EVEN": True, "TMA": False, **flags}


def _forward_variant(name: str, kind: str, tile: Tile, kept: bool, main: bool = True, logits: bool = False) -> Variant:
    optional = [n for n, has in (("kept", kept), ("logits", logits)) if has]
    types = _types(kind, "tile_max", "tile_sum", "tile_entropy", "target_z", "TILES", "WIDTH", *optional)
    constants = _constants(tile, HAS_KEPT=kept, HAS_PROBS=False, HAS_LOGITS=logits)
    constants |= {n: None for n in ("probs", "kept", "logits") if n not in optional}
    return Variant(name, linear_logprob_kernel, types, constants, tile.warps, tile.stages, matmul=True, main=main)


def _with_tma(plain: Variant) -> Variant:
    size = plain.constants
    boxes = {
        "hidden": f"tensordesc<bf16[{size['BLOCK_M']},{size['BLOCK_K']}]>",
        "weight": f"tensordesc<bf16[{size['BLOCK_N']},{size['BLOCK_K']}]>",
    }
    return replace(
        plain, name=f"{plain.name} tma", types={**plain.types, **boxes}, constants={**size, "TMA": True},
        targets=("sm_90", "sm_100"),
    )  # fmt: skip


_LARGE = fused_tile(1 << 20, 2)
_DZ = Variant(
    "linear_logprob dz", linear_logprob_dz_kernel,
    _types("bf16", "stats", "entropy", "dlogp", "dentropy", "order", "dz", "first", "dz_row"),
    _constants(_LARGE, HAS_KEPT=False, HAS_DLOGP=True, HAS_DENTROPY=True) | {"kept": None},
    _LARGE.warps, _LARGE.stages, matmul=True, main=True,
)  # fmt: skip
AOT: tuple[Variant, ...] = (
    _forward_variant("linear_logprob m128", "bf16", _LARGE, kept=False),
    _forward_variant("linear_logprob m128 logits", "bf16", _LARGE, kept=False, logits=True),
    _with_tma(_forward_variant("linear_logprob m128", "bf16", _LARGE, kept=False)),
    _with_tma(_forward_variant("linear_logprob n256", "bf16", fused_tile(1 << 20, 2, True), False, main=False)),
    _forward_variant("linear_logprob m16 kept", "bf16", fused_tile(16, 2), kept=True),
    _forward_variant("linear_logprob fp32", "fp32", fused_tile(16, 4), kept=False, main=False),
    _DZ,
    _with_tma(_DZ),
)  # fmt: skip
