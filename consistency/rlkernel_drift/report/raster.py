"""An indexed PNG from cells: the heat map's pixels, with no imaging library and no script."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

Colour = tuple[int, int, int]

# From dark blue over grey to light yellow, lightness rising evenly: legible with any colour vision, and in grey.
SEQUENTIAL: tuple[Colour, ...] = (
    (6, 28, 78),
    (33, 54, 110),
    (71, 82, 112),
    (103, 109, 116),
    (135, 136, 119),
    (171, 165, 111),
    (210, 196, 91),
    (253, 231, 60),
)
LEVELS = 255


def palette() -> list[Colour]:
    """`LEVELS` colours along `SEQUENTIAL`."""
    colours = []
    for level in range(LEVELS):
        place = level / (LEVELS - 1) * (len(SEQUENTIAL) - 1)
        left = min(int(place), len(SEQUENTIAL) - 2)
        a, b = SEQUENTIAL[left], SEQUENTIAL[left + 1]
        part = place - left
        colours.append((_mix(a[0], b[0], part), _mix(a[1], b[1], part), _mix(a[2], b[2], part)))
    return colours


def _mix(a: int, b: int, part: float) -> int:
    return round(a + (b - a) * part)


def png(rows: Sequence[bytes]) -> bytes:
    """A picture from rows of palette indices; index `LEVELS` is transparent."""
    width = len(rows[0])
    colours = b"".join(bytes(colour) for colour in palette()) + b"\0\0\0"
    header = struct.pack(">IIBBBBB", width, len(rows), 8, 3, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    chunks = (
        (b"IHDR", header),
        (b"PLTE", colours),
        (b"tRNS", b"\xff" * LEVELS + b"\0"),
        (b"IDAT", pixels),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def data_url(picture: bytes) -> str:
    """The picture as a `data:` address."""
    return "data:image/png;base64," + base64.b64encode(picture).decode("ascii")
