"""Charts of the differences: scatter, signed histogram with a lattice's ticks, ulps, by position, and over steps."""

from __future__ import annotations

import math

from rlkernel_drift.report.charts.axes import Box, Plot, Scale, drawable, figure, line, linear, svg, text
from rlkernel_drift.report.markup import Child, Markup, fraction, number, plural, share, signed, tag
from rlkernel_drift.statistics import Lattice, UlpHistogram
from rlkernel_drift.verdict import Histogram, Trend

_TALL = Box(460, 320)
_LOW = Box(460, 230)
MAX_POINTS = 4000
MAX_BINS = 400
MAX_STEPS = 200


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else ""


def _index(value: float) -> str:
    return f"{value:,.0f}"


def scatter(points: list[tuple[float, float]], of: int) -> Markup | None:
    """Log-probabilities of both sides; equal ones lie on the diagonal. `of`: tokens that were compared."""
    shown = [(r, t) for r, t in points[:: math.ceil(len(points) / MAX_POINTS) or 1] if drawable(r) and drawable(t)]
    if not shown:
        return None
    low = min(max(min(map(min, shown)), -60.0) * 1.03, -0.1)
    high = max(min(max(map(max, shown)), 1.0), 0.0)
    box = _TALL
    plot = Plot(box, linear(low, high, *box.x), linear(low, high, *box.y))
    plot.axes("train", "rollout")
    plot.parts.append(line(plot.x(low), plot.y(low), plot.x(high), plot.y(high), "diagonal"))
    # Each point is a line of length zero with round ends, which takes the fewest bytes.
    dots = "".join(f"M{plot.x(r):.1f} {plot.y(t):.1f}h0" for r, t in shown)
    plot.parts += [tag("path", d=dots, class_="points"), tag("circle", r=5, class_="cursor", hidden=True)]
    domain = f"{low:g} {high:g} {box.x[0]} {box.x[1]} {box.y[0]} {box.y[1]}"
    drawing = svg(box, f"Scatter plot of {plural(len(shown), 'token')}", plot.parts, domain)
    sampled = f" of {of:,}, evenly spaced" if of > len(shown) else ""
    words = (
        f"Log-probabilities of both sides, {plural(len(shown), 'token')}{sampled}. On the line both agree; below it "
        "training finds a token less likely."
    )
    return figure("scatter", "Rollout against train", words, drawing, "a token")


def signed_histogram(histogram: Histogram, lattice: Lattice | None) -> Markup | None:
    """Counts of train - rollout, logarithmic; ticks at the top mark the multiples that a lattice predicts."""
    edges, counts = histogram.edges[: MAX_BINS + 1], histogram.counts[:MAX_BINS]
    bins = min(len(counts), len(edges) - 1)
    total = sum(counts[:bins])
    if bins < 1 or not total or not all(map(drawable, edges)) or not edges[0] < edges[bins]:
        return None
    box = _TALL
    y = Scale(0.5, max(max(counts[:bins]), 2) * 1.6, *box.y, log=True)
    plot = Plot(box, linear(edges[0], edges[bins], *box.x), y)
    plot.axes("tokens", "train - rollout (nats)", _count)
    middle = 0
    for i, count in enumerate(counts[:bins]):
        left, right = edges[i], edges[i + 1]
        side = "zero" if left <= 0 <= right else "pos" if left + right > 0 else "neg"
        middle = i if side == "zero" else middle
        if count:
            plot.bar(plot.x(left) + 0.3, plot.x(right) - plot.x(left) - 0.6, count, side)
    plot.parts.append(line(plot.x(0), box.top, plot.x(0), plot.base, "zero"))
    if lattice is not None:
        _lattice_ticks(plot, lattice.step)
    for i, count in enumerate(counts[:bins]):
        words = f"{signed(edges[i])} to {signed(edges[i + 1])}: {plural(count, 'token')}, {share(count / total)}"
        words += ", and all beyond" if i in (0, bins - 1) else ""
        plot.mark(plot.x(edges[i]), plot.x(edges[i + 1]) - plot.x(edges[i]), words)
    above = share(sum(counts[middle + 1 : bins]) / total)
    sentence: list[Child] = [f"{above} above zero, outside the middle bin; the outermost bins hold all beyond. "]
    legend = [("k-neg", "training finds the token less likely"), ("k-pos", "more likely")]
    if lattice is not None:
        sentence += [tag("b", f"{lattice}".capitalize()), ", marked at the top: values were rounded to few bits."]
        legend.append(("k-tick", f"multiples of {fraction(lattice.step)}"))
    drawing = plot.svg("Histogram of train - rollout")
    return figure("signed", "Signed differences", sentence, drawing, "a bar", legend)


