"""Linear layers with the same input as one product: query, key and value, or gate and up.

The decoder of `rlkernel.models` fuses them, which makes their input gradient one chain; equal bits need the same here.
The joined weight is a view if the weights share a buffer (`join_storage`), else a temporary copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.distributed import ProcessGroup

from rlkernel import ops
from rlkernel.ops.autograd import (
    gradient_target,
    has_main_grad,
    main_grad_lock,
    once_differentiable,
    outside_graph,
)
from rlkernel.ops.linear import bias_grad_, linear_dgrad, linear_wgrad, linear_wgrad_
from rlkernel.parallel.tensor import column_parallel_dgrad


def joined_linear(
    x: Tensor,  # [T, K]
    weights: list[Tensor],
    biases: list[Tensor],
    group: ProcessGroup | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # [T, sum N]
    """`ops.linear` with the concatenated weights (and biases, if any) of several layers.

    Args:
        group: tensor-parallel ranks, each of which holds rows of every layer.
        out_dtype: as in `ops.linear`.
    """
    if ops.is_stock():
        bias = torch.cat(biases).to(x.dtype) if biases else None
        return ops.linear(x, torch.cat(weights).to(x.dtype), bias, out_dtype=out_dtype)
    if is_dynamo_compiling() and has_main_grad(*weights, *biases):
        return outside_graph("linear", joined_linear, x, weights, biases, group, out_dtype)
    return _Joined.apply(x, *weights, *(biases if biases else (None,) * len(weights)), group, out_dtype)


def join_storage(layers: Sequence[nn.Linear]) -> None:
    """Moves the weights into one buffer, and the biases into another, so that joining them is a view."""
    for name in ("weight", "bias"):
        tensors = [getattr(layer, name) for layer in layers]
        if any(type(t) is not nn.Parameter for t in tensors) or _adjacent(tensors):
            continue
        if len({(t.device, t.dtype, t.requires_grad) for t in tensors}) > 1 or tensors[0].device.type == "meta":
            continue
        buffer = torch.cat([t.data for t in tensors])
        for t, view in zip(tensors, buffer.split([t.shape[0] for t in tensors]), strict=True):
            t.data = view
    for layer in layers:
        if _own_storages not in layer._state_dict_hooks.values():
            layer.register_state_dict_post_hook(_own_storages)


def separate_storage(layers: Sequence[nn.Linear]) -> None:
    """Undoes `join_storage`: every weight and bias gets its own buffer again."""
    for layer in layers:
        for key in [key for key, hook in layer._state_dict_hooks.items() if hook is _own_storages]:
            del layer._state_dict_hooks[key]
        for t in (layer.weight, layer.bias):
            if type(t) is nn.Parameter and _shares_storage(t):
                t.data = t.data.clone()


def _own_storages(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Gives each weight in a state dict its own storage object over the same memory.

    safetensors and accelerate treat tensors of one storage as tied weights and save one of them. The parameters
    themselves keep one storage, because CUDA shares memory between processes by its first address only.
    """
    for name in module._parameters:
        t = state_dict.get(prefix + name)
        if type(t) is Tensor and t.device.type in ("cpu", "cuda") and _shares_storage(t):
            state_dict[prefix + name] = torch.from_dlpack(t)


def _shares_storage(t: Tensor) -> bool:
    """Whether a tensor's storage holds more than the tensor."""
    return t.untyped_storage().nbytes() > t.numel() * t.element_size()


def join(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors concatenated: a view if they are adjacent in memory, else a copy."""
    if len(tensors) == 1:
        return tensors[0]
    if torch.compiler.is_compiling() or not _adjacent(tensors):
        return torch.cat(list(tensors))
    first = tensors[0].detach()
    return first.as_strided((sum(t.shape[0] for t in tensors), *first.shape[1:]), first.stride())


def _joined_as(x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """The tensors concatenated, in the dtype of x: under autocast fp32 parameters are rounded at each use."""
    return join(tensors).to(x.dtype)


def _adjacent(tensors: Sequence[Tensor]) -> bool:
    first = tensors[0]
    end = first.data_ptr()
    storage = first.untyped_storage().data_ptr()
    for t in tensors:
        if t.data_ptr() != end or not t.is_contiguous() or t.untyped_storage().data_ptr() != storage:
            return False
        end += t.numel() * t.element_size()
    return storage != 0


class _Joined(torch.autograd.Function):
    """`ops.linear` of joined weights; saves the weights themselves, never the joined copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> Tensor:
        *tensors, ctx.group, out_dtype = arguments
        count = len(tensors) // 2
        weights, biases = tensors[:count], tensors[count:]
        ctx.save_for_backward(x, *weights)
        # These have attributes such as main_grad; the copies in saved_tensors, under checkpointing, do not.
        ctx.weights, ctx.biases = weights, biases
        bias = None if biases[0] is None else _joined_as(x, biases)
        return ops.linear(x, _joined_as(x, weights), bias, out_dtype=out_dtype)

    @staticmethod
    @partial(once_differentiable, "linear of joined weights")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        dy = dy.to(x.dtype).contiguous()
        dx = None
        if ctx.needs_input_grad[0] and ctx.group is None:
            dx = linear_dgrad(dy, _joined_as(x, weights), 1)
        elif ctx.needs_input_grad[0]:
            rows = [weight.shape[0] for weight in weights]
            dx = column_parallel_dgrad(dy, _joined_as(x, weights), rows, ctx.group)
        dws = _gradients(ctx, 1, ctx.weights, dy, lambda g, dy: linear_wgrad_(g, dy, x), lambda: linear_wgrad(dy, x))
        if ctx.biases[0] is None:
            return dx, *dws, *ctx.biases, None, None
        return dx, *dws, *_gradients(ctx, 1 + len(weights), ctx.biases, dy, bias_grad_), None, None


def _gradients(
    ctx: Any,
    index: int,
    parameters: Sequence[Tensor],
    dy: Tensor,
    accumulate: Callable[[Tensor, Tensor], None],
    compute: Callable[[], Tensor] | None = None,
) -> Sequence[Tensor | None]:
    """Gradients of joined parameters, each None where it was accumulated into `main_grad`.

    Args:
        index: of the first parameter among the inputs.
        accumulate: adds the gradient of given columns of dy onto an fp32 buffer.
        compute: returns the gradient of all parameters; None: `accumulate` onto zeros, rounded.
    """
    sizes = [p.shape[0] for p in parameters]
    targets = [gradient_target("linear", ctx, index + i, p) for i, p in enumerate(parameters)]
    buffers = [buffer for _, buffer in targets if buffer is not None]

    def fresh(shape: Sequence[int], dy: Tensor) -> Tensor:
        total = torch.zeros(shape, dtype=torch.float32, device=dy.device)
        accumulate(total, dy)
        return total.to(dy.dtype)

    if not buffers and any(needed for needed, _ in targets):
        grads = (compute() if compute is not None else fresh((sum(sizes),), dy)).split(sizes)
        return [grad if needed else None for grad, (needed, _) in zip(grads, targets, strict=True)]
    if len(buffers) == len(targets) and _adjacent(buffers):
        with main_grad_lock:
            accumulate(join(buffers), dy)
        return [None] * len(sizes)
    out: list[Tensor | None] = []
    for p, (needed, buffer), columns in zip(parameters, targets, dy.split(sizes, dim=1), strict=True):
        if buffer is not None:
            with main_grad_lock:
                accumulate(buffer, columns.contiguous())
        out.append(fresh(p.shape, columns.contiguous()) if needed and buffer is None else None)
    return out
