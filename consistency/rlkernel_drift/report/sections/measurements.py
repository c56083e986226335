"""What was measured: metrics and their thresholds, pictures of the differences, layers and operators, trends."""

from __future__ import annotations

from rlkernel_drift.profiles import BITWISE, LABELS
from rlkernel_drift.report.charts.axes import line, rect
from rlkernel_drift.report.charts.distribution import by_position, scatter, signed_histogram, trend_chart, ulp_chart
from rlkernel_drift.report.charts.heat import heat_map
from rlkernel_drift.report.charts.layers import layer_chart, splice_chart
from rlkernel_drift.report.markup import Child, Markup, number, plural, share, signed, tag
from rlkernel_drift.report.sections.common import Section, clip, more, table
from rlkernel_drift.statistics import Lattice, TokenStatistics
from rlkernel_drift.verdict import Divergence, Metric, Verdict

_WORDS = {
    "ok": ("good", "✓ within"),
    "over": ("bad", "✕ over"),
    "missing": ("none", "– missing"),
    "no threshold": ("none", ""),
}
_METRICS = 64
_FACTORS = 12
_SHARES = ("equal", "ess", "retention", "beyond_ln2")


def metrics(verdict: Verdict) -> Section | None:
    """The section; None without statistics."""
    if not verdict.metrics:
        return None
    if verdict.statistics is not None and not verdict.statistics.tokens:
        # Their zeros are those of an empty comparison.
        words = tag("p", "No token was compared, so there is no statistic.", class_="lead")
        return Section("metrics", "Metrics", tag("div", words, _left_out(verdict.statistics)))
    judged = [m for m in verdict.metrics if m.status != "no threshold"][:_METRICS]
    rest = [m for m in verdict.metrics if m.status == "no threshold"][:_METRICS]
    parts: list[Child] = []
    if judged:
        head = [
            ("metric", ""),
            ("value", "n"),
            ("threshold", "n"),
            ("of the limit", "bar"),
            ("", ""),
            ("source", "wide"),
        ]
        parts.append(table(head, [_judged(m) for m in judged], "judged"))
    else:
        parts.append(tag("p", "The profile sets no threshold on anything that was measured.", class_="aside"))
    if rest:
        rows = [tag("div", tag("dt", m.label), tag("dd", _value(m))) for m in rest]
        parts.append(tag("h3", "Without a threshold"))
        parts.append(tag("dl", rows, class_="values"))
    parts.append(more(len(judged) + len(rest), len(verdict.metrics), "statistics"))
    if verdict.statistics is not None:
        parts.append(_left_out(verdict.statistics))
    parts.append(_factors(verdict.factors))
    source = verdict.profile_source
    return Section(
        "metrics",
        "Metrics",
        tag("div", parts),
        f"profile {verdict.profile[:60]}" + (f", {source[:160]}" if source else ""),
    )


def _value(metric: Metric) -> str:
    shares = any(part in metric.name for part in _SHARES)
    return share(metric.value) if shares else number(metric.value)


def _judged(metric: Metric) -> Markup:
    look, words = _WORDS[metric.status]
    limits = [f"≤ {number(metric.at_most)}" if metric.at_most is not None else ""]
    limits.append(f"≥ {number(metric.at_least)}" if metric.at_least is not None else "")
    value = (
        f"{metric.value:.6%}" if metric.name == "tokens.equal" and metric.value not in (None, 0, 1) else _value(metric)
    )
    return tag(
        "tr",
        tag("th", clip(metric.label, 120), scope="row"),
        tag("td", value, class_="n"),
        tag("td", ", ".join(limit for limit in limits if limit) or "–", class_="n"),
        tag("td", _limit_bar(metric), class_="bar"),
        tag("td", words, class_=f"mark {look}"),
        tag("td", _source(metric.source), class_="wide"),
    )


def _source(source: str) -> Markup:
    """Without the scheme, which says nothing to people."""
    return clip(source.removeprefix("https://"), 100)


