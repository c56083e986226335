"""The vision encoder of Qwen2.5-VL and Qwen3-VL, built from rlkernel.ops: one forward for every engine and trainer.

An image's features do not depend on the other images of the call, because patches meet only in attention, inside a
frame. transformers' models after `apply`, vLLM's with the plugin and our own call `encode` with their own parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel import ops
from rlkernel.models.vision_config import NORM_EPS, THETA, VisionConfig
from rlkernel.ops.composed import reshaped

Parameters = Callable[[str], Tensor]
"""A parameter by its name in `VisionConfig.layout`."""
Grid = tuple[int, int, int]
"""Frames, rows and columns of an image's or video's patches; an image has one frame of `temporal_patch_size` copies."""


class MediaError(ValueError):
    """Pixels, grids or placeholders that do not fit together; the message names the sample or the media."""


class Features(NamedTuple):
    """Result of `encode`.

    Attributes:
        merged: [M, C] features, one for each placeholder token, in the order of the grids.
        deepstack: [M, C] each, for the first layers of the text model.
    """

    merged: Tensor
    deepstack: tuple[Tensor, ...]


def num_features(config: VisionConfig, grid: Grid) -> int:
    """Features, and so placeholder tokens, of one image or video."""
    t, h, w = grid
    return t * h * w // config.merge_size**2


def check_grids(config: VisionConfig, grids: Sequence[Grid], patches: Tensor) -> None:
    """Raises MediaError unless the patches are those of the grids."""
    for i, (t, h, w) in enumerate(grids):
        if t < 1 or h < 1 or w < 1 or h % config.merge_size or w % config.merge_size:
            raise MediaError(
                f"media {i} has a grid of {t} x {h} x {w} patches (frames, rows, columns); it needs a frame, and "
                f"rows and columns that are positive multiples of spatial_merge_size={config.merge_size}: resize with "
                "the model's own processor"
            )
    expected = sum(t * h * w for t, h, w in grids)
    if patches.dim() != 2 or patches.shape != (expected, config.patch_elements):
        raise MediaError(
            f"pixel values are {tuple(patches.shape)}; the {len(grids)} grids need [{expected}, "
            f"{config.patch_elements}]: pass pixel values and grids of the same processor call"
        )


@dataclass(frozen=True)
class Geometry:
    """What follows from the grids alone, on the encoder's device. N patches, M features.

    Attributes:
        rope: [N, D] fp32, cosines and sines of each patch.
        rows: [N] int64, 0 to N - 1: the patches' rows in `rope`.
        frames, windows: cu_seqlens and longest segment of attention over frames and over windows.
        order: [M] int64, features in the order of windows; None without windows.
        back: [M] int64, its inverse.
        taps, weights: [N, 4], interpolation of learned positions; None without these.
    """

    rope: Tensor
    rows: Tensor
    frames: tuple[Tensor, int]
    windows: tuple[Tensor, int] | None = None
    order: Tensor | None = None
    back: Tensor | None = None
    taps: Tensor | None = None
    weights: Tensor | None = None


@functools.lru_cache(maxsize=256)
def geometry(config: VisionConfig, grids: tuple[Grid, ...], device: torch.device) -> Geometry:
    """Segments, positions and windows of a call. Computed on the CPU, so that all devices have the same bits."""
    with torch.inference_mode(False), torch.device("cpu"):  # kept for calls that need gradients too
        places = torch.cat([_places(config, grid) for grid in grids])
        frames = [h * w for t, h, w in grids for _ in range(t)]
        order, windows = _windows(config, grids) if config.family.windows else (None, None)
        if order is not None:
            unit = config.merge_size**2
            places = places.view(-1, unit, 2)[order].view(-1, 2)
        rope = _axial_rope(config, places)
        taps = [_interpolation(config, grid) for grid in grids] if config.family.learned_positions else []
        found = Geometry(
            rope=rope.to(device),
            rows=torch.arange(places.shape[0]).to(device),
            frames=_segments(frames, device),
            windows=None if windows is None else _segments(windows, device),
            order=None if order is None else order.to(device),
            back=None if order is None else torch.argsort(order).to(device),
            taps=torch.cat([t for t, _ in taps]).to(device) if taps else None,
            weights=torch.cat([w for _, w in taps]).to(device) if taps else None,
        )
    return found


def _segments(lengths: list[int], device: torch.device) -> tuple[Tensor, int]:
    ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    return ends.to(device, torch.int32), max(lengths)


def _places(config: VisionConfig, grid: Grid) -> Tensor:  # [t h w, 2]
    """Row and column of each patch, in the processor's order: frames, then merged blocks, then patches of a block."""
    (t, h, w), m = grid, config.merge_size
    place = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"), dim=-1)
    blocks = place.view(h // m, m, w // m, m, 2).transpose(1, 2)
    return blocks.reshape(1, -1, 2).expand(t, -1, -1).reshape(-1, 2)


def _axial_rope(config: VisionConfig, places: Tensor) -> Tensor:  # [N, 2] -> [N, D] fp32
    """Cosines, then sines: the first half of the pairs turns by the row, the second by the column.

    The angle is the fp32 product of place and frequency; cosine and sine are computed in fp64 and rounded once.
    """
    width = config.head_dim // 2
    frequency = 1.0 / (THETA ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    angle = torch.outer(torch.arange(int(places.max()) + 1, dtype=torch.float32), frequency).double()
    cos, sin = (table[places].flatten(1) for table in (angle.cos().float(), angle.sin().float()))
    return torch.cat((cos, sin), dim=1)


def _windows(config: VisionConfig, grids: Sequence[Grid]) -> tuple[Tensor, list[int]]:
    """Features in the order of windows, and the patches of each window. Windows at the border are smaller."""
    side = config.window_size // config.merge_size // config.patch_size
    order, lengths, first = [], [], 0
    for t, h, w in grids:
        rows, columns = h // config.merge_size, w // config.merge_size
        index = torch.arange(first, first + t * rows * columns).view(t, rows, columns)
        for frame in index:
            for band in frame.split(side, 0):
                for window in band.split(side, 1):
                    order.append(window.flatten())
                    lengths.append(window.numel() * config.merge_size**2)
        first += index.numel()
    return torch.cat(order), lengths


def _interpolation(config: VisionConfig, grid: Grid) -> tuple[Tensor, Tensor]:  # [N, 4] int64, [N, 4] fp32
    """Bilinear taps into the square table of learned positions, whose corners are the grid's."""
    side = int(config.num_positions**0.5)
    places = _places(config, grid)
    low, share = [], []
    for axis, size in enumerate(grid[1:]):
        source = places[:, axis].float() * (side - 1) / max(size - 1, 1)
        low.append(source.floor().long())
        share.append(source - source.floor())
    taps, weights = [], []
    for down in (0, 1):
        for right in (0, 1):
            row, column = (low[0] + down).clamp(max=side - 1), (low[1] + right).clamp(max=side - 1)
            taps.append(row * side + column)
            weights.append((share[0] if down else 1 - share[0]) * (share[1] if right else 1 - share[1]))
    return torch.stack(taps, 1), torch.stack(weights, 1)


# ---- forward -------------------------------------------------------------------------------------


def encode(config: VisionConfig, parameters: Parameters, patches: Tensor, grids: Sequence[Grid]) -> Features:
    """Features of images and videos, differentiable in the parameters and the patches.

    Args:
        config: the encoder.
        parameters: its parameters, all of one dtype.
        patches: [N, patch_elements], of the model's processor; rounded to the parameters' dtype.
        grids: of each image or video, in the order of the patches.

    Raises:
        MediaError: patches and grids do not fit.

    Source: Qwen2.5-VL (arXiv 2502.13923), Qwen3-VL (arXiv 2511.21631).
    """
    check_grids(config, grids, patches)
    at = geometry(config, tuple(grids), patches.device)
    weight = parameters("patch_embed.proj.weight")
    bias = parameters("patch_embed.proj.bias") if config.family.learned_positions else None
    # a convolution whose stride is its kernel is a product
    x = ops.linear(patches.to(weight.dtype), reshaped(weight, config.hidden_size, -1), bias)
    if at.taps is not None and at.weights is not None:
        x = x + _learned_positions(parameters("pos_embed.weight"), at.taps, at.weights)
    unit = config.merge_size**2
    if at.order is not None:
        x = x.view(-1, unit, config.hidden_size).index_select(0, at.order).flatten(0, 1)
    deepstack: dict[int, Tensor] = {}
    for i in range(config.depth):
        x = _block(
            config, parameters, f"blocks.{i}", x, at, windowed=at.windows is not None and i not in config.full_attention
        )
        if i in config.deepstack:
            j = config.deepstack.index(i)
            deepstack[j] = _merge(config, parameters, f"deepstack_merger_list.{j}", x, norm_first=False)
    merged = _merge(config, parameters, "merger", x, norm_first=True)
    if at.back is not None:
        merged = merged.index_select(0, at.back)
    return Features(merged, tuple(deepstack[j] for j in sorted(deepstack)))


def _learned_positions(table: Tensor, taps: Tensor, weights: Tensor) -> Tensor:  # [N, C], dtype of the table
    """Weighted sum of four rows in fp32, in their order, rounded once."""
    rows = ops.embedding(taps.flatten(), table).view(*taps.shape, -1).float()
    total = rows[:, 0] * weights[:, :1]
    for i in range(1, taps.shape[1]):
        total = total + rows[:, i] * weights[:, i : i + 1]
    return total.to(table.dtype)


def _linear(parameters: Parameters, name: str, x: Tensor) -> Tensor:
    return ops.linear(x, parameters(f"{name}.weight"), parameters(f"{name}.bias"))


def _norm(config: VisionConfig, parameters: Parameters, name: str, x: Tensor) -> Tensor:
    weight = parameters(f"{name}.weight")
    if config.family.norm == "rms":
        return ops.rms_norm(x, weight, NORM_EPS)
    return ops.layer_norm(x, weight, parameters(f"{name}.bias"), NORM_EPS)


def _block(
    config: VisionConfig, parameters: Parameters, name: str, x: Tensor, at: Geometry, *, windowed: bool
) -> Tensor:  # [N, C]
    qkv = _linear(parameters, f"{name}.attn.qkv", _norm(config, parameters, f"{name}.norm1", x))
    q, k, v = qkv.view(x.shape[0], 3, config.num_heads, config.head_dim).unbind(1)
    q, k = ops.rope(q, k, at.rows, at.rope)
    cu_seqlens, longest = at.windows if windowed and at.windows is not None else at.frames
    out, _ = ops.attention(q, k, v, cu_seqlens, max_seqlen_q=longest, causal=False)
    x = x + _linear(parameters, f"{name}.attn.proj", out.reshape(x.shape))
    h = _norm(config, parameters, f"{name}.norm2", x)
    if config.family.mlp == "swiglu":
        gate_up = torch.cat([_linear(parameters, f"{name}.mlp.{part}_proj", h) for part in ("gate", "up")], dim=-1)
        return x + _linear(parameters, f"{name}.mlp.down_proj", ops.swiglu(gate_up))
    h = ops.gelu(_linear(parameters, f"{name}.mlp.linear_fc1", h), "tanh")
    return x + _linear(parameters, f"{name}.mlp.linear_fc2", h)


def _merge(config: VisionConfig, parameters: Parameters, name: str, x: Tensor, *, norm_first: bool) -> Tensor:  # [M, C]
    """Joins the patches of each block and projects them; the norm is over a patch, or over the joined block."""
    first, second = (f"{name}.{linear}" for linear in config.family.merger_linears)
    norm = f"{name}.{config.family.merger_norm}"
    joined = x.shape[1] * config.merge_size**2
    if norm_first:
        x = _norm(config, parameters, norm, x).view(-1, joined)
    else:
        x = _norm(config, parameters, norm, x.view(-1, joined))
    return _linear(parameters, second, ops.gelu(_linear(parameters, first, x)))
