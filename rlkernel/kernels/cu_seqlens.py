"""The check of `cu_seqlens` that implementations on a CPU share."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor


def check_cu_seqlens(op: str, cu_seqlens: Tensor, tokens: int) -> list[int]:
    """cu_seqlens as a list.

    Raises:
        ValueError: cu_seqlens does not start at 0, decreases, or does not end at the number of tokens.
    """
    borders = cu_seqlens.tolist()
    if borders[0] != 0 or borders[-1] != tokens or any(a > b for a, b in pairwise(borders)):
        raise ValueError(
            f"{op}: cu_seqlens must start at 0, never decrease and end at T={tokens}; it is {borders[:8]}"
            f"{'...' if len(borders) > 8 else ''}, ending at {borders[-1]}"
        )
    return borders
