"""Where it begins: accumulated line, local bars, the band of the floor, the first divergence; and the splices."""

from __future__ import annotations

import math
from itertools import groupby

from rlkernel_drift.report.charts.axes import (
    Box,
    Scale,
    drawable,
    figure,
    legend,
    line,
    linear,
    logarithmic,
    path,
    rect,
    svg,
    text,
    x_label,
    y_axis,
)
from rlkernel_drift.report.markup import Child, Markup, number, plural, tag
from rlkernel_drift.verdict import LayerView

MAX_OPERATORS = 400
_HINT = "point at an operator, or focus and use the arrow keys"


def layer_of(name: str) -> int | None:
    """Number of the layer in an operator's name."""
    parts = name.split(".")
    return int(parts[1]) if len(parts) > 2 and parts[0] == "layers" and parts[1].isdigit() else None


def at(values: list[float | None], index: int) -> float | None:
    """The value, None where the list is short or the value cannot be drawn."""
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
    """The chart; None where no operator has an error. `bits`: the first divergence is a finding, not rounding."""
    names = view.operators[:MAX_OPERATORS]
    count = len(names)
    series = [*view.accumulated[:count], *view.local[:count], *view.floor[:count]]
    if not count or not any(value is not None for value in series):
        return None
    box = Box(940, 300, left=62, top=24, bottom=44)
    y = logarithmic(series, *box.y)
    width = (box.x[1] - box.x[0]) / count
    x = lambda i: box.x[0] + (i + 0.5) * width
    base = box.y[0]
    worst = excess(view)
    top = worst[0][1] if worst else None
    parts: list[Child] = [*_layer_stripes(names, box, width), *y_axis(box, y, "relative error", _power)]
    for i in range(count):
        local = at(view.local, i)
        if local is not None and local > 0:
            bar = max(min(width * 0.72, 18), 1)
            parts.append(rect(x(i) - bar / 2, y(local), bar, base - y(local), "bar hot" if i == top else "bar"))
    parts.append(_band(view, count, y, x, width, base))
    points: list[tuple[float, float] | None] = []
    for i in range(count):
        value = at(view.accumulated, i)
        points.append((x(i), y(value)) if value is not None and value > 0 else None)
    parts.append(path(points, "line"))
    if count <= 60:
        parts += [tag("circle", cx=p[0], cy=p[1], r=2.5, class_="dot") for p in points if p]
    parts.append(line(box.x[0], base, box.x[1], base, "base"))
    parts += _first(view, names, box, x)
    parts += [rect(box.x[0] + i * width, box.top, width, base - box.top, "hit", _words(view, i)) for i in range(count)]
    parts.append(x_label(box, "operators in the order of computation, by layer"))
    items = [("k-line", "accumulated: both sides compute from the tokens on")] if _some(view.accumulated) else []
    items += [("k-bar", "local: replayed on the other side's recorded input")] if _some(view.local) else []
    items += [("k-band", "floor: normal without a fault")] if _some(view.floor) else []
    return figure(
        "layers",
        "Error by operator",
        _summary(view, bits),
        svg(box, _plain(view), *parts),
        legend=legend(*items),
        hint=_HINT,
    )


def _some(values: list[float | None]) -> bool:
    return any(value is not None and value > 0 for value in values)


def _power(value: float) -> str:
    return number(value) if 1e-3 <= value < 1e4 else f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")


def _layer_stripes(names: list[str], box: Box, width: float) -> list[Child]:
    """Every second layer is shaded, and named below where there is room."""
    parts: list[Child] = []
    runs = [
        (layer, [i for i, _ in run]) for layer, run in groupby(enumerate(names), key=lambda item: layer_of(item[1]))
    ]
    layers = [run for run in runs if run[0] is not None]
    every = max(1, math.ceil(len(layers) * 22 / (box.x[1] - box.x[0])))
    last_label = -100.0
    for layer, run in runs:
        left, right = box.x[0] + run[0] * width, box.x[0] + (run[-1] + 1) * width
        if layer is not None and layer % 2:
            parts.append(rect(left, box.top, right - left, box.y[0] - box.top, "stripe"))
        label = None if layer is None else str(layer) if layer % every == 0 else None
        if layer is None and len(layers) < len(names):
            label = names[run[0]] if len(run) == 1 and right - left > 6.2 * len(names[run[0]]) else None
        middle = (left + right) / 2
        if label and middle - last_label > 14:
            parts.append(text(middle, box.y[0] + 16, label, class_="tick"))
            last_label = middle
    return parts


def _band(view: LayerView, count: int, y: Scale, x: object, width: float, base: float) -> Child:
    """The floor as an area, in steps: it belongs to operators, not to places between them."""
    parts: list[Child] = []
    for i in range(count):
        floor = at(view.floor, i)
        if floor is not None and floor > 0:
            middle = x(i)  # type: ignore[operator]
            parts.append(rect(middle - width / 2, y(floor), width, base - y(floor), "band"))
            parts.append(line(middle - width / 2, y(floor), middle + width / 2, y(floor), "band-top"))
    return tag("g", *parts, shape_rendering="crispEdges")


