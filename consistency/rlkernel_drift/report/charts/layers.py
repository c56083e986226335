"""Charts over the operators of a model: accumulated and local error against the floor, and what an exchange removes."""

from __future__ import annotations

import math
from itertools import groupby

from rlkernel_drift.capsule import layer_of
from rlkernel_drift.report.charts.axes import Box, Plot, Scale, drawable, figure, line, linear, logarithmic, rect, text
from rlkernel_drift.report.markup import Child, Markup, number, plural, tag
from rlkernel_drift.verdict import LayerView

MAX_OPERATORS = 400


def at(values: list[float | None], index: int) -> float | None:
    """The value; None where the list is too short or the value cannot be drawn."""
    value = values[index] if index < len(values) else None
    return value if drawable(value) else None


def excess(view: LayerView) -> list[tuple[float, int]]:
    """(local error over its floor, operator), the largest first."""
    found = []
    for i in range(len(view.operators)):
        local, floor = at(view.local, i), at(view.floor, i)
        if local is not None and floor is not None and floor > 0:
            found.append((local / floor, i))
    return sorted(found, key=lambda item: (-item[0], item[1]))


def layer_chart(view: LayerView, bits: bool) -> Markup | None:
    """Errors by operator; None where no operator has an error.

    Args:
        bits: equal bits were expected, so that the first divergence is a finding.
    """
    names = view.operators[:MAX_OPERATORS]
    count = len(names)
    series = [*view.accumulated[:count], *view.local[:count], *view.floor[:count]]
    if not count or not any(value is not None for value in series):
        return None
    box = Box(940, 300, left=62, top=24, bottom=44)
    plot = Plot(box, Scale(0, count, *box.x), logarithmic(series, *box.y))
    _stripes(plot, names)
    plot.axes("relative error", "operators in the order of computation, by layer", _power, None)
    width = plot.x(1) - plot.x(0)
    bar = max(min(width * 0.72, 18), 1)
    positive = {
        name: {i: value for i in range(count) if (value := at(values, i)) is not None and value > 0}
        for name, values in (("accumulated", view.accumulated), ("local", view.local), ("floor", view.floor))
    }
    worst = excess(view)
    for i, value in positive["local"].items():
        hot = " hot" if worst and i == worst[0][1] else ""
        plot.bar(plot.x(i + 0.5) - bar / 2, bar, value, f"bar{hot}")
    # The floor is drawn in steps, because it belongs to operators and not to the places between them.
    band: list[Child] = []
    for i, value in positive["floor"].items():
        y = plot.y(value)
        band += [rect(plot.x(i), y, width, plot.base - y, "band"), line(plot.x(i), y, plot.x(i + 1), y, "band-top")]
    plot.parts.append(tag("g", band, shape_rendering="crispEdges"))
    plot.curve((i + 0.5, positive["accumulated"].get(i)) for i in range(count))
    if count <= 60:
        for i, value in positive["accumulated"].items():
            plot.dot(i + 0.5, value, 2.5)
    if view.first is not None and view.first.operator in names:
        place = names.index(view.first.operator) + 0.5
        plot.flag(place, "first divergence")
        plot.parts.append(tag("path", d=f"M{plot.x(place):.1f} {box.top - 3}l-5 -8h10z", class_="flag"))
    for i in range(count):
        plot.mark(plot.x(i), width, _reading(view, i))
    legend = [
        ("k-line", "accumulated: both sides compute from the tokens on", "accumulated"),
        ("k-bar", "local: replayed on the other side's recorded input", "local"),
        ("k-band", "floor: normal without a fault", "floor"),
    ]
    label = f"Relative errors of {plural(count, 'operator')}"
    label += f"; most over its floor: {view.operators[worst[0][1]]}" if worst else ""
    shown = [(key, words) for key, words, name in legend if positive[name]]
    summary = _summary(view, bits, bool(positive["local"]))
    return figure("layers", "Error by operator", summary, plot.svg(label), "an operator", shown)


def _power(value: float) -> str:
    return number(value) if 1e-3 <= value < 1e4 else f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")


