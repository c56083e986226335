"""bf16 weights with fp32 masters, without autocast: fp32 gradient buffers onto which the ops accumulate.

Weight gradients of micro-batches then continue one fp32 chain, in the contract's order, instead of being rounded to
bf16 and added. `rlkernel.optim.AdamW` keeps the masters.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rlkernel_transformers import leaf_gradients, support


def main_grads(model: nn.Module) -> None:
    """Gives every trainable parameter a zeroed fp32 `main_grad`, which is also its `.grad`.

    Backwards accumulate onto it, `torch.nn.utils.clip_grad_norm_` scales it, `AdamW` reads it and `model.zero_grad()`
    zeroes it. A tied embedding has a second buffer for its use as head, which `fold_main_grads` adds to the first;
    `AdamW` raises if that was not called.

    After FSDP2's `fully_shard`, which keeps the fp32 masters and the fp32 gradients itself, it makes the gradients of
    parameters that are gathered in bf16 reach the reduce-scatter in fp32, in place of bf16 (`leaf_gradients.py`).

    Raises:
        UnsupportedModelError: some parameters are sharded and others are not.
    """
    found = support.find_model(model)
    if all(isinstance(p, DTensor) for p in found.parameters()):
        for module in found.modules():
            if module._parameters:
                module.__dict__[leaf_gradients.MARK] = True
        return
    tied = found.lm_head.weight is support.decoder_of(found).embed_tokens.weight
    groups: list[list[nn.Parameter]] = []
    seen: set[int] = set()
    for layer in support.decoder_of(found).layers:
        for block, names in ((layer.self_attn, ("q_proj", "k_proj", "v_proj")), (layer.mlp, ("gate_proj", "up_proj"))):
            for name in ("weight", "bias"):
                given = [getattr(getattr(block, n), name, None) for n in names]
                group = [p for p in given if isinstance(p, nn.Parameter) and p.requires_grad]
                if len(group) == len(names):
                    groups.append(group)  # one buffer, so that a joined product writes one gradient
                    seen.update(id(p) for p in group)
    groups += [[p] for p in found.parameters() if p.requires_grad and id(p) not in seen]
    for group in groups:
        if any(type(p) is not nn.Parameter for p in group):
            raise support.UnsupportedModelError(
                f"main_grads: a parameter is a {type(group[0]).__name__}; call it after the last fully_shard, with "
                "every parameter in a group, or before any wrapper"
            )
        rows = [p.shape[0] for p in group]
        shape = (sum(rows), *group[0].shape[1:])
        buffer = torch.zeros(shape, dtype=torch.float32, device=group[0].device)
        for p, view in zip(group, buffer.split(rows), strict=True):
            p.main_grad = view  # type: ignore[attr-defined]
    if tied and found.lm_head.weight.requires_grad:
        weight = found.lm_head.weight
        weight.head_main_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    _set_grads(found)
    for module in {id(m): m for m in (model, found)}.values():
        module.zero_grad = _ZeroGrad(_zero_grad, module)  # type: ignore[method-assign]


def fold_main_grads(model: nn.Module) -> None:
    """Adds the head's gradient onto a tied embedding's `main_grad`; call it once, after a step's last backward."""
    weight = support.decoder_of(support.find_model(model)).embed_tokens.weight
    head = getattr(weight, "head_main_grad", None)
    if head is not None:
        weight.main_grad.add_(head)
        head.zero_()


def settle(model: nn.Module) -> None:
    """Makes every `main_grad` complete after a backward: adds a tied head's gradient, and gradients of stock operators
    if a wrapper's `zero_grad` made `.grad` another tensor."""
    for p in model.parameters():
        main_grad = getattr(p, "main_grad", None)
        if main_grad is not None and p.grad is not None and p.grad is not main_grad:
            main_grad += p.grad
            p.grad = None
    fold_main_grads(model)


def drop(model: nn.Module) -> None:
    """Removes the buffers."""
    for module in model.modules():
        module.__dict__.pop(leaf_gradients.MARK, None)
        if getattr(module.__dict__.get("zero_grad"), "__func__", None) is _zero_grad:
            del module.zero_grad
    for p in model.parameters():
        if hasattr(p, "main_grad"):
            p.grad = None
            p.grad_dtype = None  # otherwise it would stay fp32 when the model is cast
            del p.main_grad
        if hasattr(p, "head_main_grad"):
            del p.head_main_grad


class _ZeroGrad(support.Method):
    """`zero_grad` of a model with buffers: pickle refuses it, because it would separate them from `.grad`."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a model with main_grads cannot be pickled, as by torch.save(model): save model.state_dict(), or call "
            "rlkernel_transformers.remove(model) first"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _ZeroGrad:
        return type(self)(self.func, *copy.deepcopy(self.args, memo))


def _set_grads(model: nn.Module) -> None:
    """Makes each `main_grad` the parameter's `.grad`."""
    for p in model.parameters():
        buffer = getattr(p, "main_grad", None)
        if buffer is not None and p.grad is not buffer:
            p.grad = None  # grad_dtype cannot change while a gradient of another dtype is set
            p.grad_dtype = torch.float32
            p.grad = buffer


def _zero_grad(self: Any, set_to_none: bool = True) -> None:
    """Zeroes the buffers and makes them `.grad` again; zeroes other gradients as torch does."""
    type(self).zero_grad(self, set_to_none)
    for p in self.parameters():
        for name in ("main_grad", "head_main_grad"):
            buffer = getattr(p, name, None)
            if buffer is not None:
                buffer.zero_()
    _set_grads(self)
