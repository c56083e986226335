"""Rotary positions of several axes: each pair of channels turns by one axis of the token's position (mrope)."""

from __future__ import annotations

import torch
from torch import Tensor


def mrope_table(
    cos_sin: Tensor,  # [P, D] fp32
    positions: Tensor,  # [A, T] int64
    axes: Tensor,  # [D/2] int64
) -> Tensor:  # [T, D] fp32
    """The rows of `ops.rope`'s table for tokens with a position on several axes; token t has row t.

    Where all axes have the same position p, the row is `cos_sin[p]`, so text has the bits of one axis.

    Args:
        cos_sin: `rope_table` of the model.
        positions: on each axis (time, height, width).
        axes: axis of each pair of channels, from `vision_config.axes_of_pairs`.

    Raises:
        IndexError: a position outside the table (CPU).

    Source: Qwen2-VL (arXiv 2409.12191).
    """
    half = axes.shape[0]
    index = positions[axes].t()  # [T, D/2]
    if index.device.type == "cpu" and index.numel() and not torch.compiler.is_compiling():
        low, high = (int(value) for value in index.aminmax())
        if low < 0 or high >= cos_sin.shape[0]:
            raise IndexError(
                f"mrope: a position is {low if low < 0 else high}; the table ends at {cos_sin.shape[0] - 1}: shorten "
                "the sequence, or raise max_position_embeddings"
            )
    return torch.cat([part.gather(0, index) for part in (cos_sin[:, :half], cos_sin[:, half:])], dim=1)
