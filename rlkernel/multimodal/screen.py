"""Coordinates on a screen: checks, and conversion between pixels, 0 to 1, and 0 to 1000.

A point names a pixel; in another system it is the cell that holds the pixel's centre. A box names edges, which lie
between pixels. A value that is converted to a grid at least as fine and back is unchanged: from pixels to thousandths
on a side of at most 1000 pixels, from thousandths to pixels on a longer one, and to normalised coordinates always.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

THOUSAND = 1000
SYSTEMS = ("pixel", "normalised", "thousand")


class Screen(NamedTuple):
    """A screen of width x height pixels."""

    width: int
    height: int


def convert_point(point: Sequence[float], source: str, target: str, screen: Screen) -> tuple[float, float]:
    """A point (x, y) in another coordinate system.

    Pixels and thousandths are whole numbers in [0, size) and [0, 1000); normalised ones are in [0, 1).

    Raises:
        ValueError: the point is outside the screen, or a system is unknown.
    """
    _raise(point_problem(point, screen, source))
    x, y = (_point(v, _cells(source, n), _cells(target, n)) for v, n in zip(point, screen, strict=True))
    return x, y


def convert_box(box: Sequence[float], source: str, target: str, screen: Screen) -> tuple[float, float, float, float]:
    """A box (left, top, right, bottom) in another coordinate system.

    Edges are whole numbers in [0, size] and [0, 1000]; normalised ones are in [0, 1].

    Raises:
        ValueError: the box is empty or outside the screen, or a system is unknown.
    """
    _raise(box_problem(box, screen, source))
    left, top, right, bottom = (
        _edge(v, _cells(source, n), _cells(target, n)) for v, n in zip(box, (*screen, *screen), strict=True)
    )
    return left, top, right, bottom


def point_problem(point: Sequence[float], screen: Screen, system: str) -> str | None:
    """What is wrong with a point, in words; None if it lies on the screen."""
    return _problem("point", point, 2, screen, system)


def box_problem(box: Sequence[float], screen: Screen, system: str) -> str | None:
    """What is wrong with a box, in words; None if it lies on the screen and is not empty."""
    found = _problem("box", box, 4, screen, system)
    if found is None and not (box[0] < box[2] and box[1] < box[3]):
        found = f"box {_shown(box)} is empty; expected left < right and top < bottom"
    return found


def _problem(kind: str, values: Sequence[float], size: int, screen: Screen, system: str) -> str | None:
    if system not in SYSTEMS:
        return f"coordinate system {system!r} is unknown; expected one of {', '.join(SYSTEMS)}"
    if min(screen) <= 0:
        return f"{kind} {_shown(values)} on a screen of {screen.width}x{screen.height} pixels; give screen_size"
    if len(values) != size or not all(math.isfinite(v) for v in values):
        return f"{kind} {_shown(values)} is not {size} finite numbers"
    if system != "normalised" and any(v != int(v) for v in values):
        return f"{kind} {_shown(values)} has fractions; round to whole numbers, or use normalised coordinates"
    for value, pixels in zip(values, (*screen, *screen), strict=False):
        most = 1 if system == "normalised" else _cells(system, pixels) or 1
        inside = 0 <= value < most if kind == "point" else 0 <= value <= most
        if not inside:
            bracket = ")" if kind == "point" else "]"
            return (
                f"{kind} {_shown(values)} lies outside the screen of {screen.width}x{screen.height} pixels: "
                f"{value:g} is not in [0, {most}{bracket} of {system} coordinates; check the coordinate system"
            )
    return None


def _shown(values: Sequence[float]) -> str:
    return "(" + ", ".join(f"{v:g}" for v in values) + ")"


def _raise(problem: str | None) -> None:
    if problem is not None:
        raise ValueError(problem)


def _cells(system: str, pixels: int) -> int | None:
    """Cells of an axis; None for normalised coordinates, which are continuous."""
    if system not in SYSTEMS:
        raise ValueError(f"coordinate system {system!r} is unknown; expected one of {', '.join(SYSTEMS)}")
    return {"pixel": pixels, "thousand": THOUSAND, "normalised": None}[system]


def _point(value: float, source: int | None, target: int | None) -> float:
    """The cell of the target that holds the centre of the source's cell."""
    if source is None:
        return value if target is None else int(value * target)
    if target is None:
        return (value + 0.5) / source
    return (2 * int(value) + 1) * target // (2 * source)


def _edge(value: float, source: int | None, target: int | None) -> float:
    """The nearest edge of the target."""
    if source is None:
        return value if target is None else math.floor(value * target + 0.5)
    if target is None:
        return value / source
    return (2 * int(value) * target + source) // (2 * source)
