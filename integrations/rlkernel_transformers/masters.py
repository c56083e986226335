"""bf16 weights over fp32 masters without autocast: fp32 gradient buffers that the ops add to, seen as `.grad`.

Weight gradients of micro-batches then continue one fp32 chain, in the contract's order, instead of being rounded to
bf16 and added. `AdamW` of `rlkernel.training` keeps the masters.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from rlkernel_transformers import support


def main_grads(model: nn.Module) -> None:
    """Gives every trainable parameter a zeroed fp32 `main_grad`, which is its `.grad` too.

    Backwards add to it; clipping by `torch.nn.utils.clip_grad_norm_` scales it; `AdamW` reads it. `model.zero_grad()`
    zeroes it. A tied embedding has a second buffer for its use as head; `fold_main_grads` adds it up, and `AdamW`
    raises where that was left out.

    Raises:
        UnsupportedModelError: parameters are sharded (FSDP2 keeps fp32 masters itself, see docs).
    """
    found = support.find_model(model)
    tied = found.lm_head.weight is found.model.embed_tokens.weight
    groups: list[list[nn.Parameter]] = []
    seen: set[int] = set()
    for layer in found.model.layers:
        for block, names in ((layer.self_attn, ("q_proj", "k_proj", "v_proj")), (layer.mlp, ("gate_proj", "up_proj"))):
            for name in ("weight", "bias"):
                found_parts = [getattr(getattr(block, n), name, None) for n in names]
                parts = [p for p in found_parts if isinstance(p, nn.Parameter) and p.requires_grad]
                if len(parts) == len(names):
                    groups.append(parts)  # one buffer, so that a joined product writes one gradient
                    seen.update(id(p) for p in parts)
    groups += [[p] for p in found.parameters() if p.requires_grad and id(p) not in seen]
    for parts in groups:
        if any(type(p) is not nn.Parameter for p in parts):
            raise support.UnsupportedModelError(
                "main_grads: the parameters are sharded; let FSDP2 keep the fp32 masters: "
                "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
            )
        rows = [p.shape[0] for p in parts]
        shape = (sum(rows), *parts[0].shape[1:])
        buffer = torch.zeros(shape, dtype=torch.float32, device=parts[0].device)
        for p, view in zip(parts, buffer.split(rows), strict=True):
            p.main_grad = view  # type: ignore[attr-defined]
    if tied and found.lm_head.weight.requires_grad:
        weight = found.lm_head.weight
        weight.head_main_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    _show(found)
    for module in {id(m): m for m in (model, found)}.values():
        module.zero_grad = _ZeroGrad(_zero_grad, module)  # type: ignore[method-assign]


def fold_main_grads(model: nn.Module) -> None:
    """Adds the head's share onto a tied embedding's `main_grad`; call once, after a step's last backward."""
    for weight in _embedding(model):
        head = getattr(weight, "head_main_grad", None)
        if head is not None:
            weight.main_grad.add_(head)  # type: ignore[attr-defined]
            head.zero_()


def drop(model: nn.Module) -> None:
    """Takes the buffers away."""
    for module in model.modules():
        if getattr(module.__dict__.get("zero_grad"), "__func__", None) is _zero_grad:
            del module.zero_grad
    for p in model.parameters():
        if hasattr(p, "main_grad"):
            p.grad = None
            p.grad_dtype = None  # its dtype of now would stay when the model is cast
            del p.main_grad
        if hasattr(p, "head_main_grad"):
            del p.head_main_grad


class _ZeroGrad(support.Method):
    """`zero_grad` of a model with buffers: refused by pickle, which would part them from `.grad`."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a model with main_grads cannot be pickled, as by torch.save(model): save model.state_dict(), or call "
            "rlkernel_transformers.remove(model) first"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _ZeroGrad:
        return type(self)(self.func, *copy.deepcopy(self.args, memo))


def _embedding(model: nn.Module) -> list[Tensor]:
    return [support.find_model(model).model.embed_tokens.weight]


def _show(model: nn.Module) -> None:
    for p in model.parameters():
        buffer = getattr(p, "main_grad", None)
        if buffer is not None and p.grad is not buffer:
            p.grad = None  # of the parameter's own dtype, which would not let grad_dtype change
            p.grad_dtype = torch.float32
            p.grad = buffer


def _zero_grad(self: Any, set_to_none: bool = True) -> None:
    """Zeroes the buffers, and lets them be `.grad` again; other parameters as torch does."""
    type(self).zero_grad(self, set_to_none)
    for p in self.parameters():
        for name in ("main_grad", "head_main_grad"):
            buffer = getattr(p, name, None)
            if buffer is not None:
                buffer.zero_()
    _show(self)
