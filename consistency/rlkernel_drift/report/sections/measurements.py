"""Sections with what was measured: metrics and thresholds, charts of the differences, layers, trends."""

from __future__ import annotations

from rlkernel_drift.profiles import BITWISE, LABELS
from rlkernel_drift.report.charts.axes import gauge
from rlkernel_drift.report.charts.distribution import by_position, scatter, signed_histogram, trend_chart, ulp_chart
from rlkernel_drift.report.charts.heat import heat_map
from rlkernel_drift.report.charts.layers import layer_chart, splice_chart
from rlkernel_drift.report.markup import Child, Markup, number, plural, share, signed, tag
from rlkernel_drift.report.sections.common import Section, clip, facts, more, table
from rlkernel_drift.statistics import Lattice, TokenStatistics
from rlkernel_drift.verdict import Divergence, Metric, Verdict

_WORDS = {"ok": ("good", "✓ within"), "over": ("bad", "✕ over"), "missing": ("none", "– missing")}
_METRICS = 64
_FACTORS = 12
_TRENDS = 8
_SHARES = ("equal", "ess", "retention", "beyond_ln2")


def metrics(verdict: Verdict) -> Section | None:
    """The section; None without statistics."""
    if not verdict.metrics:
        return None
    if verdict.statistics is not None and not verdict.statistics.tokens:
        # the statistics of an empty comparison are zeros, which would look aligned
        words = tag("p", "No token was compared, so there is no statistic.", class_="lead")
        return Section("metrics", "Metrics", tag("div", words, _left_out(verdict.statistics)))
    judged = [m for m in verdict.metrics if m.status != "no threshold"][:_METRICS]
    rest = [m for m in verdict.metrics if m.status == "no threshold"][:_METRICS]
    parts: list[Child] = []
    if judged:
        columns = [("metric", ""), ("value", "n"), ("threshold", "n")]
        columns += [("of the limit", "bar"), ("", ""), ("source", "wide")]
        parts.append(table(columns, map(_judged, judged), "judged"))
    else:
        parts.append(tag("p", "The profile sets no threshold on anything that was measured.", class_="aside"))
    if rest:
        parts += [tag("h3", "Without a threshold"), facts(((m.label, _value(m)) for m in rest), "values")]
    parts.append(more(len(judged) + len(rest), len(verdict.metrics), "statistics"))
    if verdict.statistics is not None:
        parts.append(_left_out(verdict.statistics))
    if verdict.factors:
        columns = [("link", ""), ("tokens", "n"), ("equal bits", "n"), ("mean |d|", "n")]
        columns += [("99%", "n"), ("largest", "n"), ("bias", "n"), ("k3", "n")]
        rows = [[clip(name, 60), *_factor(s)] for name, s in list(verdict.factors.items())[:_FACTORS]]
        parts.append(tag("div", tag("h3", "By link of the chain"), table(columns, rows, "factors")))
    source = f", {verdict.profile_source[:160]}" if verdict.profile_source else ""
    return Section("metrics", "Metrics", tag("div", parts), f"profile {verdict.profile[:60]}{source}")


def _value(metric: Metric) -> str:
    return share(metric.value) if any(part in metric.name for part in _SHARES) else number(metric.value)


def _judged(metric: Metric) -> list[Child]:
    exact = metric.name == "tokens.equal" and metric.value not in (None, 0, 1)
    limits = [f"{sign} {number(v)}" for sign, v in (("≤", metric.at_most), ("≥", metric.at_least)) if v is not None]
    look, words = _WORDS[metric.status]
    return [
        clip(metric.label, 120),
        f"{metric.value:.6%}" if exact else _value(metric),
        ", ".join(limits) or "–",
        _limit_bar(metric),
        tag("span", words, class_=f"mark {look}"),
        clip(metric.source.removeprefix("https://"), 100),
    ]


