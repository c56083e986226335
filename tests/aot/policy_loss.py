"""Variants of `rlkernel/kernels/triton/policy_loss.py` that are compiled ahead of time."""

from __future__ import annotations

from typing import Any

from aot import Variant, with_pdl
from aot.policy_loss_batch import AOT as BATCH_AOT
from rlkernel.contract.orders import SEGMENT
from rlkernel.kernels.policy_loss import CISPO, CLIPPED
from rlkernel.kernels.triton.policy_loss import scale_kernel
from rlkernel.kernels.triton.policy_loss_batch import TENSOR
from rlkernel.kernels.triton.policy_loss_tokens import LANES, REGISTERS, count_kernel, spread_kernel, token_kernel

_CUT = {"SEGMENT": SEGMENT, "LANES": LANES}
_SIZES = {"cu_seqlens": "*i32:16", "T": "i32", "B": "i32"}


def _token_variant(name: str, form: int, sequence_ratio: bool, kl_type: int, extras: bool, main: bool) -> Variant:
    given, absent = ["logp", "old_logp", "advantages", "normalizer", "dlogp", "sums", "extremes"], []
    (given if sequence_ratio else absent).append("log_ratios")
    (given if extras else absent).extend(("ref_logp", "entropy", "rollout_logp", "dentropy"))
    types = {**dict.fromkeys(given, "*fp32:16"), **_SIZES, "mask": "*u8:16", "counts": "*i32:16"}
    types |= {"slots": "i32", "PER_ROW": "i32"}
    types |= dict.fromkeys(("low", "high", "dual", "kl_coef", "entropy_coef", "tis_cap", "divisor"), "fp32")
    constants: dict[str, Any] = {
        "FORM": form, "KL_TYPE": kl_type, "SEQUENCE_RATIO": sequence_ratio, "SEQUENCE_MEAN": True, "DIVIDE_BY": TENSOR,
        "PER_TOKEN": False, "HAS_MASK": True, "HAS_COUNTS": sequence_ratio, "HAS_DUAL": extras,
        "PREFETCH": 1 if extras else 2, **_CUT,
        **dict.fromkeys(("HAS_REF", "HAS_KL", "HAS_ENTROPY", "HAS_BONUS", "HAS_ROLLOUT", "HAS_TIS"), extras),
    }  # fmt: skip
    (types if sequence_ratio else constants)["row_counts"] = "*i32:16" if sequence_ratio else None
    constants |= dict.fromkeys(absent)
    registers = None if extras else REGISTERS
    return Variant(name, token_kernel, types, constants, num_warps=1, main=main, maxnreg=registers)


AOT: tuple[Variant, ...] = (
    *BATCH_AOT,
    _token_variant("policy_loss", CLIPPED, False, 2, extras=False, main=True),
    _token_variant("policy_loss clipped", CLIPPED, False, 2, extras=True, main=True),
    _token_variant("policy_loss gspo", CLIPPED, True, 2, extras=True, main=False),
    _token_variant("policy_loss cispo", CISPO, False, 1, extras=True, main=False),
    Variant(
        "policy_loss count", count_kernel,
        {**_SIZES, **dict.fromkeys(("logp", "old_logp", "log_ratios"), "*fp32:16"), "mask": "*u8:16",
         "counts": "*i32:16", "PER_ROW": "i32"},
        {"SEQUENCE_RATIO": True, "HAS_MASK": True, **_CUT}, num_warps=1,
    ),
    Variant(
        "policy_loss spread", spread_kernel,
        {**_SIZES, **dict.fromkeys(("normalizer", "slopes", "dlogp"), "*fp32:16"), "mask": "*u8:16",
         "counts": "*i32:16", "kl_coef": "fp32", "divisor": "fp32", "PER_ROW": "i32"},
        {"SEQUENCE_MEAN": True, "DIVIDE_BY": TENSOR, "HAS_MASK": True, "HAS_KL": True, **_CUT}, num_warps=1,
    ),
    *with_pdl(
        Variant(
            "policy_loss scale", scale_kernel,
            {**dict.fromkeys(("dlogp", "dentropy", "scale", "dloss"), "*fp32:16"), "T": "i32"},
            {"HAS_BONUS": True, "BLOCK": 2048}, num_warps=8,
        )
    ),
)  # fmt: skip