def _lattice_ticks(plot: Plot, step: float) -> None:
    first, last = math.ceil(plot.x.low / step), math.floor(plot.x.high / step)
    if not 0 <= last - first <= 200:
        return
    every = max(1, math.ceil((last - first) / 6))
    for k in range(first, last + 1):
        here, top = plot.x(k * step), plot.box.top
        plot.parts.append(line(here, top, here, top + (9 if k % every else 14), "lattice"))


def ulp_chart(ulps: UlpHistogram) -> Markup | None:
    """Distance between the two values of a token, in units in the last place of fp32."""
    bins = [("0", ulps.equal), *list(ulps.bins.items())[:16]]
    total = sum(count for _, count in bins)
    if not total:
        return None
    y = Scale(0.5, max(max(count for _, count in bins), 2) * 2.2, *_LOW.y, log=True)
    plot = Plot(_LOW, Scale(0, len(bins), *_LOW.x), y)
    plot.axes("tokens", "distance in units in the last place of fp32", _count, None)
    width = plot.x(1) - plot.x(0)
    bar = min(width * 0.7, 34)
    for i, (label, count) in enumerate(bins):
        middle = plot.x(i + 0.5)
        if count:
            plot.bar(middle - bar / 2, bar, count, "bar" if i else "equal")
            plot.parts.append(text(middle, y(count) - 4, _short(count)))
        plot.parts.append(text(middle, plot.base + 15, _bin(label) if i else "equal"))
        plot.mark(plot.x(i), width, f"{label} ulps: {plural(count, 'token')}, {share(count / total)}")
    furthest = "" if ulps.maximum is None else f" Furthest: {ulps.maximum:,}."
    words = f"{share(ulps.equal / total)} of the tokens have equal bits.{furthest}"
    return figure("ulps", "Distance in ulps", words, plot.svg("Histogram of ulps"), "a bar")


def _bin(label: str) -> str:
    """The upper end of a bin, because full ranges do not fit below the bars."""
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
    y = linear(0, max(size for _, size in shown) * 1.1 or 1.0, *_LOW.y)
    plot = Plot(_LOW, linear(shown[0][0], shown[-1][0], *_LOW.x), y)
    plot.axes("mean |d|", "index in the sequence", x_format=_index)
    plot.curve(shown)
    half = (plot.x.end - plot.x.start) / len(shown) / 2
    for index, size in shown:
        plot.dot(index, size, 3.0)
        plot.mark(plot.x(index) - half, 2 * half, f"around token {index:,.0f}: mean |d| {number(size)}")
    first, last = shown[0][1], shown[-1][1]
    way = "do not grow"
    if last > 2 * first:
        way = "grow"
    elif first > 2 * last:
        way = "shrink"
    words = f"Differences {way} along the sequence: {number(first, 3)} at its start, {number(last, 3)} at its end."
    return figure("position", "Differences by position", words, plot.svg("Mean difference by position"), "a dot")


def trend_chart(trend: Trend, title: str) -> Markup | None:
    """A metric over the steps of a run; None where no step has a value."""
    pairs = list(zip(trend.steps, trend.values, strict=False))
    every = math.ceil(len(pairs) / MAX_STEPS) or 1
    shown = [(step, value) for step, value in pairs[::every] if value is None or drawable(value)]
    known = [value for _, value in shown if value is not None]
    if not known:
        return None
    box = Box(460, 230, top=20)
    low = min(0.0, *known) if min(known) < 0.5 * max(known) else min(known) - 0.1 * (max(known) - min(known))
    y = linear(low, max(known) + 0.08 * (max(known) - low), *box.y)
    plot = Plot(box, linear(shown[0][0], shown[-1][0], *box.x), y)
    plot.axes("value", "step", x_format=_index)
    plot.curve(shown)
    if trend.change is not None:
        here = plot.x(trend.change)
        for level, left, right in ((trend.before, box.x[0], here), (trend.after, here, box.x[1])):
            if level is not None and drawable(level):
                plot.level(level, left, right)
        version = "" if trend.version is None else f", weights {trend.version}"
        plot.flag(trend.change, f"step {trend.change:,}{version}"[:60])
    width = (box.x[1] - box.x[0]) / len(shown)
    for step, value in shown:
        plot.mark(plot.x(step) - width / 2, width, f"step {step:,}: {number(value)}")
    words = trend.words or "No change of level"
    words += "" if words.endswith(".") else "."
    words += f" Every {every}th of {len(pairs):,} steps is drawn." if every > 1 else ""
    return figure("trend", title, words, plot.svg(f"{title} over steps"), "a step")