def _limit_bar(metric: Metric) -> Markup | None:
    """The value as a part of its limit, which is the tick; twice the limit is the full width."""
    if metric.ratio is None:
        return None
    width, full = 110.0, 2.0
    long = min(max(metric.ratio, 0.0), full) / full * width
    parts = [
        rect(0, 4, width, 8, "track"),
        rect(0, 4, long, 8, "over" if metric.status == "over" else "within"),
        line(width / full, 1, width / full, 15, "base"),
    ]
    words = f"{number(metric.ratio, 3)} ×"
    drawing = tag("svg", parts, viewBox="0 0 110 16", width="110", height="16", aria_hidden="true")
    return tag("span", drawing, tag("span", words), class_="ratio")


def _left_out(statistics: TokenStatistics) -> Markup | None:
    """Values that were counted and never averaged in."""
    counts = [
        ("masked out", statistics.masked_out, ""),
        ("NaN, rollout", statistics.nan_rollout, "bad"),
        ("NaN, train", statistics.nan_train, "bad"),
        ("infinite, rollout", statistics.inf_rollout, "bad"),
        ("infinite, train", statistics.inf_train, "bad"),
        ("impossible to the rollout", statistics.support_rollout, "bad"),
        ("impossible to training", statistics.support_train, "bad"),
        ("above zero", statistics.positive, "bad"),
    ]
    shown = [
        tag("li", tag("b", f"{count:,}"), f" {name}", class_=look or None) for name, count, look in counts if count
    ]
    clean = not any(count for _, count, look in counts if look)
    first = tag("li", tag("b", f"{statistics.tokens:,}"), " compared")
    last = tag("li", "no NaN, no infinity, no impossible token") if clean else None
    return tag("ul", first, shown, last, class_="counts")


def _factors(factors: dict[str, TokenStatistics]) -> Markup | None:
    """Each link of the chain from training to what was recorded."""
    if not factors:
        return None
    head = [
        ("link", ""),
        ("tokens", "n"),
        ("equal bits", "n"),
        ("mean |d|", "n"),
        ("99%", "n"),
        ("largest", "n"),
        ("bias", "n"),
        ("k3", "n"),
    ]
    rows = [
        tag(
            "tr",
            tag("th", clip(name, 60), scope="row"),
            [tag("td", value, class_="n") for value in _factor(s)],
        )
        for name, s in list(factors.items())[:_FACTORS]
    ]
    return tag("div", tag("h3", "Where in the chain"), table(head, rows, "factors"))


def _factor(s: TokenStatistics) -> list[str]:
    return [
        f"{s.tokens:,}",
        share(s.equal),
        number(s.mean),
        number(s.p99),
        number(s.maximum),
        signed(s.bias),
        number(s.k3),
    ]


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


def layers(verdict: Verdict, data: dict[str, object]) -> Section | None:
    """The section; None where no operator was recorded on both sides. Fills in what the script reads."""
    view = verdict.layers
    if view is None:
        return None
    parts: list[Child] = []
    bits = verdict.profile == BITWISE.name or any(g.name == "layers" and g.status == "failed" for g in verdict.gates)
    if view.first is not None and bits:
        parts.append(_first_divergence(view.first))
    parts.append(layer_chart(view, bits))
    parts.append(splice_chart(view, verdict.statistics.mean if verdict.statistics else None))
    heat = heat_map(view)
    if heat is not None:
        parts.append(heat[0])
        data["heat"] = heat[1]
    if not any(part is not None for part in parts):
        parts.append(tag("p", "All recorded operators have equal bits.", class_="aside"))
    return Section("layers", "Layers", tag("div", parts), plural(len(view.operators), "operator"))


def _first_divergence(first: Divergence) -> Markup:
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


_TRENDS = 8


def trends(verdict: Verdict) -> Section | None:
    """The section; None for a single step."""
    # Those with a change of level first: they are what a reader looks for.
    ordered = sorted(verdict.trends, key=lambda t: t.change is None)[:_TRENDS]
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
