"""attention's tiles: which of them a call takes, such that every one gives a row the same bits."""

from __future__ import annotations

from typing import NamedTuple

DECODE_ROWS = 16
"""Rows of an Ampere's tile for decode, and for what else has no more of them."""


class Tile(NamedTuple):
    """Rows of a program, warps, pipeline stages, and whether the copy engine fetches packed keys where it can."""

    rows: int
    warps: int
    stages: int
    tma: bool = True


def forward_tile(rows: int, d: int, element_size: int, family: str) -> Tile:
    """Tile for sequences of at most `rows` rows.

    Tiles that keep one row's sum in one warp, in the same lanes, agree to the bit: (16, 1), (64, 4) and (128, 8) on
    Hopper. mma.sync spreads a row over warps where the tile is wider than tall. Where a family's tiles lay rows out
    differently, or nobody has measured that they agree, one tile serves prefill and decode alike. A decode step on
    Hopper wastes most rows of its tile, but has four warps to fetch keys, and its products read them in place.
    """
    if element_size == 4:
        return Tile(16, 4, 1)
    if family == "blackwell":
        return Tile(128, 8, 2)
    if family == "amd" or (family == "ampere" and d > 128):
        return Tile(64, 4, 2)
    if family == "ampere" and rows <= DECODE_ROWS:
        return Tile(DECODE_ROWS, 1, 2)
    deep = 3 if d <= 128 else 2
    if d > 128 or (rows <= 64 and (d <= 64 or family == "hopper")):
        return Tile(64, 4, deep)
    return Tile(128, 8, deep)
