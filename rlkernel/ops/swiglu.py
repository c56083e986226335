"""swiglu: round(round(silu(gate)) * up) of a fused gate_up projection.

Contract: orders.py, `swiglu`. The op is elementwise, and its exp is that of the contract, not the platform's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlkernel.kernels import cpu, reference, stock, triton
from rlkernel.ops.checks import check, check_float, flatten_rows, not_tensor
from rlkernel.ops.define import define
from rlkernel.ops.stock_switch import is_stock


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _backward(ctx: Any, dy: Tensor) -> Tensor:
    return _grad(dy, *ctx.saved_tensors)


_grad = define(
    "swiglu_grad(Tensor dy, Tensor gate_up) -> Tensor",
    fake=lambda dy, gate_up: gate_up.new_empty(gate_up.shape),
    reference=lambda: reference.swiglu.swiglu_grad,
    cpu=lambda: cpu.swiglu.swiglu_grad,
    triton=lambda: triton.swiglu.swiglu_grad,
)
_swiglu = define(
    "swiglu(Tensor gate_up) -> Tensor",
    fake=lambda gate_up: gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2)),
    setup_context=_setup,
    backward=_backward,
    reference=lambda: reference.swiglu.swiglu,
    cpu=lambda: cpu.swiglu.swiglu,
    triton=lambda: triton.swiglu.swiglu,
)


def swiglu(
    gate_up: Tensor,  # [..., 2F]
) -> Tensor:  # [..., F]
    """`silu(gate) * up` with gate the first and up the second half of the last dimension.

    silu is computed in fp32 and rounded to the input's dtype before the product, as in Hugging Face's models. The
    backward recomputes it from gate_up, the only saved tensor.

    Args:
        gate_up: [..., 2F], fp32, bf16 or fp16.

    Raises:
        ValueError: the last dimension is odd or missing. TypeError: gate_up is not a tensor, or has another dtype.

    Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
    """
    if not isinstance(gate_up, Tensor):
        raise not_tensor("swiglu", gate_up=gate_up)
    shape = gate_up.shape
    check(
        len(shape) > 0 and shape[-1] % 2 == 0,
        lambda: f"swiglu: gate_up is {tuple(shape)}; its last dimension must be even (2F)",
    )
    width = shape[-1]
    if is_stock():
        return stock.swiglu(gate_up)
    check_float("swiglu", "gate_up", gate_up)
    if len(shape) == 2:
        return _swiglu(gate_up)
    return _swiglu(flatten_rows(gate_up)).view(*shape[:-1], width // 2)
