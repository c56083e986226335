"""Autograd of the ops: refusal of derivatives that they do not have, and weight gradients that accumulate in fp32.

A parameter's `main_grad` (Megatron's name) is an fp32 buffer onto which backwards add in place of `.grad`. The chain of
additions, and with it the bits, is then the same for any split of a batch into micro-batches on a CPU, and for splits
at multiples of 8192 tokens on a GPU (docs/contract.md).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functions
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling

from rlkernel.ops.stock_switch import is_stock

_is_batched = torch._C._functorch.is_legacy_batchedtensor
_current_backward, _will_run = torch._C._current_graph_task_id, torch._C._will_engine_execute_node

MAIN_GRAD_UNSEEN = (
    "torch.compile does not see main_grad, and its gradient would go to .grad instead; compile without fullgraph, "
    "which leaves this op out, or leave the parameter without main_grad"
)

# ---- derivatives that do not exist ----------------------------------------------------------------


def once_differentiable(op: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `backward` so that differentiating its gradients raises; torch would silently drop the second derivative.

    The error node has the tensors that the gradients were computed from as inputs, so every second derivative reaches
    it. torch's own decorator attaches the node to new leaves, which `autograd.grad` and `hessian` never reach.
    """
    message = f"{op}: there is no second derivative; leave create_graph=True out, or this op out of the penalty"

    def once(ctx: Any, *upstream: Any) -> Any:
        _refuse_batched(op, upstream)
        if not torch.is_grad_enabled():  # no create_graph
            return backward(ctx, *upstream)
        ctx = _UnpackedOnce(ctx)
        with torch.no_grad():
            gradients = backward(ctx, *upstream)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        leaves = [g if g is None else g.detach().requires_grad_() for g in gradients]
        sources = (*ctx.saved_tensors, getattr(ctx, "weight", None), *upstream)
        inputs = [*leaves, *(t for t in sources if t is not None and t.requires_grad)]
        return _functions.DelayedError(message.encode(), len(inputs))(*inputs)[: len(leaves)]

    return once


class _UnpackedOnce:
    """A ctx that unpacks its saved tensors once, because activation checkpointing does not allow a second time."""

    def __init__(self, ctx: Any) -> None:
        self.__dict__.update(_ctx=ctx, saved_tensors=ctx.saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)


