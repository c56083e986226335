"""Tile shapes of the attention kernels. All tiles of one GPU family give a row the same bits."""

from __future__ import annotations

from typing import NamedTuple

DECODE_ROWS = 16
"""Ampere: rows of the decode tile, used if no sequence has more rows."""


class Tile(NamedTuple):
    """Rows per program, warps, pipeline stages, and whether TMA may load packed keys. A row is a (query, head) pair."""

    rows: int
    warps: int
    stages: int
    tma: bool = True


def forward_tile(rows: int, d: int, element_size: int, family: str) -> Tile:
    """Tile for sequences of at most `rows` rows.

    Tiles that sum a row in the same lanes of one warp agree bit for bit: (rows, warps) = (16, 1), (64, 4) and (128, 8)
    on Hopper. mma.sync spreads a row over warps if the tile is wider than tall. Families whose tiles lay rows out
    differently, or have not been compared, use one tile for prefill and decode. Decode on Hopper uses a 64-row tile
    although most rows are empty, because four warps load keys faster and wgmma reads them from shared memory.
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
