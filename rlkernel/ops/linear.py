"""linear: y = x weight^T + bias with one fp32 chain per chunk of K, for every batch size.

Contract: orders.py, `linear`. `linear` checks the arguments and calls `_linear`, which `define` registers with its four
implementations (ops/define.py); on CUDA the call continues in kernels/cuda/linear.py. `linear_dgrad`, `linear_wgrad`,
`linear_wgrad_` and `bias_grad_` are its gradients: ops without a backward, whose arguments are not checked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from rlkernel.kernels import cpu, cuda, reference, stock, triton
from rlkernel.ops.autograd import has_main_grad, outside_graph, weight_grad
from rlkernel.ops.checks import FLOATS, check, check_float, flatten_rows, is_int, not_tensor
from rlkernel.ops.define import define
from rlkernel.ops.stock_switch import is_stock


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, chunks: int, dgrad_chunks: int, out_dtype: torch.dtype | None
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype or x.dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, _, dgrad_chunks, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.weight, ctx.bias = weight, bias
    ctx.dgrad_chunks = dgrad_chunks


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    dy = dy.to(x.dtype).contiguous()
    dx = linear_dgrad(dy, weight, ctx.dgrad_chunks) if ctx.needs_input_grad[0] else None
    dw = weight_grad("linear", ctx, 1, ctx.weight, lambda g: linear_wgrad_(g, dy, x), lambda: linear_wgrad(dy, x))
    db = weight_grad("linear", ctx, 2, ctx.bias, lambda g: bias_grad_(g, dy))
    return dx, dw, db, None, None, None


linear_dgrad = define(
    "linear_dgrad(Tensor dy, Tensor weight, int chunks) -> Tensor",
    fake=lambda dy, weight, chunks: dy.new_empty((dy.shape[0], weight.shape[1])),
    reference=lambda: reference.linear.linear_dgrad,
    cpu=lambda: cpu.linear.linear_dgrad,
    triton=lambda: triton.linear.linear_dgrad,
    cuda=lambda: cuda.linear.linear_dgrad,
)
linear_wgrad = define(
    "linear_wgrad(Tensor dy, Tensor x) -> Tensor",
    fake=lambda dy, x: dy.new_empty((dy.shape[1], x.shape[1])),
    reference=lambda: reference.linear.linear_wgrad,
    cpu=lambda: cpu.linear.linear_wgrad,
    triton=lambda: triton.linear_grad.linear_wgrad,
    cuda=lambda: cuda.linear.linear_wgrad,
)
linear_wgrad_ = define(
    "linear_wgrad_(Tensor(a!) grad, Tensor dy, Tensor x) -> ()",
    fake=lambda grad, dy, x: None,
    reference=lambda: reference.linear.linear_wgrad_,
    cpu=lambda: cpu.linear.linear_wgrad_,
    triton=lambda: triton.linear_grad.linear_wgrad_,
    cuda=lambda: cuda.linear.linear_wgrad_,
)
bias_grad_ = define(
    "bias_grad_(Tensor(a!) grad, Tensor dy) -> ()",
    fake=lambda grad, dy: None,
    reference=lambda: reference.linear.bias_grad_,
    cpu=lambda: cpu.linear.bias_grad_,
    triton=lambda: triton.linear_grad.bias_grad_,
)
_linear = define(
    "linear(Tensor x, Tensor weight, Tensor? bias, int chunks, int dgrad_chunks, ScalarType? out_dtype) -> Tensor",
    fake=_fake,
    setup_context=_setup,
    backward=_backward,
    reference=lambda: reference.linear.linear,
    cpu=lambda: cpu.linear.linear,
    triton=lambda: triton.linear.linear,
    cuda=lambda: cuda.linear.linear,
)


def _check_chunks(name: str, p: int, size: int) -> None:
    check(
        is_int(p) and p >= 1 and p & (p - 1) == 0 and size % p == 0,
        lambda: f"linear: {name}={p!r} must be a power of two that divides {size}",
    )


def linear(
    x: Tensor,  # [..., K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
    *,
    chunks: int = 1,
    dgrad_chunks: int = 1,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # [..., N]
    """Batch-invariant `x @ weight.T + bias`.

    Args:
        x: [..., K], fp32, bf16 or fp16.
        weight: [N, K], dtype of x. If it has an fp32 `main_grad`, the weight gradient is added to that.
        bias: [N], dtype of x, added in fp32 before the result is rounded.
        chunks: P, a power of two that divides K: the number of chains that a binary tree adds. A property of the layer
            (1 for column-parallel weights, the run's `tp_leaves` for row-parallel ones), never of the batch.
        dgrad_chunks: the same for the input gradient, a power of two that divides N.
        out_dtype: dtype of the result, default that of x; float32 returns the unrounded accumulator (logits).

    Raises:
        ValueError: shapes, dtypes, out_dtype or chunk counts do not fit; the message names the argument.
        TypeError: x, weight or bias is not a tensor, or x has another dtype.
    """
    if is_dynamo_compiling() and has_main_grad(weight, bias):
        options = {"chunks": chunks, "dgrad_chunks": dgrad_chunks, "out_dtype": out_dtype}
        return outside_graph("linear", linear, x, weight, bias, **options)
    if not (isinstance(x, Tensor) and isinstance(weight, Tensor)):
        raise not_tensor("linear", x=x, weight=weight)
    if not (bias is None or isinstance(bias, Tensor)):
        raise not_tensor("linear", bias=bias)
    check(weight.dim() == 2, lambda: f"linear: weight is {tuple(weight.shape)}; it must be [N, K]")
    check(x.dim() >= 1, lambda: "linear: x has no dimension; it must be [..., K]")
    n, k = weight.shape
    check(x.shape[-1] == k, lambda: f"linear: x is {tuple(x.shape)}, weight {tuple(weight.shape)}; x must end in K={k}")
    check(x.dtype == weight.dtype, lambda: f"linear: x is {x.dtype}, weight {weight.dtype}; cast one of them")
    if bias is not None:
        check(
            bias.shape == (n,) and bias.dtype == x.dtype,
            lambda: f"linear: bias is {tuple(bias.shape)} {bias.dtype}; expected [N={n}] {x.dtype}",
        )
    if out_dtype is not None and out_dtype not in FLOATS:
        raise ValueError(f"linear: out_dtype={out_dtype}; expected float32, bfloat16, float16, or None for that of x")
    if is_stock():
        return stock.linear(x, weight, bias, out_dtype)
    check_float("linear", "x", x)
    _check_chunks("chunks", chunks, k)
    _check_chunks("dgrad_chunks", dgrad_chunks, n)
    if x.dim() == 2:
        return _linear(x, weight, bias, chunks, dgrad_chunks, out_dtype)
    y = _linear(flatten_rows(x), weight, bias, chunks, dgrad_chunks, out_dtype)
    return y.view(*x.shape[:-1], n)
