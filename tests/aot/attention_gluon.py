"""Variants of `rlkernel/kernels/triton/attention_gluon.py` that are compiled ahead of time."""

from __future__ import annotations

from aot import Variant
from rlkernel.kernels.triton.attention_gluon import BLOCK_M, BOX, KEYS, STAGES, prefill_kernel


def _variant(name: str, kind: str, d: int, *, capacity: bool = False) -> Variant:
    box = f"tensordesc<{kind}[{KEYS.value},{d}],{BOX!r}>"
    types = {
        "q": f"*{kind}:16", "k_box": box, "v_box": box, "cu_q": "*i32:16", "lens": "*i32:16", "out": f"*{kind}:16",
        "lse": "*fp32:16", "T": "i32", "q_stride": "i32:16", "COLUMNS": "i32", "SPLIT": "i32:16", "scale_log2e": "fp32",
    }  # fmt: skip
    constants = {"HK": 8, "GROUP": 2, "D": d, "BLOCK_M": BLOCK_M, "HAS_CAPACITY": capacity, "STAGES": STAGES}
    return Variant(name, prefill_kernel, types, constants, matmul=True, main=True, targets=("sm_90",))


AOT: tuple[Variant, ...] = (
    _variant("attention hopper long prefill", "bf16", 128),
    _variant("attention hopper long prefill room", "bf16", 128, capacity=True),
    _variant("attention hopper long prefill fp16", "fp16", 128),
)
