"""rms_norm: y = round(round(r * rstd) * weight) with r = x or round(x + residual); each row is summed in a fixed order.

Contract: orders.py, `rms_norm`. One pass computes both gradients; it recomputes rstd from r, the only tensor kept.
"""

from __future__ import annotations

from typing import Any, overload

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from rlkernel.kernels import cpu, reference, stock, triton
from rlkernel.ops.autograd import gradient_target, has_main_grad, main_grad_lock, outside_graph
from rlkernel.ops.checks import check, check_float, check_number, not_tensor
from rlkernel.ops.define import define
from rlkernel.ops.stock_switch import is_stock


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)
    ctx.weight = weight


def _setup_add(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, residual, weight, ctx.eps = inputs
    ctx.views = _is_leaf_view(x), _is_leaf_view(residual)
    ctx.set_materialize_grads(False)  # the last norm's r is unused; a zero gradient for it would cost a pass
    ctx.save_for_backward(output[1], weight)
    ctx.weight = weight


def _is_leaf_view(x: Tensor) -> bool:
    """Whether a tensor is a view of a leaf, whose `.grad` may become the returned gradient's memory itself."""
    return x._base is not None and x._base.is_leaf and x.requires_grad


def rms_norm_gradients(
    ctx: Any, dy: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, needs_x: bool, index: int
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and of the weight, in one pass if both are needed; `index`: the weight's among the inputs."""
    needs_weight, main_grad = gradient_target("rms_norm", ctx, index, ctx.weight)
    if not needs_weight:
        return (_dgrad(dy, dr, x, weight, ctx.eps) if needs_x else None), None
    if main_grad is None:
        return _grad(dy, dr, x, weight, ctx.eps)
    with main_grad_lock:
        return _grad_(main_grad, dy, dr, x, weight, ctx.eps), None


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    return *rms_norm_gradients(ctx, dy, None, x, weight, ctx.needs_input_grad[0], 1), None


def _backward_add(ctx: Any, dy: Tensor | None, dr: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of x, residual, weight and eps; x and residual get the same tensor.

    If both are leaves, autograd copies it. For views of leaves it does not, and their `.grad` would share memory, so
    these get a clone.
    """
    r, weight = ctx.saved_tensors
    view_x, view_residual = ctx.views
    if dy is None:
        if dr is None:
            return None, None, None, None
        return dr.clone() if view_x else dr, dr.clone() if view_residual else dr, None, None
    needs_x = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
    dx, dw = rms_norm_gradients(ctx, dy, dr, r, weight, needs_x, 2)
    if dx is not None and all(ctx.needs_input_grad[:2]) and (view_x or view_residual):
        return dx, dx.clone(), dw, None
    return dx, dx, dw, None


_dgrad = define(
    "rms_norm_dgrad(Tensor dy, Tensor? dr, Tensor x, Tensor weight, float eps) -> Tensor",
    fake=lambda dy, dr, x, weight, eps: x.new_empty(x.shape),
    reference=lambda: reference.rms_norm.rms_norm_dgrad,
    cpu=lambda: cpu.rms_norm.rms_norm_dgrad,
    triton=lambda: triton.rms_norm.rms_norm_dgrad,
)
_grad = define(
    "rms_norm_grad(Tensor dy, Tensor? dr, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    fake=lambda dy, dr, x, weight, eps: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
    reference=lambda: reference.rms_norm.rms_norm_grad,
    cpu=lambda: cpu.rms_norm.rms_norm_grad,
    triton=lambda: triton.rms_norm.rms_norm_grad,
)
_grad_ = define(
    "rms_norm_grad_(Tensor(a!) grad, Tensor dy, Tensor? dr, Tensor x, Tensor weight, float eps) -> Tensor",
    fake=lambda grad, dy, dr, x, weight, eps: x.new_empty(x.shape),
    reference=lambda: reference.rms_norm.rms_norm_grad_,
    cpu=lambda: cpu.rms_norm.rms_norm_grad_,
    triton=lambda: triton.rms_norm.rms_norm_grad_,
)
_rms_norm = define(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    fake=lambda x, weight, eps: x.new_empty(x.shape),
    setup_context=_setup,
    backward=_backward,
    reference=lambda: reference.rms_norm.rms_norm,
    cpu=lambda: cpu.rms_norm.rms_norm,
    triton=lambda: triton.rms_norm.rms_norm,
)
_add_rms_norm = define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    fake=lambda x, residual, weight, eps: (x.new_empty(x.shape), x.new_empty(x.shape)),
    setup_context=_setup_add,
    backward=_backward_add,
    reference=lambda: reference.rms_norm.add_rms_norm,
    cpu=lambda: cpu.rms_norm.add_rms_norm,
    triton=lambda: triton.rms_norm.add_rms_norm,
)


def check_eps(op: str, eps: float) -> float:
    """eps as a float; raises ValueError unless it is finite and at least 0."""
    expected = "finite in float32 and at least 0, as the model's config has it (often 1e-6)"
    return check_number(op, "eps", eps, expected, 0.0)


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: None = None) -> Tensor: ...
@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,  # [..., C]
    weight: Tensor,  # [C]
    eps: float,
    residual: Tensor | None = None,  # [..., C]
) -> Tensor | tuple[Tensor, Tensor]:  # y [..., C], or (y, r)
    """Root-mean-square norm over the last dimension, optionally fused with the residual addition before it.

    `r = round(x + residual)` (or x), `rstd = 1 / sqrt(mean(r^2) + eps)` in fp32, `y = round(round(r * rstd) * weight)`:
    the rounding points of Hugging Face's models. Both y and r are differentiable; the gradient of the sum goes to
    x and residual alike.

    Args:
        x: [..., C], fp32, bf16 or fp16: hidden states [T, C], or queries and keys [T, H, D] normed per head.
        weight: [C], dtype of x. If it has an fp32 `main_grad`, the weight gradient is added to that.
        eps: added to the mean square; at least 0.
        residual: [..., C], shape and dtype of x; if given, the result is (y, r).

    Raises:
        ValueError: shapes or dtypes do not fit, C is 0, or eps is negative or not finite; the message names it.
        TypeError: x, weight or residual is not a tensor, or x has another dtype.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.
    """
    if is_dynamo_compiling() and has_main_grad(weight):
        return outside_graph("rms_norm", rms_norm, x, weight, eps, residual)
    if not (isinstance(x, Tensor) and isinstance(weight, Tensor)):
        raise not_tensor("rms_norm", x=x, weight=weight)
    if not (residual is None or isinstance(residual, Tensor)):
        raise not_tensor("rms_norm", residual=residual)
    check(weight.dim() == 1, lambda: f"rms_norm: weight is {tuple(weight.shape)}; expected one dimension [C]")
    check(x.dim() >= 1, lambda: "rms_norm: x has no dimension; it must be [..., C]")
    c = weight.shape[0]
    check(c > 0, lambda: "rms_norm: weight is (0,); it must have at least one channel")
    check(x.shape[-1] == c, lambda: f"rms_norm: x is {tuple(x.shape)}, weight [{c}]; x must end in C={c}")
    eps = check_eps("rms_norm", eps)
    check_float("rms_norm", "x", x)
    check(x.dtype == weight.dtype, lambda: f"rms_norm: x is {x.dtype}, weight {weight.dtype}; cast one of them")
    if residual is None:
        if is_stock():
            return stock.rms_norm(x, weight, eps)
        return _rms_norm(x.contiguous(), weight, eps)
    check(
        residual.shape == x.shape and residual.dtype == x.dtype,
        lambda: (
            f"rms_norm: residual is {tuple(residual.shape)} {residual.dtype}, x {tuple(x.shape)} {x.dtype}; "
            "both must have one shape and dtype"
        ),
    )
    if is_stock():
        return stock.add_rms_norm(x, residual, weight, eps)
    return _add_rms_norm(x.contiguous(), residual.contiguous(), weight, eps)
