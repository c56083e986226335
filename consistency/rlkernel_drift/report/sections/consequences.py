"""What the drift costs under the corrections of the trainers."""

from __future__ import annotations

from rlkernel_drift.report.charts.axes import rect
from rlkernel_drift.report.markup import Child, Markup, tag
from rlkernel_drift.report.numbers import share
from rlkernel_drift.report.sections.common import Section, clip, table
from rlkernel_drift.verdict import Consequence, Verdict

_ROWS = 24


def consequences(verdict: Verdict) -> Section | None:
    """The section; None where nothing was compared."""
    if not verdict.consequences:
        return None
    if not any(c.tokens or c.sequences or c.cosine is not None for c in verdict.consequences):
        words = f"None of {len(verdict.consequences)} corrections and clips would touch a token or a sequence."
        return Section("cost", "Cost", tag("p", words, class_="aside"))
    head = [
        ("correction", ""),
        ("setting", ""),
        ("tokens", "n"),
        ("", "bar"),
        ("sequences", "n"),
        ("", "bar"),
        ("in words", ""),
    ]
    rows = [_row(c) for c in verdict.consequences[:_ROWS]]
    return Section("cost", "Cost", table(head, rows, "cost"), "what this run would lose to each correction")


def _row(consequence: Consequence) -> Markup:
    cells: list[Child] = []
    for value in (consequence.tokens, consequence.sequences):
        cells += [tag("td", share(value), class_="n"), tag("td", _bar(value), class_="bar")]
    return tag(
        "tr",
        tag("th", clip(consequence.name, 80), scope="row"),
        tag("td", clip(consequence.setting, 100)),
        cells,
        tag("td", clip(consequence.words, 240)),
    )


def _bar(value: float | None) -> Markup | None:
    if value is None:
        return None
    parts = [rect(0, 4, 60, 8, "track"), rect(0, 4, max(60 * min(value, 1), 1.5 if value > 0 else 0), 8, "over")]
    return tag("svg", parts, viewBox="0 0 60 16", width="60", height="16", aria_hidden="true")