def unbatched(op: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `backward` so that it raises for a batch of upstream gradients."""

    def checked(ctx: Any, *upstream: Any) -> Any:
        _refuse_batched(op, upstream)
        return backward(ctx, *upstream)

    return checked


def _refuse_batched(op: str, upstream: tuple[Any, ...]) -> None:
    """Raises if autograd passes a batch of upstream gradients as one tensor, which a kernel cannot read."""
    if is_dynamo_compiling():
        return
    for gradient in upstream:
        if gradient is not None and _is_batched(gradient):
            raise NotImplementedError(
                f"{op}: its backward takes one upstream gradient at a time; leave is_grads_batched=True or "
                "vectorize=True out"
            )


def refuse_gradient(op: str, names: tuple[str, ...], args: tuple[Any, ...]) -> None:
    """Raises if an argument of an op without a backward requires a gradient, which torch would silently leave out."""
    for name, a in zip(names, args, strict=False):
        if isinstance(a, Tensor) and a.requires_grad:
            raise no_gradient(op, name)


def no_gradient(op: str, name: str) -> RuntimeError:
    """The error for an argument that requires a gradient although the op computes none for it."""
    return RuntimeError(
        f"{op}: {name} requires a gradient, and the op gives it none; call it under torch.no_grad(), or pass "
        f"{name}.detach()"
    )


def bump_versions(*tensors: Tensor) -> None:
    """Tells autograd that tensors were written in place."""
    for tensor in tensors:
        if not tensor.is_inference():
            increment_version(tensor)


# ---- main_grad -----------------------------------------------------------------------------------

main_grad_lock = threading.RLock()
"""Taken for each accumulation into a `main_grad`, because kernels release the GIL, and torch's lock protects only
`.grad`."""


def main_grad(op: str, parameter: Tensor) -> Tensor | None:
    """The parameter's fp32 `main_grad`, into which its gradient is accumulated; None if it has none.

    Raises:
        ValueError: it is not a contiguous fp32 tensor of the parameter's shape. TypeError: it is not a tensor.
    """
    buffer: Tensor | None = getattr(parameter, "main_grad", None)
    if buffer is None:
        return None
    if not isinstance(buffer, Tensor):
        raise TypeError(f"{op}: main_grad is of type {type(buffer).__name__}; expected a tensor, zeros_like(parameter)")
    if buffer.shape != parameter.shape or buffer.dtype != torch.float32 or not buffer.is_contiguous():
        raise ValueError(
            f"{op}: main_grad is {tuple(buffer.shape)} {buffer.dtype}; expected a contiguous float32 tensor of the "
            f"parameter's shape {tuple(parameter.shape)}, as zeros_like(parameter, dtype=torch.float32) makes it"
        )
    return buffer


def has_main_grad(*parameters: Tensor | None) -> bool:
    """Whether a gradient of one of them is recorded and will be accumulated into its `main_grad`."""
    if torch.is_grad_enabled() and not is_stock():
        for p in parameters:
            if p is not None and p.requires_grad and getattr(p, "main_grad", None) is not None:
                return True
    return False


def outside_graph(op: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `fn` after a graph break of dynamo; with fullgraph that is an error.

    A public op calls it first of all, because after a later break dynamo would compile the rest of the op.
    """
    torch._dynamo.graph_break(msg=f"{op}: {MAIN_GRAD_UNSEEN}")
    return _untraced(fn, args, kwargs)


@torch._disable_dynamo
def _untraced(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)


def gradient_target(op: str, ctx: Any, index: int, parameter: Tensor) -> tuple[bool, Tensor | None]:
    """Whether this backward needs a parameter's gradient, and the `main_grad` to accumulate it into.

    If there is no `main_grad`, the gradient is returned to autograd. As with `.grad`, `autograd.grad` and
    `backward(inputs=...)` compute gradients only of the parameters that they name, and `autograd.grad` returns them.
    `index` is the parameter's index among the op's tensors; no tensor before it may be None.
    """
    if not ctx.needs_input_grad[index]:
        return False, None
    buffer = main_grad(op, parameter)
    if buffer is None or _current_backward() < 0:  # called by hand, or by a compiled autograd
        return True, buffer
    node = ctx.next_functions[index][0]
    while len(inputs := node.next_functions) == 1:  # an alias of the parameter, such as a view
        node = inputs[0][0]
    try:
        return (True, buffer) if _will_run(node) else (False, None)
    except RuntimeError:  # a leaf whose gradient autograd.grad returns
        return True, None


def weight_grad(
    op: str,
    ctx: Any,
    index: int,
    parameter: Tensor,
    accumulate: Callable[[Tensor], None],
    compute: Callable[[], Tensor] | None = None,
) -> Tensor | None:
    """Gradient of a parameter in its dtype; None if it was accumulated into `main_grad` or is not needed.

    Args:
        ctx, index: of the backward, as in `gradient_target`.
        parameter: the forward's own tensor, kept as `ctx.weight`. Under saved-tensor hooks (activation checkpointing)
            `ctx.saved_tensors` holds a copy without the attribute.
        accumulate: adds the gradient to an fp32 buffer in the contract's order.
        compute: returns a new gradient; None: the result of `accumulate` onto zeros, rounded.
    """
    needed, buffer = gradient_target(op, ctx, index, parameter)
    if not needed:
        return None
    if buffer is not None:
        with main_grad_lock:
            accumulate(buffer)
        return None
    if compute is not None:
        return compute()
    total = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
    accumulate(total)
    return total.to(parameter.dtype)
