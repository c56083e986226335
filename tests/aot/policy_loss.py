"""Variants of `rlkernel/kernels/triton/policy_loss.py` that are compiled ahead of time."""

from __future__ import annotations

from typing import Any

from aot import Variant, with_pdl
from aot.policy_loss_batch import AOT as BATCH_AOT
from rlkernel.contract.orders import SEGMENT
from rlkernel.kernels.policy_loss import CISPO, CLIPPED
from rlkernel.kernels.triton.policy_loss import scale_kernel
from rlkernel.kernels.triton.policy_loss_batch import TENSOR
from rlkernel.kernels.triton.policy_loss_tokens import LANES, count_kernel, spread_kernel, token_kernel

_CUT = {"SEGMENT": SEGMENT, "LANES": LANES}
_SIZES = {"cu_seqlens": "*i32:16", "T": "i32", "B": "i32"}


def _token_variant(name: str, form: int, sequence_ratio: bool, kl_type: int, extras: bool, main: bool) -> Variant:
    """`extras`: with all optional inputs, which are None otherwise."""
    vectors = dict.fromkeys(("logp", "old_logp", "advantages", "normalizer", "dlogp", "sums", "extremes"), "*fp32:16")
    types = {**vectors, **_SIZES, "mask": "*u8:16", "row_counts": "*i32:16", "counts": "*i32:16", "slots": "i32"}
    types |= {"PER_ROW": "i32", **dict.fromkeys(("low", "high", "entropy_coef", "divisor"), "fp32")}
    optional = dict.fromkeys(("ref_logp", "entropy", "rollout_logp", "dentropy"), "*fp32:16")
    optional |= dict.fromkeys(("dual", "kl_coef", "tis_cap"), "fp32")
    constants: dict[str, Any] = {
        "FORM": form, "KL_TYPE": kl_type, "SEQUENCE_RATIO": sequence_ratio, "SEQUENCE_MEAN": True, "DIVIDE_BY": TENSOR,
        "PER_TOKEN": False, **_CUT,
    }  # fmt: skip
    types |= optional if extras else {}
    constants |= {} if extras else dict.fromkeys(optional)
    (types if sequence_ratio else constants)["log_ratios"] = "*fp32:16" if sequence_ratio else None
    return Variant(name, token_kernel, types, constants, num_warps=1, main=main)


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
        _CUT, num_warps=1,
    ),
    Variant(
        "policy_loss spread", spread_kernel,
        {**_SIZES, **dict.fromkeys(("normalizer", "slopes", "dlogp"), "*fp32:16"), "mask": "*u8:16",
         "counts": "*i32:16", "kl_coef": "fp32", "divisor": "fp32", "PER_ROW": "i32"},
        {"SEQUENCE_MEAN": True, "DIVIDE_BY": TENSOR, **_CUT}, num_warps=1,
    ),
    *with_pdl(
        Variant(
            "policy_loss scale", scale_kernel,
            {**dict.fromkeys(("dlogp", "dentropy", "scale", "dloss"), "*fp32:16"), "T": "i32"},
            {"HAS_BONUS": True, "BLOCK": 2048}, num_warps=8,
        )
    ),
)  # fmt: skip
