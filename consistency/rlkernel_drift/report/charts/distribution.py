"""How the differences lie: scatter, signed histogram with a lattice's ticks, ulps, growth along sequence and run."""

from __future__ import annotations

import math

from rlkernel_drift.report.charts.axes import (
    Box,
    Scale,
    drawable,
    figure,
    legend,
    line,
    linear,
    path,
    rect,
    svg,
    text,
    x_axis,
    x_label,
    y_axis,
)
from rlkernel_drift.report.markup import Child, Markup, number, plural, share, signed, tag
from rlkernel_drift.statistics import Lattice, UlpHistogram
from rlkernel_drift.verdict import Histogram, Trend

_HALF = Box(460, 320, left=56, bottom=42)
_LOW = Box(460, 230, left=56, bottom=42)
MAX_POINTS = 4000
MAX_BINS = 400


def scatter(points: list[tuple[float, float]], of: int) -> Markup | None:
    """Log-probabilities of both sides; equal ones lie on the diagonal."""
    shown = points[:: max(1, math.ceil(len(points) / MAX_POINTS))]
    shown = [(r, t) for r, t in shown if drawable(r) and drawable(t)]
    if not shown:
        return None
    low = max(min(min(r, t) for r, t in shown), -60.0)
    high = min(max(max(r, t) for r, t in shown), 1.0)
    low, high = min(low * 1.03, -0.1), max(high, 0.0)
    box = _HALF
    x, y = linear(low, high, *box.x), linear(low, high, *box.y)
    # A point is a line of no length with round ends: a few bytes each.
    dots = "".join(f"M{x(r):.1f} {y(t):.1f}h0" for r, t in shown)
    diagonal = line(x(low), y(low), x(high), y(high), "diagonal")
    parts: list[Child] = [
        *y_axis(box, y, "train"),
        *x_axis(box, x, "rollout"),
        diagonal,
        tag("path", d=dots, class_="points"),
    ]
    parts.append(tag("circle", r=5, class_="cursor", hidden=True))
    drawing = tag(
        "svg",
        *parts,
        viewBox=f"0 0 {box.width} {box.height}",
        role="img",
        aria_label=f"Scatter plot of {plural(len(shown), 'token')}",
        data_domain=f"{low:g} {high:g} {box.x[0]} {box.x[1]} {box.y[0]} {box.y[1]}",
    )
    rest = (
        f", {plural(len(shown), 'token')} of {of:,}, evenly spaced"
        if of > len(shown)
        else f", {plural(len(shown), 'token')}"
    )
    words = (
        f"Log-probabilities of both sides{rest}. On the line both agree; below it training finds a token less likely."
    )
    return figure(
        "scatter", "Rollout against train", words, drawing, hint="point at a token, or focus and use the arrow keys"
    )


def signed_histogram(histogram: Histogram, lattice: Lattice | None) -> Markup | None:
    """Counts of train - rollout, by orders of magnitude; below, the multiples that a lattice predicts."""
    edges, counts = histogram.edges[: MAX_BINS + 1], histogram.counts[:MAX_BINS]
    bins = min(len(counts), len(edges) - 1)
    total = sum(counts[:bins])
    if bins < 1 or not total or not all(map(drawable, edges)) or not edges[0] < edges[bins]:
        return None
    box = _HALF
    x = linear(edges[0], edges[bins], *box.x)
    y = Scale(0.5, max(max(counts[:bins]), 2) * 1.6, *box.y, log=True)
    base = box.y[0]
    parts: list[Child] = [
        *y_axis(box, y, "tokens", lambda v: f"{v:,.0f}" if v >= 1 else ""),
        *x_axis(box, x, "train - rollout (nats)"),
    ]
    for i in range(bins):
        if counts[i]:
            middle = (edges[i] + edges[i + 1]) / 2
            side = "zero" if edges[i] <= 0 <= edges[i + 1] else "pos" if middle > 0 else "neg"
            parts.append(
                rect(x(edges[i]) + 0.3, y(counts[i]), x(edges[i + 1]) - x(edges[i]) - 0.6, base - y(counts[i]), side)
            )
    parts.append(line(x(0), box.top, x(0), base, "zero"))
    if lattice is not None:
        parts += _lattice_ticks(box, x, lattice)
    for i in range(bins):
        words = (
            f"{signed(edges[i])} to {signed(edges[i + 1])}: {plural(counts[i], 'token')}, {share(counts[i] / total)}"
        )
        words += ", and all beyond" if i in (0, bins - 1) else ""
        parts.append(rect(x(edges[i]), box.top, x(edges[i + 1]) - x(edges[i]), base - box.top, "hit", words))
    middle_bins = [i for i in range(bins) if edges[i] <= 0 <= edges[i + 1]]
    above = sum(counts[max(middle_bins, default=0) + 1 : bins])
    words_: list[Child] = [
        f"{share(above / total)} above zero, outside the middle bin; the outermost bins hold all beyond. "
    ]
    if lattice is not None:
        words_ += [tag("b", f"{lattice}".capitalize()), ", marked at the top: values were rounded to few bits."]
    items = [("k-neg", "training finds the token less likely"), ("k-pos", "more likely")]
    items += [("k-tick", f"multiples of {_fraction(lattice.step)}")] if lattice else []
    return figure(
        "signed",
        "Signed differences",
        words_,
        svg(box, "Histogram of train - rollout", *parts),
        legend=legend(*items),
        hint="point at a bar, or focus and use the arrow keys",
    )


