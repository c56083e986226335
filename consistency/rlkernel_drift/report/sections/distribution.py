"""The pictures of the differences: scatter, signed histogram, ulps, position."""

from __future__ import annotations

from rlkernel_drift.report.charts.distribution import by_position, scatter, signed_histogram, ulp_chart
from rlkernel_drift.report.markup import tag
from rlkernel_drift.report.sections.common import Section
from rlkernel_drift.statistics import Lattice
from rlkernel_drift.verdict import Verdict


def lattice_of(verdict: Verdict) -> Lattice | None:
    """The lattice, unless a verdict from elsewhere gives it a step that cannot be drawn."""
    return verdict.lattice if verdict.lattice is not None and 1e-9 < verdict.lattice.step < 1e9 else None


def distribution(verdict: Verdict) -> Section | None:
    """The section; None without tokens."""
    view = verdict.tokens
    if view is None:
        return None
    of = verdict.statistics.tokens if verdict.statistics else len(view.scatter)
    charts = [
        scatter(view.scatter, of),
        signed_histogram(view.signed, lattice_of(verdict)) if view.signed else None,
        ulp_chart(verdict.ulps) if verdict.ulps else None,
        by_position(view.by_position),
    ]
    shown = [chart for chart in charts if chart is not None]
    return Section("distribution", "Distribution", tag("div", shown, class_="pairs")) if shown else None
