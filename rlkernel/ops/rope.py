"""rope: rotary position embedding of queries and keys, by absolute position and one fma form.

Contract: orders.py, `rope`. The gradient is the rotation by the negative angle: the op itself with `inverse` set.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlkernel.kernels import cpu, reference, stock, triton
from rlkernel.ops.autograd import refuse_gradient
from rlkernel.ops.checks import check, check_float, not_tensor
from rlkernel.ops.define import define
from rlkernel.ops.stock_switch import is_stock


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, positions, cos_sin, ctx.inverse = inputs
    ctx.save_for_backward(positions, cos_sin)


def _backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    positions, cos_sin = ctx.saved_tensors
    return *_rope(dq, dk, positions, cos_sin, not ctx.inverse), None, None, None


_rope = define(
    "rope(Tensor q, Tensor k, Tensor positions, Tensor cos_sin, bool inverse) -> (Tensor, Tensor)",
    fake=lambda q, k, positions, cos_sin, inverse: (q.new_empty(q.shape), k.new_empty(k.shape)),
    setup_context=_setup,
    backward=_backward,
    differentiable_twice=True,
    reference=lambda: reference.rope.rope,
    cpu=lambda: cpu.rope.rope,
    triton=lambda: triton.rope.rope,
)


def check_table(op: str, positions: Tensor, cos_sin: Tensor, t: int, d: int) -> None:
    """Raises ValueError unless positions and table fit t tokens with heads of d elements."""
    check(
        positions.shape == (t,) and positions.dtype == torch.int64,
        lambda: f"{op}: positions is {tuple(positions.shape)} {positions.dtype}; expected [T={t}] int64",
    )
    check(
        cos_sin.dim() == 2 and cos_sin.shape[1] == d and d % 2 == 0 and cos_sin.dtype == torch.float32,
        lambda: f"{op}: cos_sin is {tuple(cos_sin.shape)} {cos_sin.dtype}; expected [P, D={d}] float32 with D even",
    )
    check(
        cos_sin.shape[0] > 0 or t == 0,
        lambda: f"{op}: cos_sin is {tuple(cos_sin.shape)}, which has no positions; expected [P, D={d}]",
    )


def rope(
    q: Tensor,  # [T, H, D]
    k: Tensor,  # [T, HK, D]
    positions: Tensor,  # [T] int64
    cos_sin: Tensor,  # [P, D] fp32
) -> tuple[Tensor, Tensor]:  # q' [T, H, D], k' [T, HK, D]
    """Rotates the pairs `(x[j], x[j + D/2])` of every head by the angle of the token's absolute position.

    Args:
        q, k: [T, H, D] and [T, HK, D], fp32, bf16 or fp16, one dtype.
        positions: [T] int64 in [0, P): index of each token in its own sequence, not in the packed buffer. Checked on
            the CPU; on CUDA a position outside takes the first or the last row (a check would wait for the device).
        cos_sin: [P, D] fp32; row p holds cos of its D/2 angles, then sin. A constant.

    Raises:
        ValueError: shapes or dtypes do not fit; the message names the argument.
        TypeError: an argument is not a tensor, or q has another dtype.
        IndexError: a position outside the table (CPU). RuntimeError: cos_sin requires a gradient.

    Source: Su et al., RoFormer, arXiv:2104.09864; pairing by halves as in GPT-NeoX.
    """
    if not (
        isinstance(q, Tensor)
        and isinstance(k, Tensor)
        and isinstance(positions, Tensor)
        and isinstance(cos_sin, Tensor)
    ):
        raise not_tensor("rope", q=q, k=k, positions=positions, cos_sin=cos_sin)
    check(q.dim() == 3, lambda: f"rope: q is {tuple(q.shape)}; expected [T, H, D]")
    t, _, d = q.shape
    check(
        k.dim() == 3 and k.shape[0] == t and k.shape[2] == d and k.dtype == q.dtype,
        lambda: f"rope: k is {tuple(k.shape)} {k.dtype}; expected [T={t}, HK, D={d}] {q.dtype} to fit q",
    )
    check_table("rope", positions, cos_sin, t, d)
    if torch.is_grad_enabled():
        refuse_gradient("rope", ("cos_sin",), (cos_sin,))
    if is_stock():
        return stock.rope(q, k, positions, cos_sin)
    check_float("rope", "q", q)
    return _rope(q, k, positions, cos_sin, False)
