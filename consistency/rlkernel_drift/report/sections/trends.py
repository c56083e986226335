"""Metrics over the steps of the run."""

from __future__ import annotations

from rlkernel_drift.profiles import LABELS
from rlkernel_drift.report.charts.trend import trend_chart
from rlkernel_drift.report.markup import tag
from rlkernel_drift.report.sections.common import Section, more
from rlkernel_drift.verdict import Verdict

_CHARTS = 8


def trends(verdict: Verdict) -> Section | None:
    """The section; None for a single step."""
    # Those with a change of level first: they are what a reader looks for.
    ordered = sorted(verdict.trends, key=lambda t: t.change is None)[:_CHARTS]
    charts = [trend_chart(trend, LABELS.get(trend.metric, trend.metric[:80])) for trend in ordered]
    shown = [chart for chart in charts if chart is not None]
    if not shown:
        return None
    changed = sum(t.change is not None for t in verdict.trends)
    note = f"{changed} of {len(verdict.trends)} change level" if changed else "no change of level"
    return Section(
        "trend",
        "Trend",
        tag("div", tag("div", shown, class_="pairs"), more(len(shown), len(verdict.trends), "metrics")),
        note,
    )
