"""Tensor parallelism of a trainer: a rank holds some heads, some channels of the MLP and a part of the vocabulary.

Log-probabilities and gradients have the bits of one device with the same `tp_leaves`. `apply` with `tp_group` shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rlkernel.models import ModelConfig
from rlkernel.ops.all_reduce import register_group
from rlkernel.parallel.sequence import GatherTokens, OwnTokens, rms_norm_tokens, row_parallel_tokens
from rlkernel.parallel.tensor import GatherHeads, OwnHeads, row_parallel_linear
from rlkernel.parallel.vocabulary import parallel_embedding
from rlkernel_transformers import forwards, support
from rlkernel_transformers.calls import option
from rlkernel_transformers.joined import joined_linear
from rlkernel_transformers.packing import CallError, PackedCall

COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW_PARALLEL = ("o_proj", "down_proj")


def embedding_forward(self: Any, ids: Tensor) -> Tensor:
    group = self._rlkernel_group
    first, name = group.rank() * len(self.weight), register_group(group)
    return forwards.embedding_forward(self, ids, lambda ids, weight: parallel_embedding(ids, weight, first, name))


def head_forward(self: Any, x: Tensor, score: Callable[..., Any] | None = None) -> Any:
    """Logits of the whole vocabulary, [..., C] -> [..., V] fp32; or `score` of this rank's part of it."""
    weight, group = forwards.rounded(forwards.head_weight(self), x.dtype), self._rlkernel_group
    if score is not None:
        return score(x, weight, group=group)
    own = joined_linear(x.flatten(0, -2), [weight], [], group, out_dtype=torch.float32)
    return GatherHeads.apply(own, group).view(*x.shape[:-1], -1)


def column_forward(self: Any, x: Tensor) -> Tensor:  # [T, K] -> [T, N / R]
    return joined_linear(x, [self.weight], [] if self.bias is None else [self.bias], self._rlkernel_group)


def row_forward(self: Any, x: Tensor, layer: Callable[..., Tensor] = row_parallel_linear) -> Tensor:
    """[T, K / R] -> [T, N], or this rank's rows [S, N]."""
    weight = forwards.rounded(self.weight, x.dtype)
    bias = None if self.bias is None else forwards.rounded(self.bias, x.dtype)
    return layer(x, weight, bias, self._rlkernel_group, chunks=self._rlkernel_chunks)


def row_tokens_forward(self: Any, x: Tensor) -> Tensor:
    return row_forward(self, x, row_parallel_tokens)


def head_norm_forward(self: Any, x: Tensor) -> Tensor:  # [T, H / R, D]
    """The weight's gradient is a sum over all heads, so every rank computes the norm of all of them."""
    whole: Tensor = GatherHeads.apply(x, self._rlkernel_group)
    own: Tensor = OwnHeads.apply(forwards.norm_forward(self, whole), self._rlkernel_group)
    return own


def attention_forward(self: Any, x: Tensor, packed: PackedCall) -> Any:
    if packed.cache is not None or packed.pages is not None or packed.weights:
        raise CallError("tensor parallelism is for training: no cache, no generate and no output_attentions")
    return forwards.attention_forward(self, x, packed)


def norm_tokens_forward(self: Any, x: Tensor, residual: Tensor | None, tokens: int) -> tuple[Tensor, Tensor]:
    weight = forwards.rounded(forwards.used(self), x.dtype)
    return rms_norm_tokens(x, weight, self.variance_epsilon, residual, tokens, self._rlkernel_group)


def layer_tokens_forward(self: Any, x: Tensor, residual: Tensor | None, packed: PackedCall) -> tuple[Tensor, ...]:
    """Each rank has its rows of x and the residual, except before the first layer and after the last one."""
    group, tokens = self.input_layernorm._rlkernel_group, packed.positions.numel()
    if residual is None:
        x = OwnTokens.apply(x, group)
    x, residual = self.input_layernorm(x, residual, tokens)
    x = self.self_attn(x, packed)
    x, residual = self.post_attention_layernorm(x, residual, tokens)
    x = self.mlp(x)
    if self.self_attn.layer_idx == self.self_attn.config.num_hidden_layers - 1:
        return GatherTokens.apply(x, tokens, group), GatherTokens.apply(residual, tokens, group)
    return x, residual


def decoder_tokens_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    if option(self, kwargs, "output_hidden_states"):
        raise CallError("output_hidden_states: with sequence_parallel no rank has a layer's whole states; leave it out")
    return forwards.decoder_forward(self, *args, **kwargs)


FORWARDS = frozenset(
    {
        *(embedding_forward, head_forward, column_forward, row_forward, head_norm_forward, attention_forward),
        *(row_tokens_forward, norm_tokens_forward, layer_tokens_forward, decoder_tokens_forward),
    }
)


