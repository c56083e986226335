"""A metric over the steps of a run, with its change of level."""

from __future__ import annotations

import math

from rlkernel_drift.report.charts.axes import Box, drawable, figure, line, linear, path, rect, svg, text, x_axis, y_axis
from rlkernel_drift.report.markup import Child, Markup, tag
from rlkernel_drift.report.numbers import number
from rlkernel_drift.verdict import Trend

MAX_STEPS = 200
_BOX = Box(460, 230, left=56, bottom=42, top=20)


def trend_chart(trend: Trend, title: str) -> Markup | None:
    """The chart; None where no step has a value."""
    pairs = list(zip(trend.steps, trend.values, strict=False))
    every = max(1, math.ceil(len(pairs) / MAX_STEPS))
    shown = [(step, value) for step, value in pairs[::every] if value is None or drawable(value)]
    known = [value for _, value in shown if value is not None]
    if not known:
        return None
    box = _BOX
    x = linear(shown[0][0], shown[-1][0], *box.x)
    low = min(0.0, *known) if min(known) < 0.5 * max(known) else min(known) - 0.1 * (max(known) - min(known))
    y = linear(low, max(known) + 0.08 * (max(known) - low), *box.y)
    parts: list[Child] = [*y_axis(box, y, "value"), *x_axis(box, x, "step", lambda v: f"{v:,.0f}")]
    parts.append(path([None if value is None else (x(step), y(value)) for step, value in shown], "line"))
    if trend.change is not None:
        here = x(trend.change)
        for level, left, right in ((trend.before, box.x[0], here), (trend.after, here, box.x[1])):
            if level is not None and drawable(level):
                parts.append(line(left, y(level), right, y(level), "limit"))
        version = "" if trend.version is None else f", weights {trend.version}"
        side = here < (box.x[0] + box.x[1]) / 2
        parts.append(line(here, box.top - 4, here, box.y[0], "flag"))
        label = f"step {trend.change:,}{version}"[:60]
        parts.append(text(here + (5 if side else -5), box.top - 7, label, at="start" if side else "end", class_="flag"))
    width = (box.x[1] - box.x[0]) / len(shown)
    for step, value in shown:
        words = f"step {step:,}: {number(value)}"
        parts.append(rect(x(step) - width / 2, box.top, width, box.y[0] - box.top, "hit", words))
    words_: list[Child] = [trend.words or "No change of level", "." if not trend.words.endswith(".") else ""]
    if every > 1:
        words_.append(f" Every {every}th of {len(pairs):,} steps is drawn.")
    drawing = svg(box, f"{title} over steps", *parts)
    return figure("trend", title, tag("span", words_), drawing, hint="point at a step, or focus and use the arrow keys")
