"""Line charts as inline SVG without script or style attributes, each with a description and a table of its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import accumulate

LARGE, SMALL = (540, 240), (350, 190)  # close to the size on the page, so that text is not scaled
LEFT, RIGHT, TOP, BOTTOM = 52, 22, 12, 40
TABLE_ROWS = 40
MOST_POINTS = 800


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        name: shown in the legend.
        points: (x, y), ascending in x; points whose y is None or not finite are left out.
        role: CSS class of its colour: "one", "two", "muted", or "s1" to "s8". A chart with a single line of role
            "one" has no legend.
        marks: draw the points, not only the line through them.
    """

    name: str
    points: Sequence[tuple[float, float | None]]
    role: str = "one"
    marks: bool = False

    @cached_property
    def finite(self) -> list[tuple[float, float]]:
        """The points that can be drawn."""
        return [(x, y) for x, y in self.points if y is not None and math.isfinite(y)]

    def drawn(self) -> list[tuple[float, float]]:
        """The finite points; of a long line the smallest and the largest of each stretch."""
        points = self.finite
        if len(points) <= MOST_POINTS:
            return points
        size = math.ceil(2 * len(points) / MOST_POINTS)
        kept = [points[0]]
        for start in range(0, len(points), size):
            stretch = points[start : start + size]
            ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
            kept += sorted(ends)
        return [*kept, points[-1]]


def running_mean(points: Sequence[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """Each point's mean with the `window - 1` before it; the first points have fewer."""
    sums = [0.0, *accumulate(y for _, y in points)]
    starts = [max(0, end - window) for end in range(1, len(points) + 1)]
    return [
        (x, (sums[i + 1] - sums[start]) / (i + 1 - start))
        for i, ((x, _), start) in enumerate(zip(points, starts, strict=True))
    ]


def number(value: float | None) -> str:
    """A number with 4 significant digits; integers in full, missing values as a dash."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover [low, high], about `count` of them."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = unit * next(factor for factor in (1, 2, 5, 10) if factor * unit >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def line_chart(
    key: str,
    title: str,
    series: Sequence[Series],
    *,
    x_name: str,
    y_name: str,
    low: float | None = None,
    size: tuple[int, int] = LARGE,
) -> str:
    """The chart as a `<figure>`, or a sentence if there is no finite point.

    Args:
        key: unique within the page, used in ids.
        title: heading and text alternative.
        series: the lines.
        x_name, y_name: names of the axes, with units.
        low: lower end of the y axis; default fits the data.
        size: width and height; `LARGE` or `SMALL`.
    """
    width, height = size
    heading = f"<h3>{escape(title)}</h3>"
    xs = [x for one in series for x, _ in one.finite]
    ys = [y for one in series for _, y in one.finite]
    if not xs:
        return f'<figure class="chart">{heading}<p>No data in this run.</p></figure>'
    x_ticks = [tick for tick in ticks(min(xs), max(xs), width // 80) if min(xs) <= tick <= max(xs) or tick == 0]
    y_ticks = ticks(min(ys) if low is None else min(low, *ys), max(ys))
    x_low, x_high = min([*xs, *x_ticks]), max([*xs, *x_ticks])
    y_low, y_high = y_ticks[0], y_ticks[-1]
    x_span, y_span = (x_high - x_low) or 1.0, (y_high - y_low) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / x_span * (width - LEFT - RIGHT)
        down = height - BOTTOM - (y - y_low) / y_span * (height - TOP - BOTTOM)
        return round(across, 2), round(down, 2)

    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-labelledby="{key}-title {key}-desc">',
        f'<title id="{key}-title">{escape(title)}</title>',
        f'<desc id="{key}-desc">{escape(_describe(series, x_name, y_name))}</desc>',
    ]
    for tick in y_ticks:
        _, y = place(x_low, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{_short(tick)}</text>')
    for tick in x_ticks:
        x, _ = place(tick, y_low)
        bottom = height - BOTTOM + 18
        parts.append(f'<text class="tick" x="{x}" y="{bottom}" text-anchor="middle">{_short(tick)}</text>')
    middle = (LEFT + width - RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle}" y="{height - 6}" text-anchor="middle">{escape(x_name)}</text>')
    for one in series:
        found = one.drawn()
        placed = [place(x, y) for x, y in found]
        if len(placed) > 1:
            path = " ".join(f"{x},{y}" for x, y in placed)
            parts.append(f'<polyline class="line {one.role}" points="{path}"/>')
        if one.marks or len(placed) == 1:
            for (x, y), point in zip(placed, found, strict=True):
                tip = escape(f"{one.name}: {_point(point, x_name)}")
                parts.append(f'<circle class="mark {one.role}" cx="{x}" cy="{y}" r="4"><title>{tip}</title></circle>')
    parts.append("</svg>")
    keys = "".join(f'<li><span class="key {one.role}"></span>{escape(one.name)}</li>' for one in series)
    legend = f'<ul class="legend">{keys}</ul>' if len(series) > 1 or series[0].role != "one" else ""
    caption = f'<p class="unit">{escape(y_name)}</p>'
    return f'<figure class="chart">{heading}{legend}{caption}{"".join(parts)}{_numbers(series, x_name)}</figure>'


def _short(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.2g}" if abs(value) < 1e-3 or abs(value) >= 1e6 else f"{value:g}"


def _point(point: tuple[float, float], x_name: str) -> str:
    return f"{number(point[1])} at {x_name} {number(point[0])}"


def _describe(series: Sequence[Series], x_name: str, y_name: str) -> str:
    ends = [(one.name, found[0], found[-1]) for one in series if (found := one.finite)]
    lines = [f"{name}: {_point(first, x_name)}, {_point(last, x_name)}" for name, first, last in ends]
    return f"{y_name}. " + "; ".join(lines)


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A scrollable table whose cells are HTML; the first cell of each row is its header."""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in row[1:]) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption, quote=True)}">'
        f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _numbers(series: Sequence[Series], x_name: str) -> str:
    columns = [dict(one.finite) for one in series]
    xs = sorted({x for column in columns for x in column})
    if len(xs) > TABLE_ROWS:
        # all rows with a mark (an evaluation), and evenly spaced ones of the others
        marked = {x for one, column in zip(series, columns, strict=True) if one.marks for x in column}
        keep = {xs[round(i * (len(xs) - 1) / (TABLE_ROWS - 1))] for i in range(TABLE_ROWS)}
        xs = [x for x in xs if x in keep or x in marked]
    rows = [[number(x), *(number(column[x]) if x in column else "" for column in columns)] for x in xs]
    head = [x_name, *(one.name for one in series)]
    return f"<details><summary>Numbers</summary>{table('Numbers of this chart', head, rows)}</details>"
