"""Operator by token: where along the sequence, and from which operator on.

The cells are the pixels of an indexed PNG, made here with no imaging library and no script.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence

from rlkernel_drift.report.charts.axes import Box, figure, text, x_label
from rlkernel_drift.report.charts.layers import layer_of
from rlkernel_drift.report.markup import Child, Markup, plural, tag
from rlkernel_drift.verdict import LayerView

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


MAX_ROWS = 320
MAX_COLUMNS = 128
_HINT = "point at a cell, or focus and use the arrow keys"


def heat_map(view: LayerView) -> tuple[Markup, dict[str, object]] | None:
    """The figure and the data that its readings need; None without cells."""
    rows, names, group = _rows(view)
    columns = min(max((len(row) for row in rows), default=0), MAX_COLUMNS)
    rows = [[_clamp(cell) for cell in row[:columns]] for row in rows]
    known = [cell for row in rows for cell in row if cell is not None]
    if not known or not columns:
        return None
    low, high = min(known), max(known)
    if high - low < 1:
        low, high = (low + high) / 2 - 0.5, (low + high) / 2 + 0.5
    level = lambda cell: LEVELS if cell is None else round((cell - low) / (high - low) * (LEVELS - 1))
    picture = png([bytes(level(cell) for cell in _padded(row, columns)) for row in rows])
    size = min(max(360 / len(rows), 1.0), 16.0)
    box = Box(940, round(size * len(rows)) + 54, left=86, right=70, top=10, bottom=44)
    height, width = box.height - box.top - box.bottom, box.width - box.left - box.right
    image = tag(
        "image",
        href=data_url(picture),
        x=box.left,
        y=box.top,
        width=width,
        height=height,
        preserveAspectRatio="none",
        class_="pixels",
    )
    parts: list[Child] = [tag("rect", x=box.left, y=box.top, width=width, height=height, class_="void"), image]
    parts += _row_labels(names, box, height / len(rows))
    parts += _column_labels(view, columns, box, width)
    parts += _colour_bar(box, height, low, high)
    parts.append(tag("rect", x=0, y=0, width=width / columns, height=height / len(rows), class_="cursor", hidden=True))
    parts.append(x_label(box, "tokens, in groups; the first of each is named"))
    drawing = tag(
        "svg",
        *parts,
        viewBox=f"0 0 {box.width} {box.height}",
        role="img",
        aria_label=f"Heat map of {plural(len(rows), 'row')} and {plural(columns, 'column')}",
        class_="wide",
    )
    data = {
        "box": [box.left, box.top, width, height],
        "names": names,
        "tokens": view.heat_tokens[:columns],
        # Hundredths of a decade: as exact as a reader needs, and short.
        "cells": [[None if c is None else round(c * 100) for c in _padded(row, columns)] for row in rows],
    }
    hottest = max(range(len(rows)), key=lambda i: max((c for c in rows[i] if c is not None), default=-math.inf))
    words: list[Child] = ["Relative error of each operator's output, largest of each group of tokens. Brightest row: "]
    words += [tag("b", names[hottest]), "."]
    if any(cell is None for row in rows for cell in row):
        words.append(" Empty cells have no difference.")
    if group > 1:
        words.append(f" Each row is the largest of {group} neighbouring operators, of {len(view.heat):,}.")
    return figure("heat", "Operator by token", words, drawing, hint=_HINT, id_="heat"), data


def _rows(view: LayerView) -> tuple[list[list[float | None]], list[str], int]:
    """Cells, names, and how many operators a row stands for."""
    group = max(1, math.ceil(len(view.heat) / MAX_ROWS))
    if group == 1:
        return view.heat, [_name(view, i) for i in range(len(view.heat))], 1
    rows, names = [], []
    for start in range(0, len(view.heat), group):
        part = view.heat[start : start + group]
        width = max(len(row) for row in part)
        columns = [[row[i] for row in part if i < len(row) and row[i] is not None] for i in range(width)]
        rows.append([max(column) if column else None for column in columns])  # type: ignore[type-var]
        names.append(f"{_name(view, start)} …")
    return rows, names, group


def _clamp(cell: float | None) -> float | None:
    """Orders of magnitude within those of doubles of people."""
    return min(max(cell, -40.0), 40.0) if cell is not None and math.isfinite(cell) else None


def _name(view: LayerView, index: int) -> str:
    return view.operators[index] if index < len(view.operators) else f"row {index}"


def _padded(row: list[float | None], columns: int) -> list[float | None]:
    return [*row[:columns], *[None] * (columns - len(row))]


def _row_labels(names: list[str], box: Box, size: float) -> list[Child]:
    """All names where they fit, else the numbers of the layers."""
    parts: list[Child] = []
    last = -100.0
    before = None
    for i, name in enumerate(names):
        y = box.top + (i + 0.5) * size
        layer = layer_of(name)
        label = name.removeprefix("layers.") if size >= 11 else f"layer {layer}" if layer is not None else name
        if size < 11 and layer is not None and layer == before:
            continue
        before = layer
        if y - last >= 11:
            parts.append(text(box.left - 7, y + 3.5, _clip(label), at="end", class_="tick"))
            last = y
    return parts


def _clip(label: str) -> str:
    return label if len(label) <= 14 else label[:13] + "…"


def _column_labels(view: LayerView, columns: int, box: Box, width: float) -> list[Child]:
    every = max(1, math.ceil(columns / 10))
    return [
        text(
            box.left + (i + 0.5) * width / columns,
            box.height - box.bottom + 16,
            f"{view.heat_tokens[i]:,}",
            class_="tick",
        )
        for i in range(0, min(columns, len(view.heat_tokens)), every)
    ]


def _colour_bar(box: Box, height: float, low: float, high: float) -> list[Child]:
    """The scale at the right, from few to many decades."""
    x = box.width - box.right + 14
    steps = 32
    tall = min(height, 180.0)
    colours = palette()
    parts: list[Child] = []
    for i in range(steps):
        r, g, b = colours[round(i / (steps - 1) * (LEVELS - 1))]
        y = box.top + tall * (1 - (i + 1) / steps)
        fill = f"#{r:02x}{g:02x}{b:02x}"
        parts.append(tag("rect", x=x, y=y, width=10, height=tall / steps + 0.5, fill=fill))
    for part, value in ((0.0, low), (0.5, (low + high) / 2), (1.0, high)):
        y = box.top + tall * (1 - part)
        shift = {0.0: 0, 0.5: 3.5, 1.0: 8}[part]
        parts.append(
            text(
                x + 15,
                y + shift,
                f"{10**value:.0e}".replace("e-0", "e-").replace("e+0", "e"),
                at="start",
                class_="tick",
            )
        )
    return parts
