"""Positions of mRoPE from spans and grids, for Qwen2.5-VL (time in seconds) and Qwen3-VL (timestamps as text)."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.multimodal.schema import Medium, MultimodalBatch


def mrope_positions(batch: MultimodalBatch, *, tokens_per_second: float = 1.0) -> Tensor:  # [3, T] int64
    """Temporal, height and width position of each token, from 0 in every sample.

    Text advances all three axes by one. A placeholder run starts one position after the largest before it; its tokens
    count the merged grid (t, h, w), and the temporal axis of a video is the integer part of
    `time * tokens_per_second`. If a video has one run per temporal patch (Qwen3-VL), each run is a grid (1, h, w).

    This is the rule of the model's authors and of vLLM. transformers 5.17 truncates the seconds before it multiplies,
    and continues after a video at max(h, w) even if the temporal axis is longer; pass these positions to the model
    instead of having it compute them.

    Args:
        tokens_per_second: `vision_config.tokens_per_second` of Qwen2.5-VL. Without effect on images and on Qwen3-VL.

    Raises:
        ValueError: placeholders without a medium, or not as many as its grid needs; a grid that merge_size does not
            divide.

    Source:
        Qwen2-VL arXiv:2409.12191, section 2.1; Qwen2.5-VL arXiv:2502.13923, section 2.1.3.
    """
    parts = [torch.zeros((3, 0), dtype=torch.int64)]
    for sample, tokens in enumerate(batch.ranges):
        at = start = 0  # the next token and the next position
        for begin, end, _, medium in batch.runs[sample]:
            where = f"mrope_positions: sample {batch.sample_ids[sample]!r}, tokens {begin} to {end - 1}"
            if medium < 0:
                raise ValueError(f"{where}: placeholders without a medium; pass its pixels, or drop the placeholders")
            parts.append(_text(start, begin - at))
            start += begin - at
            grid = _grid(where, batch.media[medium], batch.merge_size, end - begin, tokens_per_second)
            parts.append(grid + start)
            start += int(grid.max()) + 1 if grid.numel() else 0
            at = end
        parts.append(_text(start, tokens.stop - tokens.start - at))
    return torch.cat(parts, 1)


def _text(start: int, tokens: int) -> Tensor:
    return torch.arange(start, start + tokens).expand(3, -1)


def _grid(where: str, medium: Medium, merge: int, run: int, tokens_per_second: float) -> Tensor:  # [3, run]
    t, h, w = medium.grid
    if h % merge or w % merge:
        raise ValueError(
            f"{where}: the grid {medium.grid} does not divide into {merge} x {merge} patches; resize to multiples of "
            f"patch_size * {merge} pixels"
        )
    if run != medium.tokens(merge):  # one run per temporal patch
        t, times = 1, [0.0]
    elif isinstance(medium.seconds, tuple):
        times = [(time - medium.seconds[0]) * tokens_per_second for time in medium.seconds]
    else:
        times = [k * (medium.seconds * tokens_per_second) for k in range(t)]
    if run != t * (h // merge) * (w // merge):
        raise ValueError(
            f"{where}: {run} placeholder tokens for the grid {medium.grid}, whose patches merge {merge} x {merge}; "
            "expand the placeholders from the grid that the processor returned"
        )
    temporal = torch.tensor([int(time) for time in times])
    axes = torch.meshgrid(temporal, torch.arange(h // merge), torch.arange(w // merge), indexing="ij")
    return torch.stack(axes).reshape(3, -1)