def _stripes(plot: Plot, names: list[str]) -> None:
    """Shades every second layer, and names layers below the axis where there is space."""
    groups = groupby(range(len(names)), key=lambda i: layer_of(names[i]))
    runs = [(layer, list(run)) for layer, run in groups]
    layers = sum(layer is not None for layer, _ in runs)
    every = max(1, math.ceil(layers * 22 / (plot.x.end - plot.x.start)))
    last_label = -100.0
    for layer, run in runs:
        left, right = plot.x(run[0]), plot.x(run[-1] + 1)
        if layer is not None and layer % 2:
            plot.parts.append(rect(left, plot.box.top, right - left, plot.base - plot.box.top, "stripe"))
        name = names[run[0]]
        if layer is None:
            label = name if layers < len(names) and len(run) == 1 and right - left > 6.2 * len(name) else ""
        else:
            label = "" if layer % every else str(layer)
        middle = (left + right) / 2
        if label and middle - last_label > 14:
            plot.parts.append(text(middle, plot.base + 16, label))
            last_label = middle


def _reading(view: LayerView, i: int) -> str:
    parts = [view.operators[i]]
    for name, values in (("accumulated", view.accumulated), ("local", view.local), ("floor", view.floor)):
        if at(values, i) is not None:
            parts.append(f"{name} {number(at(values, i))}")
    local, floor = at(view.local, i), at(view.floor, i)
    if local is not None and floor:
        parts.append(f"{number(local / floor, 3)} times its floor")
    if at(view.splice, i) is not None:
        parts.append(f"mean |d| {number(at(view.splice, i))} when exchanged")
    return " · ".join(parts)


def _summary(view: LayerView, bits: bool, local: bool) -> list[Child]:
    words: list[Child] = []
    worst = excess(view)
    if worst and worst[0][0] > 1:
        words += ["Largest local error over its floor: ", tag("b", view.operators[worst[0][1]])]
        words.append(f", {number(worst[0][0], 3)} times.")
    elif not bits and not local:
        words.append("Errors accumulate along the layers, so this line alone does not show a faulty one.")
    if view.first is not None:
        first = view.first
        words += [" First different bits: ", tag("b", first.operator)]
        words.append(f", sequence {first.sequence}, token {first.index}")
        words.append(f", {plural(first.ulps, 'ulp')}" if first.ulps is not None else "")
        words.append("." if bits else "; where both sides round, this is not a finding.")
    if len(view.operators) > MAX_OPERATORS:
        words.append(f" Showing the first {MAX_OPERATORS} of {len(view.operators):,} operators.")
    return words


def first_drop(values: list[float | None], as_is: float | None) -> int | None:
    """The operator whose exchange removes most compared with the exchange before it."""
    before, best, largest = as_is, None, 0.0
    for i, value in enumerate(values):
        if value is None:
            continue
        if before is not None and before - value > largest:
            best, largest = i, before - value
        before = value
    return best


def splice_chart(view: LayerView, as_is: float | None) -> Markup | None:
    """The difference that remains when a layer's output, and so everything before it, is exchanged."""
    names = view.operators[:MAX_OPERATORS]
    values = [at(view.splice, i) for i in range(len(names))]
    known = {i: value for i, value in enumerate(values) if value is not None}
    if not known:
        return None
    box = Box(940, 190, left=62, top=16, bottom=44)
    y = linear(0, max([*known.values(), as_is or 0]) * 1.08 or 1.0, *box.y)
    plot = Plot(box, Scale(0, len(names), *box.x), y)
    _stripes(plot, names)
    plot.axes("remaining mean |d|", "layer whose output is exchanged for the other side's", x_format=None)
    if as_is and drawable(as_is):
        plot.level(as_is, *box.x)
        plot.parts.append(text(box.x[1], y(as_is) - 5, f"unchanged: {number(as_is)}", at="end"))
    plot.curve((i + 0.5, value) for i, value in known.items())
    hot = first_drop(values, as_is)
    half = (box.x[1] - box.x[0]) / len(known) / 2
    for i, value in known.items():
        plot.dot(i + 0.5, value, *((4.5, "dot hot") if i == hot else (3.0,)))
    for i in known:
        left = max(box.x[0], plot.x(i + 0.5) - half)
        plot.mark(left, min(2 * half, box.x[1] - left), _reading(view, i))
    words: list[Child] = ["An exchange removes every difference up to that layer. "]
    if hot is None:
        words.append("No exchange reduces the difference.")
    else:
        words += ["The largest drop is at ", tag("b", names[hot]), f": {number(values[hot])} of mean |d| remains"]
        words.append(f", from {number(as_is)} without an exchange." if as_is else ".")
    drawing = plot.svg("Remaining mean difference by layer")
    return figure("splice", "What an exchange removes", words, drawing, "an operator")
