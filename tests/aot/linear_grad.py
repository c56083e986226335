"""Variants of `rlkernel/kernels/triton/linear_grad.py` that are compiled ahead of time."""

from __future__ import annotations

from typing import Any

from aot import TARGETS, Variant
from rlkernel.contract.orders import SUM_TOKENS
from rlkernel.kernels.triton.linear_grad import ascend_kernel, ascending_kernel, bias_grad_kernel
from rlkernel.kernels.triton.matrix import Tile


def _ascending_variant(name: str, kind: str, tile: Tile, tma: bool, wgrad: bool) -> Variant:
    """The weight gradient onto fp32, or the input gradient of a head."""
    types = {
        "a": f"*{kind}:16", "b": f"*{kind}:16", "start": "*fp32:16", "out": "*fp32:16" if wgrad else f"*{kind}:16",
        "M": "i32", "N": "i32:16", "K": "i32", "SPAN": "i32:16", "SHARE": "i32", "b_k": "i32:16", "out_row": "i32:16",
        "a_k" if wgrad else "a_row": "i32:16",
    }  # fmt: skip
    constants: dict[str, Any] = {
        "a_row" if wgrad else "a_k": 1, "b_col": 1, "out_col": 1, "EVEN": not wgrad, "TMA": tma, "HAS_START": wgrad,
        "A_BY_K": wgrad, "B_BY_K": True, "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP": 8,
    }  # fmt: skip
    if not wgrad:
        del types["start"]
        constants["start"] = None
    if tma:
        a = (tile.k, tile.m) if wgrad else (tile.m, tile.k)
        types |= {"a": f"tensordesc<{kind}[{a[0]},{a[1]}]>", "b": f"tensordesc<{kind}[{tile.k},{tile.n}]>"}
    targets = tuple(t for t in TARGETS if t in ("sm_90", "sm_100") or not tma)
    return Variant(name, ascending_kernel, types, constants, tile.warps, tile.stages, True, wgrad or tma, targets)


_SQUARE = Tile(128, 128, 64, 8, 3)
AOT: tuple[Variant, ...] = (
    _ascending_variant("linear_wgrad", "bf16", _SQUARE, tma=False, wgrad=True),
    _ascending_variant("linear_wgrad tma", "bf16", _SQUARE, tma=True, wgrad=True),
    _ascending_variant("linear_dgrad head", "bf16", _SQUARE, tma=False, wgrad=False),
    _ascending_variant("linear_dgrad head tma", "bf16", _SQUARE, tma=True, wgrad=False),
    Variant(
        "ascend", ascend_kernel, {"partials": "*fp32:16", "out": "*bf16:16", "COUNT": "i32", "SIZE": "i32:16"},
        {"start": None, "HAS_START": False, "BLOCK": 256},
    ),
    Variant(
        "bias_grad", bias_grad_kernel,
        {"dy": "*bf16:16", "partials": "*fp32:16", "T": "i32", "N": "i32:16", "dy_row": "i32:16"},
        {"dy_col": 1, "TOKENS": SUM_TOKENS, "BLOCK": 128},
    ),
)  # fmt: skip
