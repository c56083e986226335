"""Variants of `rlkernel/kernels/triton/attention_backward.py` that are compiled ahead of time."""

from __future__ import annotations

from typing import Any

from aot import Variant
from rlkernel.kernels.triton.attention_backward import backward_tiles, delta_kernel, dkv_kernel, dq_kernel
from rlkernel.kernels.triton.common import next_power_of_2

AMD = ("gfx942", "gfx90a")


def _variant(name: str, kernel: Any, kind: str, d: int, launch: dict[str, int], window: bool, main: bool,
             targets: tuple[str, ...]) -> Variant:  # fmt: skip
    tensors = ("dout", "q", "k", "v", "dq", "dk", "dv")
    types = {n: f"*{kind}:16" for n in tensors if n in kernel.arg_names}
    types |= {
        "lse2": "*fp32:16", "delta": "*fp32:16", "cu_q": "*i32:16", "cu_k": "*i32:16", "T": "i32", "S": "i32",
        "q_stride": "i32:16", "k_stride": "i32:16", "v_stride": "i32:16", "window": "i32", "scale_log2e": "fp32",
        "scale": "fp32",
    }  # fmt: skip
    constants = {"HK": 8, "GROUP": 2, "D": d, "BLOCK_D": next_power_of_2(d, 16), "HAS_WINDOW": window, "CAUSAL": True}
    constants |= {n: launch[n] for n in ("BLOCK_M", "BLOCK_N")}
    constants["BRANCH"] = kind != "fp32" and targets == ("sm_90",)
    constants["TMA"] = kind != "fp32" and targets == ("sm_90",)
    rows = launch["BLOCK_N"]
    for box in ("k_box", "v_box", "q_box", "dout_box"):
        if box in kernel.arg_names and constants["TMA"]:
            shape = f"{rows},{d}" if box in ("k_box", "v_box") else f"{rows // 2},1,2,{d}"
            types[box] = f"tensordesc<{kind}[{shape}]>"
        elif box in kernel.arg_names:
            constants[box] = None
    launched = (launch["num_warps"], launch["num_stages"])
    # dkv on Hopper uses every register, so values that only its epilogue needs are spilled
    stack = 16 if kernel is dkv_kernel and targets == ("sm_90",) else 0
    return Variant(name, kernel, types, constants, *launched, matmul=True, main=main, targets=targets, stack=stack)


def _variants(
    kind: str, d: int, family: str, targets: tuple[str, ...], window: bool = False, main: bool = True
) -> tuple[Variant, ...]:
    for_dq, for_dkv = backward_tiles(d, 4 if kind == "fp32" else 2, family)
    label = f"{family} {kind} d{d}{' window' if window else ''}"
    return (
        _variant(f"attention dq {label}", dq_kernel, kind, d, for_dq, window, main, targets),
        _variant(f"attention dkv {label}", dkv_kernel, kind, d, for_dkv, window, main, targets),
    )


AOT: tuple[Variant, ...] = (
    Variant(
        "attention delta", delta_kernel,
        {"dout": "*bf16:16", "out": "*bf16:16", "lse": "*fp32:16", "lse2": "*fp32:16", "delta": "*fp32:16", "T": "i32"},
        {"HK": 8, "GROUP": 2, "D": 128, "BLOCK_D": 128, "BLOCK_M": 32},
    ),
    *_variants("bf16", 128, "hopper", ("sm_90",)),
    *_variants("bf16", 128, "blackwell", ("sm_100",)),
    *_variants("bf16", 128, "ampere", ("sm_80",), main=False),
    *_variants("bf16", 128, "amd", AMD),
    *_variants("bf16", 64, "hopper", ("sm_90",)),
    *_variants("fp16", 128, "hopper", ("sm_90",), window=True),
    *_variants("bf16", 256, "hopper", ("sm_90",), main=False),
    *_variants("fp32", 64, "ampere", ("sm_80",), main=False),
    *_variants("fp32", 64, "hopper", ("sm_90",), main=False),
    *_variants("fp32", 128, "hopper", ("sm_90",), main=False),
    *_variants("fp32", 64, "amd", AMD, main=False),
)  # fmt: skip
