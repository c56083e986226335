"""Linear layers over the same input as one product: query, key and value, or gate and up.

The decoder of `rlkernel.models` holds them fused, and the input gradient of the fused layer is one chain. So for its
bits the layers of transformers are joined too: by a view where their weights lie side by side (`lay_side_by_side`),
else by a copy that lives as long as the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from rlkernel import ops
from rlkernel.ops._library import adding, asked, has_main_grad, once_differentiable, outside_graph


def joined_linear(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:  # [T, K] -> [T, sum N]
    """`ops.linear` with the weights (and biases, or none) of several layers one under the other."""
    if ops.is_stock():
        return ops.linear(x, torch.cat(weights).to(x.dtype), torch.cat(biases).to(x.dtype) if biases else None)
    if is_dynamo_compiling() and has_main_grad(*weights, *biases):
        return outside_graph("linear", joined_linear, x, weights, biases)
    return _Joined.apply(x, *weights, *(biases if biases else (None,) * len(weights)))


def lay_side_by_side(layers: Sequence[nn.Linear]) -> None:
    """Moves the weights, and the biases, into one buffer each, so that joining them is a view. Values are kept."""
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


def part(layers: Sequence[nn.Linear]) -> None:
    """Undoes `lay_side_by_side`: every weight gets a buffer of its own again."""
    for layer in layers:
        for key in [key for key, hook in layer._state_dict_hooks.items() if hook is _own_storages]:
            del layer._state_dict_hooks[key]
        for t in (layer.weight, layer.bias):
            if type(t) is nn.Parameter and _is_part(t):
                t.data = t.data.clone()


def _own_storages(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Gives the weights in a state dict a storage each, of the same memory.

    safetensors and accelerate take tensors of one storage for tied weights and save one of them. The parameters
    themselves stay in one storage, because CUDA shares memory between processes by its first address only.
    """
    for name in module._parameters:
        t = state_dict.get(prefix + name)
        if type(t) is Tensor and t.device.type in ("cpu", "cuda") and _is_part(t):
            state_dict[prefix + name] = torch.from_dlpack(t)


def _is_part(t: Tensor) -> bool:
    """Whether a tensor's storage holds more than the tensor."""
    return t.untyped_storage().nbytes() > t.numel() * t.element_size()


def join(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors one under the other: a view where they lie so, else a copy."""
    if len(tensors) == 1:
        return tensors[0]
    if torch.compiler.is_compiling() or not _adjacent(tensors):
        return torch.cat(list(tensors))
    first = tensors[0].detach()
    return first.as_strided((sum(t.shape[0] for t in tensors), *first.shape[1:]), first.stride())


def _joined_as(x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """The tensors one under the other, in the dtype of x: under autocast fp32 parameters are rounded at each use."""
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
    def forward(ctx: Any, x: Tensor, *tensors: Any) -> Tensor:
        count = len(tensors) // 2
        weights, biases = tensors[:count], tensors[count:]
        ctx.save_for_backward(x, *weights)
        # Attributes such as main_grad are on these, not on what saved_tensors returns under checkpointing.
        ctx.weights, ctx.biases = weights, biases
        return ops.linear(x, _joined_as(x, weights), None if biases[0] is None else _joined_as(x, biases))

    @staticmethod
    @partial(once_differentiable, "linear of joined weights")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        dy = dy.to(x.dtype).contiguous()
        kernels = torch.ops.rlkernel
        dx = kernels.linear_dgrad(dy, _joined_as(x, weights), 1) if ctx.needs_input_grad[0] else None
        dws = _gradients(ctx, 1, ctx.weights, dy, lambda g, d: kernels.linear_wgrad_(g, d, x), kernels.linear_wgrad, x)
        if ctx.biases[0] is None:
            return dx, *dws, *ctx.biases
        return dx, *dws, *_gradients(ctx, 1 + len(weights), ctx.biases, dy, kernels.bias_grad_, None, x)


def _gradients(
    ctx: Any, place: int, parameters: Sequence[Tensor], dy: Tensor, add: Any, fresh: Any, x: Tensor
) -> Sequence[Tensor | None]:
    """Gradients of joined parameters, the first at `place` of the inputs; None each where they went to `main_grad`."""
    sizes = [p.shape[0] for p in parameters]
    wanted, buffers = zip(*(asked("linear", ctx, place + i, p) for i, p in enumerate(parameters)), strict=True)
    given = [b for b in buffers if b is not None]
    if not given and any(wanted):
        if fresh is not None:
            grads = fresh(dy, x).split(sizes)
        else:
            total = torch.zeros(sum(sizes), dtype=torch.float32, device=dy.device)
            add(total, dy)
            grads = total.to(dy.dtype).split(sizes)
        return [g if w else None for g, w in zip(grads, wanted, strict=True)]
    if len(given) == len(buffers) and _adjacent(given):
        with adding:
            add(join(given), dy)
        return [None] * len(sizes)
    out: list[Tensor | None] = []
    for p, w, buffer, rows in zip(parameters, wanted, buffers, dy.split(sizes, dim=1), strict=True):
        grad = None
        if buffer is not None:
            with adding:
                add(buffer, rows.contiguous())
        elif w:
            total = torch.zeros(p.shape, dtype=torch.float32, device=p.device)
            add(total, rows.contiguous())
            grad = total.to(dy.dtype)
        out.append(grad)
    return out
