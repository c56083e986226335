"""Qwen2.5-VL and Qwen3-VL in vLLM: the encoder on `rlkernel.models.vision`, mrope, and the order of deepstack."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

from rlkernel import ops
from rlkernel.models.mrope import mrope_table
from rlkernel.models.vision import encode
from rlkernel.models.vision_config import MultimodalConfig, VisionConfig


class ExactEncoder(nn.Module):
    """Mixin of vLLM's encoders: `rlkernel.models.vision.encode` with their parameters.

    The features are [M, C], with those of deepstack concatenated to their right, as vLLM expects them.
    """

    rlkernel_config: VisionConfig

    def forward(self: Any, x: Tensor, grid_thw: Any, *, encoder_metadata: Any = None) -> Tensor:
        if encoder_metadata is not None:
            raise RuntimeError(
                "rlkernel: the vision encoder cannot run in a CUDA graph; set cudagraph_mm_encoder=False in the "
                "compilation config"
            )
        if x.dtype == torch.uint8:
            raise RuntimeError("rlkernel: pixels are not normalised; set mm_device_do_normalize=False")
        rows = grid_thw.tolist() if isinstance(grid_thw, Tensor) else grid_thw
        grids = [(int(t), int(h), int(w)) for t, h, w in rows]
        features = encode(self.rlkernel_config, _parameters(self), x.to(self.device), grids)
        return torch.cat([features.merged, *features.deepstack], dim=1)


def _parameters(encoder: Any) -> Callable[[str], Tensor]:
    """The encoder's parameters by their checkpoint names, without the vocabulary of vLLM's stacked layers."""

    def parameter(name: str) -> Tensor:
        owner, _, leaf = name.rpartition(".")
        prefix, _, last = owner.rpartition(".")
        if last in ("gate_proj", "up_proj"):
            stacked: Tensor = getattr(encoder.get_submodule(f"{prefix}.gate_up_proj"), leaf)
            return stacked.chunk(2)[last == "up_proj"]
        found: Tensor = getattr(encoder.get_submodule(owner), leaf)
        return found

    return parameter


class ExactMRotaryEmbedding(RotaryEmbeddingBase):
    """`ops.rope` by positions of several axes, with rlkernel's table."""

    rlkernel_table: Tensor  # [P, D] fp32
    rlkernel_axes: Tensor  # [D/2] int64

    @staticmethod
    def replace(module: Any, table: Tensor, config: MultimodalConfig) -> str:
        """Makes vLLM's module one of this class; returns what computes it."""
        place = module.cos_sin_cache.device
        module.__class__ = ExactMRotaryEmbedding
        module.register_buffer("rlkernel_table", table.to(place), persistent=False)
        module.register_buffer("rlkernel_axes", torch.tensor(config.axes).to(place), persistent=False)
        return "ops.rope, mrope"

    def forward(self, positions: Tensor, query: Tensor, key: Any = None, offsets: Any = None) -> Any:
        heads = (-1, self.head_size)
        if positions.dim() == 1:  # text alone
            rows, table = positions, self.rlkernel_table
        else:
            table = mrope_table(self.rlkernel_table, positions, self.rlkernel_axes)
            rows = torch.arange(table.shape[0], device=table.device)
        q, k = ops.rope(query.unflatten(-1, heads), key.unflatten(-1, heads), rows, table)
        return q.view(query.shape), k.view(key.shape)


@torch.library.custom_op("rlkernel_vllm::add", mutates_args=())
def _add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, rounded: Inductor would fuse a plain sum with the next one and round once."""
    return x + y


@_add.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x)


class ExactDeepstack(nn.Module):
    """Mixin of the decoder layers after which vLLM adds deepstack features to the output of the MLP.

    transformers adds them to the hidden states, so the layer adds its residual before: -0.0 is left of it, which
    changes no bit in the next norm.
    """

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        x, residual = super().forward(*args, **kwargs)
        x = _add(x, residual)
        return x, torch.full_like(x, -0.0)


@functools.cache
def _mixed(mixin: Any, kind: Any) -> Any:
    return type(f"Exact{kind.__name__}", (mixin, kind), {})


def convert_encoder(model: Any, config: MultimodalConfig) -> dict[str, str]:
    """Converts the encoder and the layers that receive deepstack features; module name -> what computes it now."""
    encoder: Any = model.visual
    names = [name for name, _ in encoder.named_modules()]
    encoder_class: Any = type(encoder)
    encoder.__class__ = _mixed(ExactEncoder, encoder_class)
    encoder.rlkernel_config = config.vision
    for layer in model.language_model.model.layers[: len(config.vision.deepstack)]:
        layer_class: Any = type(layer)
        layer.__class__ = _mixed(ExactDeepstack, layer_class)
    return {f"visual.{name}".rstrip("."): "rlkernel.models.vision" for name in names}
