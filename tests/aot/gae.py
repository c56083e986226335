"""Variants of `rlkernel/kernels/triton/gae.py` that are compiled ahead of time."""

from __future__ import annotations

from aot import Variant
from rlkernel.kernels.triton.gae import _UNROLL, gae_kernel

_VECTORS = ("rewards", "values", "advantages", "returns")
_TYPES = dict.fromkeys(_VECTORS, "*fp32:16") | {
    "cu_seqlens": "*i32:16", "T": "i32", "gamma": "fp32", "decay": "fp32"
}  # fmt: skip

AOT: tuple[Variant, ...] = (Variant("gae", gae_kernel, _TYPES, {"UNROLL": _UNROLL}, num_warps=1),)