def _fraction(step: float) -> str:
    return f"1/{round(1 / step)}" if 0 < step < 1 else number(step)


def _lattice_ticks(box: Box, x: Scale, lattice: Lattice) -> list[Child]:
    first, last = math.ceil(x.low / lattice.step), math.floor(x.high / lattice.step)
    if not 0 <= last - first <= 200:
        return []
    parts: list[Child] = []
    every = max(1, math.ceil((last - first) / 6))
    for k in range(first, last + 1):
        here = x(k * lattice.step)
        parts.append(line(here, box.top, here, box.top + (9 if k % every else 14), "lattice"))
    return parts


def ulp_chart(ulps: UlpHistogram) -> Markup | None:
    """How many steps of fp32 lie between the two values of a token."""
    bins = [("0", ulps.equal), *list(ulps.bins.items())[:16]]
    total = sum(count for _, count in bins)
    if not total:
        return None
    box = _LOW
    y = Scale(0.5, max(max(count for _, count in bins), 2) * 2.2, *box.y, log=True)
    width = (box.x[1] - box.x[0]) / len(bins)
    base = box.y[0]
    parts: list[Child] = [*y_axis(box, y, "tokens", lambda v: f"{v:,.0f}" if v >= 1 else "")]
    for i, (label, count) in enumerate(bins):
        left, bar = box.x[0] + i * width, min(width * 0.7, 34)
        middle = left + width / 2
        if count:
            parts.append(rect(middle - bar / 2, y(count), bar, base - y(count), "equal" if i == 0 else "bar"))
            parts.append(text(middle, y(count) - 4, _short(count), class_="tick"))
        parts.append(text(middle, base + 15, "equal" if i == 0 else _bin(label), class_="tick"))
        parts.append(
            rect(
                left,
                box.top,
                width,
                base - box.top,
                "hit",
                f"{label} ulps: {plural(count, 'token')}, {share(count / total)}",
            )
        )
    parts += [line(box.x[0], base, box.x[1], base, "base"), x_label(box, "distance in units in the last place of fp32")]
    furthest = "" if ulps.maximum is None else f" Furthest: {ulps.maximum:,}."
    words = f"{share(ulps.equal / total)} of the tokens have equal bits.{furthest}"
    return figure(
        "ulps",
        "Distance in ulps",
        words,
        svg(box, "Histogram of ulps", *parts),
        hint="point at a bar, or focus and use the arrow keys",
    )


def _bin(label: str) -> str:
    """The upper end stands for the bin: ranges of long numbers do not fit below bars."""
    if label.startswith(">="):
        return "more"
    low, _, high = label.partition("-")
    return f"≤{_short(int(high))}" if high.isdigit() else low


def _short(count: int) -> str:
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return str(count)


def by_position(points: list[tuple[float, float]]) -> Markup | None:
    """Mean |d| along the sequence."""
    shown = [(index, size) for index, size in points if drawable(index) and drawable(size)][:200]
    if len(shown) < 2:
        return None
    box = _LOW
    x = linear(shown[0][0], shown[-1][0], *box.x)
    y = linear(0, max(size for _, size in shown) * 1.1 or 1.0, *box.y)
    parts: list[Child] = [*y_axis(box, y, "mean |d|"), *x_axis(box, x, "index in the sequence", lambda v: f"{v:,.0f}")]
    parts.append(path([(x(i), y(s)) for i, s in shown], "line"))
    parts += [tag("circle", cx=x(i), cy=y(s), r=3.0, class_="dot") for i, s in shown]
    half = (box.x[1] - box.x[0]) / len(shown) / 2
    for i, s in shown:
        parts.append(
            rect(
                x(i) - half,
                box.top,
                2 * half,
                box.y[0] - box.top,
                "hit",
                f"around token {i:,.0f}: mean |d| {number(s)}",
            )
        )
    first, last = shown[0][1], shown[-1][1]
    way = (
        "They grow along the sequence"
        if last > 2 * first
        else "They shrink along it"
        if first > 2 * last
        else "They do not grow along the sequence"
    )
    words = f"{way}: {number(first, 3)} at its beginning, {number(last, 3)} at its end."
    return figure(
        "position",
        "Differences by position",
        words,
        svg(box, "Mean difference by position", *parts),
        hint="point at a dot, or focus and use the arrow keys",
    )


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