def _first(view: LayerView, names: list[str], box: Box, x: object) -> list[Child]:
    if view.first is None or view.first.operator not in names:
        return []
    here = x(names.index(view.first.operator))  # type: ignore[operator]
    left = here < (box.x[0] + box.x[1]) / 2
    label = text(
        here + (6 if left else -6), box.top - 8, "first divergence", at="start" if left else "end", class_="flag"
    )
    marker = tag("path", d=f"M{here:.1f} {box.top - 3}l-5 -8h10z", class_="flag")
    return [line(here, box.top - 4, here, box.y[0], "flag"), marker, label]


def _words(view: LayerView, i: int) -> str:
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


def _summary(view: LayerView, bits: bool) -> list[Child]:
    words: list[Child] = []
    worst = excess(view)
    if worst and worst[0][0] > 1:
        words += ["Largest local error over its floor: ", tag("b", view.operators[worst[0][1]])]
        words.append(f", {number(worst[0][0], 3)} times.")
    elif not bits and not _some(view.local):
        words.append("Errors add up along the layers, so this line alone does not show a faulty one.")
    if view.first is not None:
        first = view.first
        words += [" First bits that differ: ", tag("b", first.operator)]
        words.append(f", sequence {first.sequence}, token {first.index}")
        words.append(f", {plural(first.ulps, 'ulp')} apart" if first.ulps is not None else "")
        words.append("." if bits else "; where both sides round, that is no finding.")
    if len(view.operators) > MAX_OPERATORS:
        words.append(f" Showing the first {MAX_OPERATORS} of {len(view.operators):,} operators.")
    return words


def _plain(view: LayerView) -> str:
    worst = excess(view)
    most = f"; most over its floor: {view.operators[worst[0][1]]}" if worst else ""
    return f"Relative errors of {plural(min(len(view.operators), MAX_OPERATORS), 'operator')}{most}"


def first_drop(values: list[float | None], as_is: float | None) -> int | None:
    """The operator whose exchange takes away most beyond the one before it: what came before it was not to blame."""
    before, best, largest = as_is, None, 0.0
    for i, value in enumerate(values):
        if value is None:
            continue
        if before is not None and before - value > largest:
            best, largest = i, before - value
        before = value
    return best


def splice_chart(view: LayerView, as_is: float | None) -> Markup | None:
    """What is left of the difference when the output of one layer is exchanged, and all that led to it with it."""
    names = view.operators[:MAX_OPERATORS]
    values = [at(view.splice, i) for i in range(len(names))]
    known = [value for value in values if value is not None]
    if not known:
        return None
    box = Box(940, 190, left=62, top=16, bottom=44)
    y = linear(0, max([*known, as_is or 0]) * 1.08 or 1.0, *box.y)
    width = (box.x[1] - box.x[0]) / len(names)
    hot = first_drop(values, as_is)
    parts: list[Child] = [*_layer_stripes(names, box, width), *y_axis(box, y, "mean |d| left")]
    if as_is and drawable(as_is):
        parts.append(line(box.x[0], y(as_is), box.x[1], y(as_is), "limit"))
        parts.append(text(box.x[1], y(as_is) - 5, f"as it is: {number(as_is)}", at="end", class_="tick"))
    parts.append(line(box.x[0], box.y[0], box.x[1], box.y[0], "base"))
    x = lambda i: box.x[0] + (i + 0.5) * width
    points = [(x(i), y(value), i) for i, value in enumerate(values) if value is not None]
    parts.append(path([(px, py) for px, py, _ in points], "line"))
    for px, py, i in points:
        parts.append(tag("circle", cx=px, cy=py, r=4.5 if i == hot else 3.0, class_="dot hot" if i == hot else "dot"))
    half = (box.x[1] - box.x[0]) / len(points) / 2
    for px, _, i in points:
        left = max(box.x[0], px - half)
        parts.append(rect(left, box.top, min(2 * half, box.x[1] - left), box.y[0] - box.top, "hit", _words(view, i)))
    parts.append(x_label(box, "layer whose output is exchanged for the other side's"))
    words: list[Child] = ["An exchange removes what differs up to that layer. "]
    if hot is None:
        words.append("No exchange removes anything.")
    else:
        words += ["Most goes with ", tag("b", names[hot]), f": {number(values[hot])} of mean |d| is left"]
        words.append(f", from {number(as_is)} as it is." if as_is else ".")
    drawing = svg(box, "Mean difference left by layer", *parts)
    return figure("splice", "What an exchange removes", words, drawing, hint=_HINT)
