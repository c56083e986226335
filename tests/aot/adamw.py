"""Variants of `rlkernel/kernels/triton/adamw.py` that are compiled ahead of time."""

from __future__ import annotations

import triton.language as tl

from aot import Variant
from rlkernel.contract.orders import NORM_SEGMENT, SEGMENT
from rlkernel.kernels.triton.adamw import (
    BLOCK,
    LEVELS,
    NORM_WARPS,
    ROWS,
    WARPS,
    adamw_kernel,
    norm_kernel,
    squares_kernel,
    tensors_kernel,
)


def _variant(name: str, grad: tl.dtype, param: tl.dtype | None, aligned: bool = True) -> Variant:
    numbers = ("weight", "beta2", "fresh", "inverse_root", "eps", "rate", "decay")
    types = {"table": "*i64:16", "scale": "*fp32:16", "COUNT": "i32", **dict.fromkeys(numbers, "fp32")}
    constants = {
        "NEAR_MEAN": True, "ZERO_GRAD": aligned, "HAS_SCALE": True, "HAS_PARAM": param is not None, "GRAD_TYPE": grad,
        "PARAM_TYPE": param or tl.float32, "ALIGNED": aligned, "BLOCK": BLOCK,
    }  # fmt: skip
    return Variant(name, adamw_kernel, types, constants, WARPS, main=aligned)


_FOLDED = {"LANES": SEGMENT, "LEVELS": LEVELS}
_SEGMENTS = {"GRAD_TYPE": tl.float32, "ALIGNED": True, "SEGMENT": NORM_SEGMENT, "ROWS": ROWS, **_FOLDED}

AOT: tuple[Variant, ...] = (
    _variant("adamw fp32 gradients, bf16 parameters", tl.float32, tl.bfloat16),
    _variant("adamw bf16 gradients and parameters", tl.bfloat16, tl.bfloat16),
    _variant("adamw fp32", tl.float32, None),
    _variant("adamw fp16, unaligned", tl.float16, tl.float16, aligned=False),
    Variant("grad_norm segments", squares_kernel, {"table": "*i64:16", "partials": "*fp64:16", "COUNT": "i32"},
            _SEGMENTS, NORM_WARPS, main=True),
    Variant("grad_norm segments bf16", squares_kernel, {"table": "*i64:16", "partials": "*fp64:16", "COUNT": "i32"},
            {**_SEGMENTS, "GRAD_TYPE": tl.bfloat16}, NORM_WARPS, main=True),
    Variant("grad_norm tensors", tensors_kernel, {"offsets": "*i64:16", "partials": "*fp64:16", "squares": "*fp64:16"},
            _FOLDED, NORM_WARPS),
    Variant("grad_norm norm", norm_kernel,
            {"squares": "*fp64:16", "loss_scale": "*fp32:16", "norm": "*fp64:16", "scale": "*fp32:16", "COUNT": "i32",
             "max_norm": "fp32"}, {"HAS_LOSS_SCALE": True, **_FOLDED}, NORM_WARPS),
)  # fmt: skip
