"""Every op has an order, and the contract's id names its variants."""

from __future__ import annotations

import pytest

from rlkernel.contract import CONTRACT_ID, ORDERS, contract_id


def test_contract_id() -> None:
    assert contract_id() == CONTRACT_ID == "rlk-2"
    assert contract_id("fa3", "bf16x3") == "rlk-2+bf16x3+fa3", "variants in one order, however they are named"


@pytest.mark.parametrize(
    "op", ("embedding", "linear", "rms_norm", "rope", "swiglu", "attention", "logprob", "sample", "policy_loss")
)
def test_every_op_has_an_order(op: str) -> None:
    order = ORDERS[op]
    assert order.op == op and order.fixed and order.free
