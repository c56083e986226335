"""LoRA layers of PEFT in two exact modes: base and low-rank product separately, or the merged weight.

"low-rank" is PEFT's own forward on our ops. "merged" computes with `round(W + scaling * B A)`, the weight that an
engine holds after a merge, so training equals a rollout with merged weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rlkernel import ops
from rlkernel.ops.autograd import once_differentiable
from rlkernel_transformers import support
from rlkernel_transformers.packing import CallError


def is_lora(layer: Any) -> bool:
    """Whether a layer is PEFT's LoRA wrapper of a linear layer."""
    return hasattr(layer, "base_layer") and hasattr(layer, "lora_A")


def check_mergeable(name: str, layer: Any) -> None:
    """Raises UnsupportedModelError unless the adapters of a layer are plain LoRA."""
    options = ("lora_variant", "use_dora", "lora_bias")  # {adapter: whether}
    if (
        not is_lora(layer)
        or type(layer.base_layer) is not nn.Linear
        or any(used for option in options for used in getattr(layer, option, {}).values())
        or getattr(layer, "fan_in_fan_out", False)
    ):
        raise support.UnsupportedModelError(
            f"{name} is a {type(layer).__name__}, which adapters='merged' does not support; use plain LoRA on linear "
            "layers without lora_bias, or adapters='low-rank' in apply (TRL under rlkernel is always merged, as vLLM "
            "is)"
        )


def has_dropout(layer: Any) -> bool:
    """Whether a LoRA layer in training applies dropout to an active adapter, which has no merged weight then."""
    if layer.disable_adapters or layer.merged:
        return False
    return any(getattr(layer.lora_dropout[name], "p", 0) > 0 for name in layer.active_adapters if name in layer.lora_A)


def merged_weight(layer: Any) -> Tensor:  # [N, K]
    """`round(W + scaling * B A)` of a LoRA layer with its active adapters, differentiable in A and B.

    The adapters are added in fp32, in their order, and the sum is rounded to the dtype of W once.
    """
    if any(support.has_hooks(part) for part in layer.modules() if isinstance(part, nn.Linear)):
        raise CallError(
            "a layer inside a LoRA layer has hooks, which adapters='merged' never runs, because it computes with one "
            "merged weight; put them on the LoRA layer, or call apply(model, adapters='low-rank')"
        )
    weight = unsharded(layer.base_layer.weight)
    if layer.disable_adapters or layer.merged:
        return weight
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    pairs = [unsharded(t) for name in active for t in (layer.lora_A[name].weight, layer.lora_B[name].weight)]
    scalings = [float(layer.scaling[name]) for name in active]
    return _Merged.apply(weight, scalings, *pairs) if active else weight


@torch.no_grad()
def merged_weights(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the model as an engine loads them: LoRA merged, names without PEFT's prefixes.

    The model's own weights stay unchanged, so no merge has to be undone, which would leave its rounding in them. Of
    FSDP2's shards each tensor is gathered when it is its turn; all ranks have to iterate.

    Args:
        dtype: round to it, for example the engine's if FSDP2 shards fp32 masters; None: the parameters'.
    """
    found = support.find_model(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward without a backward leaves the last group gathered, in FSDP2's own memory
    lora = {name: module for name, module in found.named_modules() if is_lora(module)}
    for name, parameter in found.named_parameters():
        owner, _, rest = name.rpartition(".base_layer.")
        if owner in lora:
            name = f"{owner}.{rest}"
        elif any(name.startswith(f"{layer}.") for layer in lora):
            continue
        if owner in lora and rest == "weight":
            parameter = merged_weight(lora[owner])
        rounded = parameter if dtype is None else parameter.to(dtype)  # before it is gathered
        yield _WRAPPER.sub("", name), unsharded(rounded)


_WRAPPER = re.compile(r"\b_checkpoint_wrapped_module\.")  # of accelerate's activation checkpointing


def unsharded(weight: Tensor) -> Tensor:
    """The full tensor of a parameter that FSDP2 sharded.

    Raises:
        CallError: it is trained. Only FSDP2's own hooks reduce its gradient over the ranks.
    """
    if not isinstance(weight, DTensor):
        return weight
    if torch.is_grad_enabled() and weight.requires_grad:
        raise CallError(
            "a weight is still sharded where it is used, so its gradient would not be averaged over the ranks: call "
            "the module that fully_shard was called on last (the complete model), not one inside it"
        )
    return weight.full_tensor()


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, scalings: list[float], *pairs: Tensor) -> Tensor:
        ctx.save_for_backward(*pairs)
        ctx.scalings = scalings
        total = weight.float()
        for scaling, a, b in zip(scalings, pairs[::2], pairs[1::2], strict=True):
            total = total + scaling * ops.linear(b.float(), a.float().t().contiguous())
        return total.to(weight.dtype)

    @staticmethod
    @partial(once_differentiable, "linear with LoRA")
    def backward(ctx: Any, dweight: Tensor) -> tuple[Tensor | None, ...]:
        grads: list[Tensor] = []
        dw = dweight.float()
        pairs = ctx.saved_tensors
        for scaling, a, b in zip(ctx.scalings, pairs[::2], pairs[1::2], strict=True):
            da = ops.linear(b.float().t().contiguous(), dw.t().contiguous())  # [R, K] = B^T dW
            db = ops.linear(dw, a.float())  # [N, R] = dW A^T
            grads += [(scaling * da).to(a.dtype), (scaling * db).to(b.dtype)]
        return dweight if ctx.needs_input_grad[0] else None, None, *grads
