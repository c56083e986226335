"""Variants of `rlkernel/kernels/triton/rms_norm.py` that are compiled ahead of time."""

from __future__ import annotations

from aot import Variant, with_pdl
from rlkernel.contract.orders import WGRAD_TOKENS
from rlkernel.kernels.triton.rms_norm import _tile, fold_kernel, leaves, rms_norm_grad_kernel, rms_norm_kernel

_ROW = {"T": "i32", "eps": "fp32"}


def _types(*names: str) -> dict[str, str]:
    return {**dict.fromkeys(names, "*bf16:16"), **_ROW}


def _grad_variant(name: str, c: int, with_partials: bool, has_dr: bool) -> Variant:
    rows, steps, meta = _tile(c, 2)
    warps = meta.pop("num_warps")
    types = _types("dy", "x", "weight", "dx", *(("dr",) if has_dr else ()))
    absent = {} if has_dr else {"dr": None}
    (types if with_partials else absent)["partials"] = "*fp32:16" if with_partials else None
    constants = {
        **absent, "HAS_DR": has_dr, "HAS_PARTIALS": with_partials, "ROWS": rows,
        "STEPS": steps if with_partials else 1, "PAIR": leaves(2 * WGRAD_TOKENS, c)[1] if with_partials else 0, **meta,
    }  # fmt: skip
    return Variant(name, rms_norm_grad_kernel, types, constants, num_warps=warps, main=True)


AOT: tuple[Variant, ...] = (
    *with_pdl(
        Variant(
            "add_rms_norm", rms_norm_kernel, _types("x", "residual", "weight", "y", "r"),
            {"HAS_RESIDUAL": True, "C": 4096, "ROWS": 1, "BLOCK": 4096}, num_warps=8, main=True,
        )
    ),
    *with_pdl(
        Variant(
            "rms_norm heads", rms_norm_kernel, _types("x", "weight", "y"),
            {"residual": None, "r": None, "HAS_RESIDUAL": False, "C": 128, "ROWS": 16, "BLOCK": 128}, num_warps=4,
            main=True,
        )
    ),
    *with_pdl(_grad_variant("rms_norm_grad", 1024, True, False)),
    *with_pdl(_grad_variant("add_rms_norm_grad", 4096, True, True)),
    *with_pdl(_grad_variant("rms_norm_grad heads", 128, True, False)),
    *with_pdl(_grad_variant("rms_norm_dgrad", 4096, False, True)),
    *with_pdl(
        Variant(
            "rms_norm_grad fold", fold_kernel,
            {"partials": "*fp32:16", "sums": "*fp32:16", "ROWS": "i32", "C": "i32:16"},
            {"CHUNKS": 2, "ADD": True, "CHUNK": leaves(2 * WGRAD_TOKENS, 4096)[0], "BLOCK": 16}, num_warps=4,
            main=True,
        )
    ),
)  # fmt: skip
