"""Scales and ticks, and `Plot`, which draws the elements that the charts share as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rlkernel_drift.report.markup import Child, Markup, number, tag

Format = Callable[[float], str]

_HUGE, _TINY = 1e100, 1e-300


def drawable(value: float | None) -> bool:
    """Whether a value is finite and small enough that differences of two values do not overflow."""
    return value is not None and abs(value) < _HUGE


@dataclass(frozen=True)
class Scale:
    """A map from values to pixels; values outside the domain are drawn at its ends.

    Attributes:
        low, high: the domain.
        start, end: pixels of its two ends.
        log: logarithmic instead of linear.
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
    """A linear scale; a domain of a single value is widened on both sides."""
    size = max(abs(low), abs(high))
    # Steps of a range of subnormal numbers would be 0.
    if not high - low > max(1e-12 * size, _TINY):
        margin = 0.1 * size if 0.1 * size > _TINY else 1.0
        low, high = min(low, high) - margin, max(low, high) + margin
    return Scale(low, high, start, end)


def logarithmic(values: Iterable[float | None], start: float, end: float) -> Scale:
    """A scale around all positive values, with a margin."""
    positive = [value for value in values if value is not None and drawable(value) and value > 1 / _HUGE]
    low, high = (min(positive), max(positive)) if positive else (1e-7, 1e-1)
    return Scale(low / 1.6, max(high, low * 4) * 1.6, start, end, log=True)


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next((m * power for m in (1, 2, 2.5, 5) if m * power >= rough * 0.999), 10 * power)


@dataclass(frozen=True)
class Box:
    """A chart's size and the margins around its plot, in pixels."""

    width: int
    height: int
    left: int = 56
    right: int = 12
    top: int = 12
    bottom: int = 42

    @property
    def x(self) -> tuple[float, float]:
        """Left and right edge of the plot."""
        return self.left, self.width - self.right

    @property
    def y(self) -> tuple[float, float]:
        """Bottom and top edge of the plot."""
        return self.height - self.bottom, self.top


def text(x: float, y: float, words: str, class_: str = "tick", at: str = "middle") -> Markup:
    """A label; `at` is its anchor."""
    return tag("text", words, x=float(x), y=float(y), text_anchor=None if at == "start" else at, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A straight line."""
    return tag("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_)


def rect(x: float, y: float, width: float, height: float, class_: str, words: str | None = None) -> Markup:
    """A rectangle; `words` are shown when it is under the pointer or selected by key."""
    size = {"width": max(float(width), 0.0), "height": max(float(height), 0.0)}
    return tag("rect", x=float(x), y=float(y), **size, class_=class_, data_t=words)


def gauge(width: int, value: float, class_: str, tick: float | None = None) -> Markup:
    """A bar for a table cell, `value` of `width` pixels long, with an optional tick."""
    parts = [rect(0, 4, width, 8, "track"), rect(0, 4, value, 8, class_)]
    if tick is not None:
        parts.append(line(tick, 1, tick, 15, "base"))
    return tag("svg", parts, viewBox=f"0 0 {width} 16", width=str(width), height="16", aria_hidden="true")


def svg(box: Box, label: str, parts: Child, domain: str | None = None) -> Markup:
    """The drawing; `label` is its text alternative."""
    wide = "wide" if box.width > 600 else None
    view = f"0 0 {box.width} {box.height}"
    return tag("svg", parts, viewBox=view, role="img", aria_label=label, class_=wide, data_domain=domain)


def x_label(box: Box, label: str) -> Markup:
    """The name of the x axis, below the numbers."""
    return text(sum(box.x) / 2, box.height - 6, label, "axis")


def figure(
    kind: str, title: str, words: Child, drawing: Child, mark: str, legend: Sequence[tuple[str, str]] = ()
) -> Markup:
    """A chart with its title, a sentence, and a line that shows the reading under the pointer.

    Args:
        mark: what can be pointed at, "a bar".
        legend: (class of the swatch, words) pairs.
    """
    hint = f"point at {mark}, or focus and use the arrow keys"
    items = [tag("li", tag("i", class_=f"key {name}"), words) for name, words in legend]
    return tag(
        "figure",
        tag("figcaption", tag("h3", title), tag("p", words), tag("ul", items, class_="legend") if items else None),
        tag("div", drawing, class_="plot", tabindex="0", role="group", aria_label=f"{title}: {hint}"),
        tag("output", hint, class_="read", aria_live="polite"),
        class_=f"chart {kind}",
        data_chart=kind,
        id=kind if kind == "heat" else None,
    )


class Plot:
    """A chart in the making: its scales, and its elements in the order in which they are drawn."""

    def __init__(self, box: Box, x: Scale, y: Scale) -> None:
        self.box, self.x, self.y = box, x, y
        self.base = box.y[0]
        self.parts: list[Child] = []

    def axes(self, y_label: str, x_label_: str, y_format: Format = number, x_format: Format | None = number) -> None:
        """Grid lines, numbers and names; `x_format` None leaves out the numbers of the x axis."""
        box = self.box
        for value in self.y.ticks(4):
            y = self.y(value)
            self.parts += [line(*_row(box, y), "grid"), text(box.left - 7, y + 3.5, y_format(value), at="end")]
        turn = f"translate(12 {sum(box.y) / 2:.0f}) rotate(-90)"
        self.parts.append(tag("text", y_label, transform=turn, text_anchor="middle", class_="axis"))
        self.parts += [line(*_row(box, self.base), "base"), x_label(box, x_label_)]
        if x_format is None:
            return
        for value in self.x.ticks(6):
            x = self.x(value)
            self.parts += [line(x, self.base, x, self.base + 4, "base"), text(x, self.base + 16, x_format(value))]

    def bar(self, left: float, width: float, value: float, class_: str) -> None:
        """A bar from the base line up to a value; `left` and `width` in pixels."""
        self.parts.append(rect(left, self.y(value), width, self.base - self.y(value), class_))

    def curve(self, points: Iterable[tuple[float, float | None]]) -> None:
        """A line through (x, y), broken where y is None."""
        path, pen = "", "M"
        for x, y in points:
            if y is not None:
                path += f"{pen}{self.x(x):.1f} {self.y(y):.1f}"
            pen = "M" if y is None else "L"
        self.parts.append(tag("path", d=path, class_="line"))

    def dot(self, x: float, y: float, radius: float, class_: str = "dot") -> None:
        """A point."""
        self.parts.append(tag("circle", cx=self.x(x), cy=self.y(y), r=radius, class_=class_))

    def level(self, value: float, left: float, right: float) -> None:
        """A dashed horizontal line between two pixels."""
        self.parts.append(line(left, self.y(value), right, self.y(value), "limit"))

    def flag(self, x: float, label: str) -> None:
        """A vertical line with a label above, on the side that has more space."""
        here, top = self.x(x), self.box.top
        right = here < sum(self.box.x) / 2
        self.parts.append(line(here, top - 4, here, self.base, "flag"))
        self.parts.append(text(here + (6 if right else -6), top - 8, label, "flag", at="start" if right else "end"))

    def mark(self, left: float, width: float, words: str) -> None:
        """Words for the full height above some pixels of the x axis."""
        self.parts.append(rect(left, self.box.top, width, self.base - self.box.top, "hit", words))

    def svg(self, label: str) -> Markup:
        """The drawing; `label` is its text alternative."""
        return svg(self.box, label, self.parts)


def _row(box: Box, y: float) -> tuple[float, float, float, float]:
    return box.x[0], y, box.x[1], y
