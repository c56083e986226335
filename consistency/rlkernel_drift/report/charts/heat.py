"""Heat map of the error by operator and token, as an indexed PNG that is encoded here without an imaging library."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from itertools import zip_longest

from rlkernel_drift.capsule import layer_of
from rlkernel_drift.report.charts.axes import Box, figure, svg, text, x_label
from rlkernel_drift.report.markup import Child, Markup, plural, tag
from rlkernel_drift.verdict import LayerView

Colour = tuple[int, int, int]

# From dark blue over grey to light yellow. Lightness rises evenly, so the scale is legible with any colour vision.
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
        r, g, b = (round(x + (y - x) * (place - left)) for x, y in zip(*SEQUENTIAL[left : left + 2], strict=True))
        colours.append((r, g, b))
    return colours


def png(rows: Sequence[bytes]) -> bytes:
    """An image from rows of palette indices; index `LEVELS` is transparent."""
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


MAX_ROWS = 320
MAX_COLUMNS = 128


def heat_map(view: LayerView) -> tuple[Markup, dict[str, object]] | None:
    """The figure, and the data that the script reads out; None without cells."""
    rows, names, group = _rows(view)
    columns = min(max((len(row) for row in rows), default=0), MAX_COLUMNS)
    rows = [[_clamp(cell) for cell in row[:columns]] + [None] * (columns - len(row)) for row in rows]
    known = [cell for row in rows for cell in row if cell is not None]
    if not known or not columns:
        return None
    low, high = min(known), max(known)
    if high - low < 1:
        low, high = (low + high) / 2 - 0.5, (low + high) / 2 + 0.5
    level = lambda cell: LEVELS if cell is None else round((cell - low) / (high - low) * (LEVELS - 1))
    picture = png([bytes(level(cell) for cell in row) for row in rows])
    size = min(max(360 / len(rows), 1.0), 16.0)
    box = Box(940, round(size * len(rows)) + 54, left=86, right=70, top=10, bottom=44)
    height, width = box.height - box.top - box.bottom, box.width - box.left - box.right
    place = {"x": box.left, "y": box.top, "width": width, "height": height}
    href = "data:image/png;base64," + base64.b64encode(picture).decode("ascii")
    cell = {"width": width / columns, "height": height / len(rows)}
    parts: list[Child] = [
        tag("rect", **place, class_="void"),
        tag("image", href=href, **place, preserveAspectRatio="none", class_="pixels"),
        _row_labels(names, box, cell["height"]),
        _column_labels(view.heat_tokens[:columns], box, cell["width"]),
        _colour_bar(box, height, low, high),
        tag("rect", x=0, y=0, **cell, class_="cursor", hidden=True),
        x_label(box, "tokens, in groups; the first of each is named"),
    ]
    data = {
        "box": [box.left, box.top, width, height],
        "names": names,
        "tokens": view.heat_tokens[:columns],
        # hundredths of a decade: exact enough to read, and short
        "cells": [[None if cell is None else round(cell * 100) for cell in row] for row in rows],
    }
    hottest = max(range(len(rows)), key=lambda i: max((c for c in rows[i] if c is not None), default=-math.inf))
    words: list[Child] = ["Relative error of each operator's output, largest of each group of tokens. Brightest row: "]
    words += [tag("b", names[hottest]), "."]
    if len(known) < len(rows) * columns:
        words.append(" Empty cells have no difference.")
    if group > 1:
        words.append(f" Each row is the largest of {group} neighbouring operators, of {len(view.heat):,}.")
    drawing = svg(box, f"Heat map of {plural(len(rows), 'row')} and {plural(columns, 'column')}", parts)
    return figure("heat", "Operator by token", words, drawing, "a cell"), data


def _rows(view: LayerView) -> tuple[list[list[float | None]], list[str], int]:
    """Cells, names, and the number of operators per row."""
    names = [*view.operators, *(f"row {i}" for i in range(len(view.operators), len(view.heat)))]
    group = max(1, math.ceil(len(view.heat) / MAX_ROWS))
    if group == 1:
        return view.heat, names[: len(view.heat)], 1
    rows: list[list[float | None]] = []
    for start in range(0, len(view.heat), group):
        columns = zip_longest(*view.heat[start : start + group])
        rows.append([max((c for c in column if c is not None), default=None) for column in columns])
    return rows, [f"{name} …" for name in names[: len(view.heat) : group]], group


def _clamp(cell: float | None) -> float | None:
    """An order of magnitude that can be drawn."""
    return min(max(cell, -40.0), 40.0) if cell is not None and math.isfinite(cell) else None


def _row_labels(names: list[str], box: Box, size: float) -> list[Child]:
    """All names where they fit, else the numbers of the layers."""
    parts: list[Child] = []
    last, before = -100.0, None
    for i, name in enumerate(names):
        y = box.top + (i + 0.5) * size
        layer = layer_of(name)
        if size >= 11:
            label = name.removeprefix("layers.")
        elif layer is None:
            label = name
        elif layer == before:
            continue
        else:
            label = f"layer {layer}"
        before = layer
        if y - last >= 11:
            label = label if len(label) <= 14 else label[:13] + "…"
            parts.append(text(box.left - 7, y + 3.5, label, at="end"))
            last = y
    return parts


def _column_labels(tokens: list[int], box: Box, width: float) -> list[Child]:
    every = max(1, math.ceil(len(tokens) / 10))
    y = box.height - box.bottom + 16
    return [text(box.left + (i + 0.5) * width, y, f"{tokens[i]:,}") for i in range(0, len(tokens), every)]


def _colour_bar(box: Box, height: float, low: float, high: float) -> list[Child]:
    """The scale at the right."""
    x, steps, tall = box.width - box.right + 14, 32, min(height, 180.0)
    colours = palette()
    parts: list[Child] = []
    for i in range(steps):
        fill = "#" + bytes(colours[round(i / (steps - 1) * (LEVELS - 1))]).hex()
        y = box.top + tall * (1 - (i + 1) / steps)
        parts.append(tag("rect", x=x, y=y, width=10, height=tall / steps + 0.5, fill=fill))
    for part, shift in ((0.0, 0.0), (0.5, 3.5), (1.0, 8.0)):
        words = f"{10 ** (low + part * (high - low)):.0e}".replace("e-0", "e-").replace("e+0", "e")
        parts.append(text(x + 15, box.top + tall * (1 - part) + shift, words, at="start"))
    return parts
