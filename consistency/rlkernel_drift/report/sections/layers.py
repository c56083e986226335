"""Layers and operators: chart, splices, heat map, the first divergence."""

from __future__ import annotations

from rlkernel_drift.profiles import BITWISE
from rlkernel_drift.report.charts.heat import heat_map
from rlkernel_drift.report.charts.layers import layer_chart, splice_chart
from rlkernel_drift.report.markup import Child, Markup, tag
from rlkernel_drift.report.numbers import number, plural
from rlkernel_drift.report.sections.common import Section, clip
from rlkernel_drift.verdict import Divergence, Verdict


def layers(verdict: Verdict, data: dict[str, object]) -> Section | None:
    """The section; None where no operator was recorded on both sides. Fills in what the script reads."""
    view = verdict.layers
    if view is None:
        return None
    parts: list[Child] = []
    bits = verdict.profile == BITWISE.name or any(g.name == "layers" and g.status == "failed" for g in verdict.gates)
    if view.first is not None and bits:
        parts.append(_first(view.first))
    parts.append(layer_chart(view, bits))
    parts.append(splice_chart(view, verdict.statistics.mean if verdict.statistics else None))
    heat = heat_map(view)
    if heat is not None:
        parts.append(heat[0])
        data["heat"] = heat[1]
    if not any(part is not None for part in parts):
        parts.append(tag("p", "All recorded operators have equal bits.", class_="aside"))
    return Section("layers", "Layers", tag("div", parts), plural(len(view.operators), "operator"))


def _first(first: Divergence) -> Markup:
    """The first divergence as facts."""
    facts: list[tuple[str, str]] = [("operator", first.operator[:120])]
    facts += [("layer", str(first.layer))] if first.layer is not None else []
    facts += [("sequence", str(first.sequence)), ("token", str(first.index))]
    facts += [("element", str(first.element))] if first.element is not None else []
    facts += [("rollout", repr(first.rollout)), ("train", repr(first.train))] if first.rollout is not None else []
    facts += [("apart", plural(first.ulps, "ulp"))] if first.ulps is not None else []
    if first.of:
        facts.append(
            ("rows that differ", f"{first.rows:,} of {first.of:,} ({number(first.rows / first.of * 100, 3)}%)")
        )
    pairs = [tag("div", tag("dt", name), tag("dd", clip(value, 120))) for name, value in facts]
    return tag("div", tag("h3", "First divergence"), tag("dl", pairs, class_="facts"))
