"""Variants of `rlkernel/kernels/triton/policy_loss_batch.py` that are compiled ahead of time."""

from __future__ import annotations

from typing import Any

from aot import Variant, with_pdl
from rlkernel.contract.orders import SEGMENT
from rlkernel.kernels.triton.policy_loss_batch import TENSOR, batch_kernel


def _variant(lanes: int) -> Variant:
    types: dict[str, Any] = dict.fromkeys(("sums", "extremes", "normalizer", "loss", "scale", "stats"), "*fp32:16")
    types |= {"cu_seqlens": "*i32:16", "counts": "*i32:16", "totals": "*i64:16", "divisor": "fp32"}
    types |= dict.fromkeys(("T", "B", "slots"), "i32")
    constants = {
        "DIVIDE_BY": TENSOR, "SEQUENCE_MEAN": True, "BY_TOKENS": False, "SEGMENT": SEGMENT, "LANES": lanes,
    }  # fmt: skip
    return Variant(f"policy_loss batch {lanes}", batch_kernel, types, constants, num_warps=max(1, lanes // 32))


AOT: tuple[Variant, ...] = (*with_pdl(_variant(SEGMENT)), *with_pdl(_variant(64)))
