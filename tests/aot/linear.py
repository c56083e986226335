"""Variants of `rlkernel/kernels/triton/linear.py` that are compiled ahead of time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aot import TARGETS, Variant, with_pdl
from rlkernel.kernels.triton.linear import fold_kernel, gemm_kernel
from rlkernel.kernels.triton.matrix import Tile


def _gemm_variant(
    name: str, kind: str, tile: Tile, chunks: int = 1, bias: bool = False, main: bool = True, tma: bool = False
) -> Variant:
    types: dict[str, Any] = {
        "a": f"*{kind}:16", "b": f"*{kind}:16", "out": f"*{kind}:16", "M": "i32", "N": "i32:16", "SPAN": "i32:16",
        "a_row": "i32:16", "b_col": "i32:16",
    }  # fmt: skip
    constants: dict[str, Any] = {
        "a_k": 1, "b_k": 1, "start": None, "LEVELS": chunks.bit_length() - 1, "HAS_BIAS": bias, "HAS_START": False,
        "EVEN": True, "TMA": tma, "B_BY_K": False,
        "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP": 8 * (tile.m > 64),
        "PDL": tma,  # the GPUs with TMA are those with programmatic dependent launch
    }  # fmt: skip
    (types if bias else constants)["bias"] = f"*{kind}:16" if bias else None
    if tma:
        types |= {"a": f"tensordesc<{kind}[{tile.m},{tile.k}]>", "b": f"tensordesc<{kind}[{tile.n},{tile.k}]>"}
    targets = tuple(t for t in TARGETS if t in ("sm_90", "sm_100") or not tma)
    return Variant(name, gemm_kernel, types, constants, tile.warps, tile.stages, True, main, targets)


def _dgrad_variant(name: str, kind: str, tile: Tile, tma: bool) -> Variant:
    plain = _gemm_variant(name, kind, tile, tma=tma)
    types = {**plain.types, "b_k": "i32:16", "start": "*fp32:16"}
    constants = {n: v for n, v in plain.constants.items() if n not in types}
    constants |= {"b_col": 1, "HAS_START": True, "B_BY_K": True}
    del types["b_col"]
    if tma:
        types["b"] = f"tensordesc<{kind}[{tile.k},{tile.n}]>"
    return replace(plain, types=types, constants=constants)


_SQUARE = Tile(128, 128, 64, 8, 3)
AOT: tuple[Variant, ...] = (
    _gemm_variant("linear m16", "bf16", Tile(16, 64, 128, 4, 4)),
    _gemm_variant("linear m16 tma", "bf16", Tile(16, 64, 128, 4, 4), tma=True),
    *with_pdl(_gemm_variant("linear m16 n32", "bf16", Tile(16, 32, 128, 4, 12))),
    _gemm_variant("linear m64 n64 tma", "bf16", Tile(64, 64, 128, 4, 7), tma=True),
    _gemm_variant("linear m64 n128 tma", "bf16", Tile(64, 128, 64, 4, 9), tma=True),
    _gemm_variant("linear m128 n32 k128 tma", "bf16", Tile(128, 32, 128, 8, 5), tma=True),
    _gemm_variant("linear m128 n32 k64 tma", "bf16", Tile(128, 32, 64, 8, 11), tma=True),
    _gemm_variant("linear m128 n64 tma", "bf16", Tile(128, 64, 64, 8, 9), tma=True),
    _gemm_variant("linear m128 tree8", "bf16", Tile(128, 64, 64, 8, 3), chunks=8, bias=True),
    _gemm_variant("linear m128 tree4 tma", "bf16", _SQUARE, chunks=4, tma=True),
    _gemm_variant("linear m128 n256 tma", "bf16", Tile(128, 256, 64, 8, 3), tma=True),
    _gemm_variant("linear m128 fp16", "fp16", _SQUARE),
    _gemm_variant("linear fp32", "fp32", Tile(64, 64, 16, 8, 3), main=False),
    _dgrad_variant("linear_dgrad", "bf16", _SQUARE, tma=False),
    _dgrad_variant("linear_dgrad tma", "bf16", _SQUARE, tma=True),
    _dgrad_variant("linear_dgrad m128 n32 tma", "bf16", Tile(128, 32, 128, 8, 5), tma=True),
    _dgrad_variant("linear_dgrad m16 n16 tma", "bf16", Tile(16, 16, 512, 1, 4), tma=True),
    Variant(
        "fold", fold_kernel,
        {"partials": "*fp32:16", "bias": "*bf16:16", "out": "*bf16:16", "SIZE": "i32:16", "N": "i32:16"},
        {"LEVELS": 3, "HAS_BIAS": True, "BLOCK": 512},
    ),
)  # fmt: skip
