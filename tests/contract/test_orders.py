"""Every op has an order, and the contract's id names its variants."""

from __future__ import annotations

import rlkernel.ops  # noqa: F401 (declares the ops)
from rlkernel.contract import CONTRACT_ID, ORDERS, contract_id
from rlkernel.kernels import select


def test_contract_id() -> None:
    assert contract_id() == CONTRACT_ID == "rlk-2"
    assert contract_id("fa3", "bf16x3") == "rlk-2+bf16x3+fa3", "variants in one order, however they are named"


OF = {
    "add_rms_norm": "rms_norm",
    "bias_grad": "linear",
    "grad_norm": "adamw",
    "linear_logprob": "logprob",
    "linear_logprob_logits": "logprob",
    "linear_logprob_probs": "logprob",
    "paged_attention": "attention",
    "policy_loss_scale": "policy_loss",
    "qk_norm_rope": "rope",
}
"""The order of an op that has another op's; `qk_norm_rope` is `rms_norm` and `rope` in one kernel."""
COPIES = ("store_kv",)


def test_every_op_has_an_order() -> None:
    for declared in select.declared():
        name = declared.removesuffix("_")
        for suffix in ("_dgrad", "_wgrad", "_grad", "_backward"):
            name = name if name in OF else name.removesuffix(suffix)
        if name not in COPIES:
            order = ORDERS[OF.get(name, name)]
            assert order.fixed and order.free and order.op == OF.get(name, name), declared
