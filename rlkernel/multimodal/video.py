"""Rows of videos by frame or by place, and masks of frames: permutations of the tokens of a grid."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlkernel.multimodal.schema import Medium


def token_major(media: Sequence[Medium], merge_size: int = 2) -> Tensor:  # [P] int64
    """The permutation from frame-major rows (all of frame 0, then of frame 1) to token-major rows of each medium.

    `features.index_select(0, token_major(media))` has the rows of one place in all frames next to each other;
    `frame_major` of the same media undoes it. An image keeps its order.
    """
    parts, first = [torch.zeros(0, dtype=torch.int64)], 0
    for medium in media:
        tokens = medium.tokens(merge_size)
        parts.append(torch.arange(first, first + tokens).view(medium.grid[0], -1).t().flatten())
        first += tokens
    return torch.cat(parts)


def frame_major(media: Sequence[Medium], merge_size: int = 2) -> Tensor:  # [P] int64
    """The inverse of `token_major`."""
    return torch.argsort(token_major(media, merge_size))


def frame_mask(media: Sequence[Medium], frames: Sequence[Sequence[bool]], merge_size: int = 2) -> Tensor:  # [P] bool
    """Which frame-major rows belong to frames that are kept.

    Args:
        frames: for each medium, one flag per temporal patch.

    Raises:
        ValueError: a medium has another number of flags than temporal patches.
    """
    parts = [torch.zeros(0, dtype=torch.bool)]
    for m, (medium, flags) in enumerate(zip(media, frames, strict=True)):
        t, n = medium.grid[0], len(flags)
        if n != t:
            raise ValueError(f"frame_mask: medium {m} has {t} temporal patches and {n} flags; give one for each")
        parts.append(torch.tensor(list(flags), dtype=torch.bool).repeat_interleave(medium.tokens(merge_size) // t))
    return torch.cat(parts)
