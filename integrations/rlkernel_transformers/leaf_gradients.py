"""fp32 gradients of parameters that FSDP2 gathers in bf16, for a leaf of the gradient tree.

FSDP2 gives the forward a bf16 copy of its fp32 shards. A use of that copy is an alias with a `main_grad`, onto which
the ops accumulate; the alias's backward hands the buffer to autograd as the copy's fp32 gradient, and FSDP2 reduces it.
The buffers exist from a layer's backward to its reduce-scatter: 4 bytes per gathered parameter in place of 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MARK = "_rlkernel_leaf"
"""Attribute of the modules whose gradients `main_grads` wants in fp32."""


def uses(modules: Sequence[Any], parameters: list[Tensor]) -> list[Tensor]:
    """Aliases of the modules' parameters whose gradients reach autograd in fp32; the parameters themselves if FSDP2 did
    not gather them in half precision, or their gradients are not wanted in fp32.

    Gradients of one call lie side by side, so a joined product writes them in one pass.
    """
    if not parameters or not torch.is_grad_enabled() or any(MARK not in module.__dict__ for module in modules):
        return parameters
    if any(not p.requires_grad or p.dtype == torch.float32 for p in parameters):
        return parameters
    buffers = _Buffers([p.shape for p in parameters], parameters[0].device)
    found = []
    for i, p in enumerate(parameters):
        if p.grad_dtype != torch.float32:
            p.grad_dtype = torch.float32
        use = _Alias.apply(p, buffers, i)
        use.buffers, use.place = buffers, i
        found.append(use)
    return found


class _Buffers:
    """Gradients of the parameters of one product, allocated together by the first backward that needs one."""

    def __init__(self, shapes: Sequence[torch.Size], device: torch.device):
        self.shapes, self.device = shapes, device
        self.views: list[Tensor | None] = [None] * len(shapes)

    def at(self, index: int) -> Tensor:
        """The buffer of one parameter, zero at first."""
        view = self.views[index]
        if view is None:
            rows = [shape[0] for shape in self.shapes]
            whole = torch.zeros((sum(rows), *self.shapes[0][1:]), dtype=torch.float32, device=self.device)
            self.views = list(whole.split(rows))
            view = self.views[index]
            assert view is not None
        return view

    def take(self, index: int) -> Tensor | None:
        """The buffer of one parameter, which the next backward allocates anew."""
        view, self.views[index] = self.views[index], None
        return view


class _Use(Tensor):
    """A parameter's alias; `main_grad` is what the ops accumulate onto."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # ops return plain tensors
    buffers: _Buffers
    place: int

    @property
    def main_grad(self) -> Tensor:
        return self.buffers.at(self.place)


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, buffers: _Buffers, index: int) -> Any:
        ctx.buffers, ctx.index = buffers, index
        ctx.set_materialize_grads(False)
        return parameter.detach().as_subclass(_Use)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        found = ctx.buffers.take(ctx.index)
        if grad is not None:  # of an op that does not accumulate
            found = grad.float() if found is None else found.add_(grad)
        return found, None, None
