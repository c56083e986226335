"""Tensor parallelism of a trainer: a rank holds some heads and some channels of the MLP, embedding and head are whole.

Log-probabilities and gradients have the bits of one device with the same `tp_leaves`. `apply` with `tp_group` shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rlkernel.models import ModelConfig
from rlkernel.parallel.tensor import GatherHeads, OwnHeads, row_parallel_linear
from rlkernel_transformers import forwards, support
from rlkernel_transformers.joined import joined_linear
from rlkernel_transformers.packing import CallError, PackedCall

COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW_PARALLEL = ("o_proj", "down_proj")


def column_forward(self: Any, x: Tensor) -> Tensor:  # [T, K] -> [T, N / R]
    return joined_linear(x, [self.weight], [] if self.bias is None else [self.bias], self._rlkernel_group)


def row_forward(self: Any, x: Tensor) -> Tensor:  # [T, K / R] -> [T, N]
    weight = forwards.rounded(self.weight, x.dtype)
    bias = None if self.bias is None else forwards.rounded(self.bias, x.dtype)
    return row_parallel_linear(x, weight, bias, self._rlkernel_group, chunks=self._rlkernel_chunks)


def head_norm_forward(self: Any, x: Tensor) -> Tensor:  # [T, H / R, D]
    """The weight's gradient is a sum over all heads, so every rank computes the norm of all of them."""
    whole: Tensor = GatherHeads.apply(x, self._rlkernel_group)
    own: Tensor = OwnHeads.apply(forwards.norm_forward(self, whole), self._rlkernel_group)
    return own


def attention_forward(self: Any, x: Tensor, packed: PackedCall) -> Any:
    if packed.cache is not None or packed.pages is not None or packed.weights:
        raise CallError("tensor parallelism is for training: no cache, no generate and no output_attentions")
    return forwards.attention_forward(self, x, packed)


FORWARDS = frozenset({column_forward, row_forward, head_norm_forward, attention_forward})


def shard(model: Any, config: ModelConfig, tp_leaves: int, group: ProcessGroup) -> None:
    """Replaces each weight of attention and MLP by this rank's part of it; nothing if that was done before.

    Raises:
        UnsupportedModelError: the group's size does not divide tp_leaves, heads or channels, or the model has adapters
            or is sharded already.
    """
    ranks = group.size()
    for name, size in (
        ("tp_leaves", tp_leaves), ("num_attention_heads", config.num_heads), ("hidden_size", config.hidden_size),
        ("num_key_value_heads", config.num_kv_heads), ("intermediate_size", config.intermediate_size),
    ):  # fmt: skip
        if size % ranks:
            raise support.UnsupportedModelError(f"tp_group has {ranks} ranks, which does not divide {name}={size}")
    for name, linear in _linears(model):
        if type(linear) is not nn.Linear or isinstance(linear.weight, DTensor) or linear.weight.is_meta:
            raise support.UnsupportedModelError(
                f"tp_group: {name} is a {type(linear).__name__} with a {type(linear.weight).__name__}; apply with "
                "tp_group before FSDP, after loading the weights and without adapters"
            )
        if "_rlkernel_group" not in linear.__dict__:
            for part, dim in _cuts(name, linear):
                whole = getattr(linear, part)
                own = whole.data.chunk(ranks, dim)[group.rank()].clone()
                setattr(linear, part, nn.Parameter(own, requires_grad=whole.requires_grad))
            linear.out_features, linear.in_features = linear.weight.shape
            linear.__dict__["_rlkernel_group"] = group


def is_sharded(model: Any) -> bool:
    return any("_rlkernel_group" in linear.__dict__ for _, linear in _linears(model))


def replacements(model: Any, group: ProcessGroup) -> Iterator[tuple[nn.Module, Any]]:
    """(module, new forward) of every module that computes differently on several ranks."""
    for name, linear in _linears(model):
        yield linear, row_forward if name in ROW_PARALLEL else column_forward
    for layer in support.decoder_of(model).layers:
        yield layer.self_attn, attention_forward
        for name in ("q_norm", "k_norm"):
            if (norm := getattr(layer.self_attn, name, None)) is not None:
                norm.__dict__["_rlkernel_group"] = group
                yield norm, head_norm_forward


def sharded_parameters(model: nn.Module, *, grads: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Names with the parameters of a model that `apply` sharded, or with their gradients; shards as DTensors.

    `full_tensor()` of a DTensor is the whole weight, for an engine or a checkpoint; all ranks call it. For clipping,
    `rlkernel.parallel.norm.grad_norm` takes the gradients. Parameters without a gradient are left out of `grads`.
    """
    found = support.find_model(model)
    owners = dict(found.named_modules())
    meshes: dict[ProcessGroup, DeviceMesh] = {}
    for name, parameter in found.named_parameters():
        owner, _, part = name.rpartition(".")
        linear: Any = owners[owner]
        value = parameter.grad if grads else parameter.detach()
        if value is None:
            continue
        cuts = dict(_cuts(owner.rpartition(".")[2], linear)) if "_rlkernel_group" in linear.__dict__ else {}
        if part in cuts:
            group = linear._rlkernel_group
            mesh = meshes.setdefault(group, DeviceMesh.from_group(group, value.device.type))
            value = DTensor.from_local(value, mesh, [Shard(cuts[part])], run_check=False)
        yield name, value


def _linears(model: Any) -> Iterator[tuple[str, Any]]:
    for layer in support.decoder_of(model).layers:
        for block in (layer.self_attn, layer.mlp):
            for name in (*COLUMN_PARALLEL, *ROW_PARALLEL):
                if hasattr(block, name):
                    yield name, getattr(block, name)


def _cuts(name: str, linear: Any) -> Iterator[tuple[str, int]]:
    """(parameter, dimension) of what is cut in the linear layer of this name; a row-parallel layer's bias is whole."""
    if name in ROW_PARALLEL:
        yield "weight", 1
    elif name in COLUMN_PARALLEL:
        yield "weight", 0
        if linear.bias is not None:
            yield "bias", 0
