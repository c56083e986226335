"""The weights that the trainer's forward computes with, as the rollout has to load them, and their fingerprints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rlkernel_transformers.adapters import is_lora, merged_weight
from rlkernel_transformers.support import find_model
from rlkernel_vllm.fingerprint import fingerprint


class SyncedWeights:
    """One delivery of weights: names of Hugging Face and whole tensors, in the dtype of the forward, LoRA merged.

    Args:
        model: a model after `rlkernel_transformers.apply` and `fully_shard`. All ranks iterate together.

    Attributes:
        fingerprints: of the weights that were sent.
        confirmed: whether the rollout has confirmed that it holds them.
    """

    def __init__(self, model: nn.Module):
        self.fingerprints: dict[str, str] = {}
        self.confirmed = False
        self._weights = _gathered(model)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights:
            self.fingerprints[name] = fingerprint(tensor)
            yield name, tensor


@torch.no_grad()
def _gathered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    found = find_model(model)
    names = {id(module): name for name, module in found.named_modules()}
    for group in [module for module in model.modules() if isinstance(module, FSDPModule)]:
        group.unshard()
        for module in _of_group(group):
            owner = names.get(id(module))
            if owner is not None:
                yield from _of_module(owner, module)
        group.reshard()


def _of_group(group: nn.Module) -> Iterator[nn.Module]:
    """Modules whose parameters FSDP2 gathers with the group: those outside its nested groups."""
    yield group
    for child in group.children():
        if not isinstance(child, FSDPModule):
            yield from _of_group(child)


def _of_module(name: str, module: Any) -> Iterator[tuple[str, Tensor]]:
    if is_lora(module):
        yield f"{name}.weight", merged_weight(module).detach().clone()
        if module.base_layer.bias is not None:
            yield f"{name}.bias", module.base_layer.bias.detach().clone()
        return
    if ".lora_" in name or name.endswith(".base_layer"):
        return
    for leaf, parameter in module.named_parameters(recurse=False):
        yield f"{name}.{leaf}" if name else leaf, parameter.detach().clone()
