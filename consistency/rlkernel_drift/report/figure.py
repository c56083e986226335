"""The verdict as one PNG for an issue, drawn by matplotlib: status, gates, main numbers and plots."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

from rlkernel_drift.errors import DriftError
from rlkernel_drift.report.charts.layers import MAX_OPERATORS, at, excess
from rlkernel_drift.report.markup import fraction, number, visible
from rlkernel_drift.report.sections.measurements import lattice_of
from rlkernel_drift.report.sections.summary import LOOK, MAIN_METRICS, headline, sentence
from rlkernel_drift.verdict import Status, Verdict

_INK, _SOFT, _RULE = "#1d1c1a", "#5c5952", "#d9d6ce"
_GOOD, _BAD, _WARN, _UNSURE = "#0f6b75", "#a83c06", "#7d5a00", "#5d4a8c"
_ABOVE, _BELOW, _BAR, _HOT = "#dc7718", "#4589d2", "#9db4cc", "#d1560d"
_START, _LINE, _LINES = 1.5, 0.27, 8
_TONES = {"good": _GOOD, "bad": _BAD, "unsure": _UNSURE, "warn": _WARN}
_GATES = {
    "passed": ("✓", _GOOD),
    "failed": ("✕", _BAD),
    "warned": ("!", _WARN),
    "skipped": ("–", _SOFT),
    "not reached": ("·", _SOFT),
}


def write_png(verdict: Verdict, path: str | Path) -> None:
    """Writes the PNG.

    Raises:
        DriftError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise DriftError("a PNG needs matplotlib: pip install 'rlkernel[drift]'; --html does not") from None
    plots = _plots(verdict)
    rows = math.ceil(len(plots) / 2)
    head = _START + _LINE * max(len(verdict.gates[:_LINES]), 1)
    height = head + (0.45 + 3.0 * rows if plots else 0.0)
    figure = Figure(figsize=(11, height), dpi=120, facecolor="white")
    FigureCanvasAgg(figure)
    _words(figure, verdict)
    if plots:
        top, bottom = 1 - (head + 0.45) / height, 0.5 / height
        grid = figure.add_gridspec(rows, 2, left=0.08, right=0.97, top=top, bottom=bottom, hspace=0.42, wspace=0.22)
        for i, draw in enumerate(plots):
            wide = i == len(plots) - 1 and len(plots) % 2 == 1
            draw(_axes(figure, grid[i // 2, :] if wide else grid[i // 2, i % 2]), verdict)
    try:
        figure.savefig(path, format="png", metadata={"Software": None})
    except OSError as error:
        raise DriftError(f"cannot write {path}: {error.strerror}") from None


def _axes(figure: Any, place: Any) -> Any:
    axes = figure.add_subplot(place)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_SOFT)
    axes.tick_params(which="both", colors=_SOFT, labelsize=8)
    axes.grid(axis="y", color=_RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    return axes


def _wrap(words: str, width: int, lines: int) -> str:
    return textwrap.fill(visible(words, width * lines), width, max_lines=lines, placeholder=" …")


def _words(figure: Any, verdict: Verdict) -> None:
    """Status, title and scope at the top; gates on the left and metrics on the right below."""
    inches = figure.get_size_inches()[1]

    def write(x: float, inch: float, words: str, size: float, color: str, **style: Any) -> None:
        # parse_math=False, because untrusted text may contain dollar signs
        figure.text(x, 1 - inch / inches, words, fontsize=size, color=color, parse_math=False, va="top", **style)

    look, _, status = LOOK[verdict.status]
    profile = visible(verdict.profile, 60) or "none"
    write(0.03, 0.2, f"{status} · profile {profile}", 10, _TONES[look], weight="bold")
    found = None if verdict.status == Status.ALIGNED else verdict.diagnosis
    title = _wrap(sentence(found.statement)[0] if found else headline(verdict), 88, 2)
    write(0.03, 0.45, title, 14, _INK, weight="bold", linespacing=1.25)
    second = headline(verdict) if found else verdict.scope
    write(0.03, 1.02 if "\n" in title else 0.78, _wrap(second, 130, 1), 9.5, _SOFT)
    for i, gate in enumerate(verdict.gates[:_LINES]):
        sign, colour = _GATES[gate.status]
        inch = _START - 0.08 + _LINE * i
        write(0.035, inch, sign, 10, colour, weight="bold", ha="center")
        write(0.05, inch, visible(gate.title, 40), 9.5, _INK)
        write(0.3, inch, visible(gate.summary, 62), 8.5, _SOFT)
    judged = [m for m in verdict.metrics if m.status in ("ok", "over")]
    others = [m for m in verdict.metrics if m.name in (*MAIN_METRICS, "tokens.equal") and m not in judged]
    for i, metric in enumerate((judged + others)[:7]):
        inch, over = _START - 0.08 + _LINE * i, metric.status == "over"
        limit = ""
        if metric in judged:
            upper = metric.at_most is not None
            limit = f"  ≤ {number(metric.at_most)}" if upper else f"  ≥ {number(metric.at_least)}"
        look, weight = (_BAD, "bold") if over else (_INK, "normal")
        write(0.74, inch, metric.label, 8.5, _SOFT)
        write(0.97, inch, number(metric.value) + limit, 9, look, weight=weight, ha="right")


def _plots(verdict: Verdict) -> list[Any]:
    found: list[Any] = []
    tokens, layers = verdict.tokens, verdict.layers
    if tokens is not None and tokens.signed is not None and any(tokens.signed.counts):
        found.append(_signed)
    if tokens is not None and tokens.scatter:
        found.append(_scatter)
    if layers is not None and any(value for value in (*layers.accumulated, *layers.local)):
        found.append(_layers)
    known = [t for t in verdict.trends if any(value is not None for value in t.values)]
    return found + [_trend] if known else found


def _title(axes: Any, words: str, x: str, y: str) -> None:
    axes.set_title(words, loc="left", fontsize=10, weight="bold", color=_INK, parse_math=False)
    axes.set_xlabel(x, fontsize=8.5, color=_SOFT)
    axes.set_ylabel(y, fontsize=8.5, color=_SOFT)


def _signed(axes: Any, verdict: Verdict) -> None:
    assert verdict.tokens is not None and verdict.tokens.signed is not None
    edges, counts = verdict.tokens.signed.edges, verdict.tokens.signed.counts
    count = min(len(counts), len(edges) - 1)
    middles = [(edges[i] + edges[i + 1]) / 2 for i in range(count)]
    colours = [_SOFT if edges[i] <= 0 <= edges[i + 1] else _ABOVE if m > 0 else _BELOW for i, m in enumerate(middles)]
    axes.bar(middles, counts[:count], width=[(edges[i + 1] - edges[i]) * 0.9 for i in range(count)], color=colours)
    axes.set_yscale("log")
    title = "Signed differences"
    lattice = lattice_of(verdict)
    if lattice is not None:
        step = lattice.step
        first, last = math.ceil(edges[0] / step), math.floor(edges[count] / step)
        if last - first <= 200:
            for k in range(first, last + 1):
                axes.axvline(k * step, ymin=0.94, color=_HOT, linewidth=1.2)
        title = f"Signed differences: multiples of {fraction(step)}"
    _title(axes, title, "train - rollout (nats)", "tokens")


def _scatter(axes: Any, verdict: Verdict) -> None:
    assert verdict.tokens is not None
    points = [(r, t) for r, t in verdict.tokens.scatter[:4000] if math.isfinite(r) and math.isfinite(t)]
    axes.scatter([r for r, _ in points], [t for _, t in points], s=5, color="#3d6fa3", alpha=0.5, linewidths=0)
    low = min(min(r, t) for r, t in points) if points else -1.0
    axes.plot([low, 0], [low, 0], color=_SOFT, linewidth=0.8, linestyle=(0, (2, 3)))
    _title(axes, "Rollout against train", "rollout (log-probability)", "train")


def _layers(axes: Any, verdict: Verdict) -> None:
    view = verdict.layers
    assert view is not None
    count = min(len(view.operators), MAX_OPERATORS)
    worst = excess(view)
    hot = worst[0][1] if worst else -1
    local, floor, grown = (
        [at(values, i) or math.nan for i in range(count)] for values in (view.local, view.floor, view.accumulated)
    )
    if any(value == value for value in local):
        colours = [_HOT if i == hot else _BAR for i in range(count)]
        axes.bar(range(count), local, width=0.75, color=colours, label="local")
    if any(value == value for value in floor):
        axes.step(range(count), floor, where="mid", color=_GOOD, linewidth=1, label="floor")
    if any(value == value for value in grown):
        axes.plot(range(count), grown, color=_INK, linewidth=1.2, label="accumulated")
    if view.first is not None and view.first.operator in view.operators[:count]:
        first = view.operators.index(view.first.operator)
        axes.axvline(first, color=_HOT, linewidth=1, linestyle="--", label="first divergence")
    axes.set_yscale("log")
    axes.legend(fontsize=8, frameon=False, ncols=4, loc="upper left")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.15)
    most = f", most over its floor: {visible(view.operators[hot], 40)}" if worst else ""
    _title(axes, f"Error by operator{most}", "operators in the order of computation", "relative error")


def _trend(axes: Any, verdict: Verdict) -> None:
    known = [t for t in verdict.trends if any(value is not None for value in t.values)]
    trend = next((t for t in known if t.change is not None), known[0])
    pairs = [(s, v) for s, v in zip(trend.steps, trend.values, strict=False) if v is not None]
    axes.plot([s for s, _ in pairs], [v for _, v in pairs], color="#3d6fa3", linewidth=1.2)
    if trend.change is not None:
        axes.axvline(trend.change, color=_HOT, linewidth=1, linestyle="--")
    _title(axes, f"{visible(trend.metric, 40)}: {visible(trend.words, 90)}", "step", "")