def shard(model: Any, config: ModelConfig, tp_leaves: int, group: ProcessGroup) -> None:
    """Replaces each weight, except those of norms, by this rank's part of it; nothing if that was done before.

    Raises:
        UnsupportedModelError: the group's size does not divide tp_leaves, heads, channels or the vocabulary, or the
            model has adapters or is sharded already.
    """
    ranks = group.size()
    for name, size in (
        ("tp_leaves", tp_leaves), ("num_attention_heads", config.num_heads), ("hidden_size", config.hidden_size),
        ("num_key_value_heads", config.num_kv_heads), ("intermediate_size", config.intermediate_size),
        ("vocab_size", config.vocab_size),
    ):  # fmt: skip
        if size % ranks:
            remedy = {
                "tp_leaves": "pass tp_leaves=8, to the rollout too",
                "vocab_size": f"call model.resize_token_embeddings(pad_to_multiple_of={ranks}) before apply",
            }.get(name, "use fewer ranks")
            raise support.UnsupportedModelError(
                f"tp_group has {ranks} ranks, which does not divide {name}={size}; {remedy}"
            )
    parts: dict[nn.Parameter, nn.Parameter] = {}  # so that tied weights stay one parameter
    for name, layer in _layers(model):
        if type(layer) not in (nn.Linear, nn.Embedding) or isinstance(layer.weight, DTensor) or layer.weight.is_meta:
            raise support.UnsupportedModelError(
                f"tp_group: {name} is a {type(layer).__name__} with a {type(layer.weight).__name__}; apply with "
                "tp_group before FSDP, after loading the weights and without adapters"
            )
        if (before := layer.__dict__.get("_rlkernel_group")) is not None:
            if before.size() != ranks:
                raise support.UnsupportedModelError(
                    f"tp_group has {ranks} ranks, and the weights are in {before.size()} shards; load the model again"
                )
            continue
        for part, dim in _cuts(name, layer):
            whole = getattr(layer, part)
            if whole not in parts:
                own = whole.data.chunk(ranks, dim)[group.rank()].clone()
                parts[whole] = nn.Parameter(own, requires_grad=whole.requires_grad)
            setattr(layer, part, parts[whole])
        if isinstance(layer, nn.Linear):
            layer.out_features, layer.in_features = layer.weight.shape
        else:
            layer.num_embeddings = len(layer.weight)
        layer.__dict__["_rlkernel_group"] = group
    register_group(group)  # before torch.compile traces a forward


def is_sharded(model: Any) -> bool:
    return any("_rlkernel_group" in layer.__dict__ for _, layer in _layers(model))


def replacements(model: Any, group: ProcessGroup, sequence_parallel: bool) -> Iterator[tuple[nn.Module, Any]]:
    """(module, new forward) of every module that computes differently on several ranks."""
    row = row_tokens_forward if sequence_parallel else row_forward
    of_name = {"embed_tokens": embedding_forward, "lm_head": head_forward, **dict.fromkeys(ROW_PARALLEL, row)}
    for name, layer in _layers(model):
        yield layer, of_name.get(name, column_forward)
    if sequence_parallel:
        yield model.model, decoder_tokens_forward
        for layer in model.model.layers:
            yield layer, layer_tokens_forward
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.__dict__["_rlkernel_group"] = group
                yield norm, norm_tokens_forward
    for layer in model.model.layers:
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
        layer: Any = owners[owner]
        value = parameter.grad if grads else parameter.detach()
        if value is None:
            continue
        cuts = dict(_cuts(owner.rpartition(".")[2], layer)) if "_rlkernel_group" in layer.__dict__ else {}
        if part in cuts:
            group = layer._rlkernel_group
            if group not in meshes:
                meshes[group] = DeviceMesh.from_group(group, value.device.type)
            value = DTensor.from_local(value, meshes[group], [Shard(cuts[part])], run_check=False)
        yield name, value


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Name and module of every sharded layer."""
    decoder = support.decoder_of(model)
    yield "embed_tokens", decoder.embed_tokens
    yield "lm_head", model.lm_head
    for layer in decoder.layers:
        for block in (layer.self_attn, layer.mlp):
            for name in (*COLUMN_PARALLEL, *ROW_PARALLEL):
                if hasattr(block, name):
                    yield name, getattr(block, name)


def _cuts(name: str, layer: Any) -> Iterator[tuple[str, int]]:
    """(parameter, dimension) of what is cut in the layer of this name; a row-parallel layer's bias is whole."""
    if name in ROW_PARALLEL:
        yield "weight", 1
    elif name in (*COLUMN_PARALLEL, "embed_tokens", "lm_head"):
        yield "weight", 0
        if getattr(layer, "bias", None) is not None:
            yield "bias", 0
