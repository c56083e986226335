"""LoRA with merged weights: rollout and training read one tensor W = round(W0 + s B A), so their numbers are equal.

W0 is frozen and A, B are trained, in fp32. The gradients of A and B take W for W0 + s B A: the rounding counts as the
identity (a straight-through estimate). Source: Hu et al., arXiv:2106.09685.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlkernel import ops
from rlkernel.models.checkpoint import HFTensor, hf_layout, new_directory
from rlkernel.models.decoder import Decoder, Linear
from rlkernel.ops.autograd import weight_grad
from rlkernel.ops.linear import linear_dgrad, linear_wgrad_

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Hugging Face names of the modules that can be adapted."""


class Adapter(nn.Module):
    """The update s B A of one Hugging Face module, which is some rows of a (fused) weight.

    Attributes:
        module: name of the module, such as "model.layers.0.self_attn.q_proj".
        rows: its rows in the weight.
        alpha, scale: s = alpha / r.
        lora_A: [r, K] fp32, uniform within 1 / sqrt(K), as in PEFT.
        lora_B: [N, r] fp32, zeros, so that the first weight is the base.
    """

    def __init__(self, place: HFTensor, k: int, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        self.module, self.rows = place.name.removesuffix(".weight"), (place.start, place.rows)
        self.alpha, self.scale = alpha, alpha / rank
        bound = 1 / math.sqrt(k)
        self.lora_A = nn.Parameter(torch.empty(rank, k).uniform_(-bound, bound, generator=generator))
        self.lora_B = nn.Parameter(torch.zeros(place.rows, rank))


class AdaptedLinear(Linear):
    """A linear whose weight follows its adapters.

    Attributes:
        weight: [N, K] merged, in the model's dtype; `merge_` writes it, no gradient reaches it.
        base: [N, K] frozen, same dtype.
        adapters: by the last part of the module's name.
    """

    base: Tensor

    def __init__(self, linear: Linear) -> None:
        n, k = linear.weight.shape
        with torch.device("meta"):
            super().__init__(n, k, linear.weight.dtype, chunks=linear.chunks)
        self.bias = linear.bias
        self.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
        self.register_buffer("base", linear.weight.detach(), persistent=False)
        self.adapters = nn.ModuleDict()

    def forward(self, x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        if not torch.is_grad_enabled():
            return super().forward(x)
        parameters = [p for adapter in self.parts() for p in (adapter.lora_A, adapter.lora_B)]
        return _Product.apply(x, *parameters, self)

    @torch.no_grad()
    def merge_(self) -> None:
        """weight = round(base + s (B A)) in the adapters' rows: an fp32 chain over r, a product and a sum."""
        for adapter in self.parts():
            update = ops.linear(adapter.lora_B, adapter.lora_A.t()).mul_(adapter.scale)
            self.weight.narrow(0, *adapter.rows).copy_(update.add_(self.base.narrow(0, *adapter.rows)))

    def parts(self) -> list[Adapter]:
        """The adapters, in the order of their rows."""
        return [adapter for adapter in self.adapters.values() if isinstance(adapter, Adapter)]


class _Product(torch.autograd.Function):
    """y = x W^T, with gradients of x, A and B but none of W.

    From dy, in the dtype of x: dx = dy W; dA = u^T x with u = dy (s B); dB = dy^T v with v = x (s A)^T. Both are added
    to the fp32 `main_grad` in packed order, so that micro-batches change no bit.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> Tensor:
        *parameters, layer = arguments
        ctx.save_for_backward(x)
        ctx.parameters, ctx.layer = parameters, layer  # not saved: hooks of saved tensors drop their main_grad
        return ops.linear(x, layer.weight, layer.bias, chunks=layer.chunks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,), layer = ctx.saved_tensors, ctx.layer
        dy = dy.to(x.dtype).contiguous()
        dx = _dgrad(dy, layer.weight) if ctx.needs_input_grad[0] else None
        gradients: list[Tensor | None] = []
        for adapter in layer.parts():
            part, index = dy.narrow(1, *adapter.rows), len(gradients) + 1
            a, b = ((adapter.scale * w.detach()).to(x.dtype) for w in (adapter.lora_A, adapter.lora_B))
            u, v = _dgrad(part, b), ops.linear(x, a)
            for i, (parameter, left, right) in enumerate(((adapter.lora_A, u, x), (adapter.lora_B, part, v))):
                add = lambda grad, left=left, right=right: _wgrad_(grad, left, right)
                gradients.append(weight_grad("lora", ctx, index + i, parameter, add))
        return dx, *gradients, None


def _dgrad(dy: Tensor, weight: Tensor) -> Tensor:  # [T, N], [N, K] -> [T, K]
    return dy @ weight if ops.is_stock() else linear_dgrad(dy, weight, 1)


def _wgrad_(grad: Tensor, dy: Tensor, x: Tensor) -> None:  # [N, K] += [T, N]^T [T, K]
    if ops.is_stock():
        grad += dy.t() @ x
    else:
        linear_wgrad_(grad, dy, x)


def add_adapters(
    model: Decoder, *, rank: int, alpha: float, targets: Sequence[str] = TARGETS, seed: int = 0
) -> Decoder:
    """Freezes a model and gives the linears of `targets` in every layer an adapter; returns the model.

    Args:
        rank: r.
        alpha: s = alpha / r.
        targets: some of `TARGETS`; fused weights hold an adapter for each.
        seed: of the CPU generator that draws all A.

    Raises:
        ValueError: a target is unknown, or there is none.
    """
    if not targets or not set(targets) <= set(TARGETS):
        raise ValueError(f"add_adapters: targets={list(targets)}; expected some of {', '.join(TARGETS)}")
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for place in hf_layout(model.config):
        *_, target, kind = place.name.split(".")
        if kind != "weight" or target not in targets:
            continue
        owner, name = place.parameter.removesuffix(".weight").rsplit(".", 1)
        parent = model.get_submodule(owner)
        linear = getattr(parent, name)
        if not isinstance(linear, AdaptedLinear):
            linear = AdaptedLinear(linear)
            setattr(parent, name, linear)
        adapter = Adapter(place, linear.weight.shape[1], rank, alpha, generator)
        linear.adapters[target] = adapter.to(linear.weight.device)
    return model


def adapted(model: nn.Module) -> list[AdaptedLinear]:
    """The linears with adapters; empty for a model without."""
    return [module for module in model.modules() if isinstance(module, AdaptedLinear)]


def merge_adapters_(model: nn.Module) -> None:
    """Writes all merged weights in place; call it when adapters have changed."""
    for linear in adapted(model):
        linear.merge_()


def base_of(model: Decoder) -> Decoder:
    """The frozen model under the adapters, as a second decoder that shares its storage."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    base = copy.deepcopy(model, shared)
    for parent in list(base.modules()):
        for name, linear in list(parent.named_children()):
            if isinstance(linear, AdaptedLinear):
                n, k = linear.weight.shape
                with torch.device("meta"):
                    plain = Linear(n, k, linear.weight.dtype, chunks=linear.chunks)
                plain.weight, plain.bias = nn.Parameter(linear.base, requires_grad=False), linear.bias
                setattr(parent, name, plain)
    return base


def frozen(model: Decoder) -> Decoder:
    """A reference policy: a copy of the model without gradients; of a model with adapters, its base (`base_of`)."""
    return base_of(model) if adapted(model) else copy.deepcopy(model).requires_grad_(False)


def save_adapter(model: Decoder, path: str | Path, base: str, *, overwrite: bool = False) -> Path:
    """Writes the adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`, in fp32.

    Args:
        path: the directory to create.
        base: directory or hub name of the base model, for readers that load it too.
        overwrite: replace an existing directory; without it, one that is not empty is an error.

    Raises:
        ValueError: the model has no adapters.
        CheckpointError: the target exists, or cannot be written. The target is then as it was before.
    """
    adapters = [adapter for linear in adapted(model) for adapter in linear.parts()]
    if not adapters:
        raise ValueError("save_adapter: the model has no adapters; call add_adapters first")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters[0].lora_A.shape[0],
        "lora_alpha": adapters[0].alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({adapter.module.rsplit(".", 1)[1] for adapter in adapters}),
        "inference_mode": True,
    }
    tensors = {
        f"base_model.model.{adapter.module}.{name}.weight": parameter.detach().cpu().contiguous()
        for adapter in adapters
        for name, parameter in adapter.named_parameters()
    }
    with new_directory(path, "save_adapter", overwrite) as work:
        (work / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, work / "adapter_model.safetensors", metadata={"format": "pt"})
    return Path(path)
