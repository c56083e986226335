"""Scales, ticks and the frame of a chart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rlkernel_drift.report.markup import Child, Markup, number, tag

_HUGE, _TINY = 1e100, 1e-300


def drawable(value: float | None) -> bool:
    """Whether a value can stand on an axis: finite, and far from where differences of doubles overflow."""
    return value is not None and abs(value) < _HUGE


@dataclass(frozen=True)
class Scale:
    """A map from values to pixels.

    Attributes:
        low, high: the domain; start, end: where it lies, in pixels.
        log: by orders of magnitude; values below `low` are drawn at `low`.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        if self.log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values inside the domain."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            if last - first < 2:
                fine = [m * 10.0**e for e in range(first - 1, last + 1) for m in (1, 2, 5)]
                return [v for v in fine if self.low <= v * (1 + 1e-9) and v <= self.high * (1 + 1e-9)]
            step = max(1, math.ceil((last - first) / count))
            return [10.0**e for e in range(first, last + 1, step)]
        width = _round_step((self.high - self.low) / count)
        first, last = math.ceil(self.low / width - 1e-9), math.floor(self.high / width + 1e-9)
        return [float(f"{i * width:.12g}") for i in range(first, last + 1)]


def linear(low: float, high: float, start: float, end: float) -> Scale:
    """A linear scale; a single value gets some room on both sides."""
    size = max(abs(low), abs(high))
    # Steps of a range of subnormal numbers would be 0.
    if not high - low > max(1e-12 * size, _TINY):
        room = 0.1 * size if 0.1 * size > _TINY else 1.0
        low, high = min(low, high) - room, max(low, high) + room
    return Scale(low, high, start, end)


def logarithmic(values: Iterable[float | None], start: float, end: float) -> Scale:
    """A scale around all positive values, with a little room."""
    positive = [value for value in values if value is not None and drawable(value) and value > 1 / _HUGE]
    low, high = (min(positive), max(positive)) if positive else (1e-7, 1e-1)
    return Scale(low / 1.6, max(high, low * 4) * 1.6, start, end, log=True)


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next((m * power for m in (1, 2, 2.5, 5) if m * power >= rough * 0.999), 10 * power)


@dataclass(frozen=True)
class Box:
    """A chart's size and the room around its plot."""

    width: int
    height: int
    left: int = 52
    right: int = 12
    top: int = 12
    bottom: int = 38

    @property
    def x(self) -> tuple[float, float]:
        """Left and right edge of the plot."""
        return self.left, self.width - self.right

    @property
    def y(self) -> tuple[float, float]:
        """Bottom and top edge of the plot."""
        return self.height - self.bottom, self.top


def text(x: float, y: float, words: str, *, at: str = "middle", class_: str | None = None) -> Markup:
    """A label."""
    return tag("text", words, x=float(x), y=float(y), text_anchor=None if at == "start" else at, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A straight line."""
    return tag("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_)


def rect(x: float, y: float, width: float, height: float, class_: str, words: str | None = None) -> Markup:
    """A rectangle; `words` make it a mark to read."""
    size = {"width": max(float(width), 0.0), "height": max(float(height), 0.0)}
    return tag("rect", x=float(x), y=float(y), **size, class_=class_, data_t=words)


def path(points: Sequence[tuple[float, float] | None], class_: str) -> Markup:
    """A line through points, broken at None."""
    parts, pen = [], "M"
    for point in points:
        if point is None:
            pen = "M"
            continue
        parts.append(f"{pen}{point[0]:.1f} {point[1]:.1f}")
        pen = "L"
    return tag("path", d="".join(parts), class_=class_)


def y_axis(box: Box, scale: Scale, label: str, format_: Callable[[float], str] = number) -> list[Child]:
    """Grid lines and numbers on the left."""
    parts: list[Child] = []
    for value in scale.ticks(4):
        y = scale(value)
        parts.append(line(box.left, y, box.width - box.right, y, "grid"))
        parts.append(text(box.left - 7, y + 3.5, format_(value), at="end", class_="tick"))
    middle = (box.top + box.height - box.bottom) / 2
    parts.append(
        tag("text", label, transform=f"translate(12 {middle:.0f}) rotate(-90)", text_anchor="middle", class_="axis")
    )
    return parts


def x_axis(box: Box, scale: Scale, label: str, format_: Callable[[float], str] = number, count: int = 6) -> list[Child]:
    """Numbers below."""
    base = box.height - box.bottom
    parts: list[Child] = [line(box.left, base, box.width - box.right, base, "base")]
    for value in scale.ticks(count):
        x = scale(value)
        parts.append(line(x, base, x, base + 4, "base"))
        parts.append(text(x, base + 16, format_(value), class_="tick"))
    return [*parts, x_label(box, label)]


def x_label(box: Box, label: str) -> Markup:
    """The axis' name below the numbers."""
    return text((box.left + box.width - box.right) / 2, box.height - 6, label, class_="axis")


def svg(box: Box, label: str, *children: Child) -> Markup:
    """The drawing; `label` says in words what it shows."""
    return tag(
        "svg",
        *children,
        viewBox=f"0 0 {box.width} {box.height}",
        role="img",
        aria_label=label,
        class_="wide" if box.width > 600 else None,
    )


def figure(
    kind: str, title: str, words: Child, drawing: Child, *, legend: Child = None, hint: str = "", id_: str | None = None
) -> Markup:
    """A chart with its title, its sentence in words, and the line that reads the mark under pointer or keys."""
    return tag(
        "figure",
        tag("figcaption", tag("h3", title), tag("p", words), legend),
        tag(
            "div", drawing, class_="plot", tabindex="0", role="group", aria_label=f"{title}: {hint}" if hint else title
        ),
        tag("output", hint, class_="read", aria_live="polite"),
        class_=f"chart {kind}",
        data_chart=kind,
        id=id_,
    )


def legend(*items: tuple[str, str]) -> Markup:
    """(class of the swatch, words) pairs."""
    return tag("ul", [tag("li", tag("i", class_=f"key {name}"), words) for name, words in items], class_="legend")