def _limit_bar(metric: Metric) -> Markup | None:
    """The value as a part of its limit, which is the tick; twice the limit is the full width."""
    if metric.ratio is None:
        return None
    drawing = gauge(110, min(max(metric.ratio, 0.0), 2.0) * 55, "over" if metric.status == "over" else "within", 55)
    return tag("span", drawing, tag("span", f"{number(metric.ratio, 3)} ×"), class_="ratio")


def _left_out(statistics: TokenStatistics) -> Markup:
    """Values that were counted and not averaged."""
    broken = {
        "NaN, rollout": statistics.nan_rollout,
        "NaN, train": statistics.nan_train,
        "infinite, rollout": statistics.inf_rollout,
        "infinite, train": statistics.inf_train,
        "impossible to the rollout": statistics.support_rollout,
        "impossible to training": statistics.support_train,
        "above zero": statistics.positive,
    }
    items = [tag("li", tag("b", f"{statistics.tokens:,}"), " compared")]
    if statistics.masked_out:
        items.append(tag("li", tag("b", f"{statistics.masked_out:,}"), " masked out"))
    items += [tag("li", tag("b", f"{n:,}"), f" {name}", class_="bad") for name, n in broken.items() if n]
    if not any(broken.values()):
        items.append(tag("li", "no NaN, no infinity, no impossible token"))
    return tag("ul", items, class_="counts")


def _factor(s: TokenStatistics) -> list[str]:
    sizes = [number(value) for value in (s.mean, s.p99, s.maximum)]
    return [f"{s.tokens:,}", share(s.equal), *sizes, signed(s.bias), number(s.k3)]


def lattice_of(verdict: Verdict) -> Lattice | None:
    """The lattice, unless its step is one that cannot be drawn."""
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
    return Section("distribution", "Distribution", tag("div", charts, class_="pairs")) if any(charts) else None


def layers(verdict: Verdict, data: dict[str, object]) -> Section | None:
    """The section; None where no operator was recorded on both sides. Adds the script's part to `data`."""
    view = verdict.layers
    if view is None:
        return None
    bits = verdict.profile == BITWISE.name or any(g.name == "layers" and g.status == "failed" for g in verdict.gates)
    parts: list[Child] = [
        _first_divergence(view.first) if view.first is not None and bits else None,
        layer_chart(view, bits),
        splice_chart(view, verdict.statistics.mean if verdict.statistics else None),
    ]
    heat = heat_map(view)
    if heat is not None:
        parts.append(heat[0])
        data["heat"] = heat[1]
    if not any(parts):
        parts.append(tag("p", "All recorded operators have equal bits.", class_="aside"))
    return Section("layers", "Layers", tag("div", parts), plural(len(view.operators), "operator"))


def _first_divergence(first: Divergence) -> Markup:
    rows = f"{first.rows:,} of {first.of:,} ({number(first.rows / first.of * 100, 3)}%)" if first.of else None
    valued = first.rollout is not None
    values = {
        "operator": first.operator,
        "layer": first.layer,
        "sequence": first.sequence,
        "token": first.index,
        "element": first.element,
        "rollout": repr(first.rollout) if valued else None,
        "train": repr(first.train) if valued else None,
        "distance": None if first.ulps is None else plural(first.ulps, "ulp"),
        "rows that differ": rows,
    }
    pairs = ((name, clip(str(value), 120)) for name, value in values.items() if value is not None)
    return tag("div", tag("h3", "First divergence"), facts(pairs))


def trends(verdict: Verdict) -> Section | None:
    """The section; None for a single step."""
    ordered = sorted(verdict.trends, key=lambda t: t.change is None)[:_TRENDS]  # changes of level first
    charts = [trend_chart(trend, LABELS.get(trend.metric, trend.metric[:80])) for trend in ordered]
    shown = [chart for chart in charts if chart is not None]
    if not shown:
        return None
    changed = sum(t.change is not None for t in verdict.trends)
    note = f"{changed} of {len(verdict.trends)} change level" if changed else "no change of level"
    left_out = more(len(shown), len(verdict.trends), "metrics")
    return Section("trend", "Trend", tag("div", tag("div", shown, class_="pairs"), left_out), note)
