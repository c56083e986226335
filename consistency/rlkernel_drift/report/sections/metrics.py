"""Statistics beside their thresholds, then the rest; what was not compared; the chain of factors."""

from __future__ import annotations

from rlkernel_drift.report.charts.axes import line, rect
from rlkernel_drift.report.markup import Child, Markup, tag
from rlkernel_drift.report.numbers import number, share, signed
from rlkernel_drift.report.sections.common import Section, clip, more, table
from rlkernel_drift.statistics import TokenStatistics
from rlkernel_drift.verdict import Metric, Verdict

_WORDS = {
    "ok": ("good", "✓ within"),
    "over": ("bad", "✕ over"),
    "missing": ("none", "– missing"),
    "no threshold": ("none", ""),
}
_ROWS = 64
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
    judged = [m for m in verdict.metrics if m.status != "no threshold"][:_ROWS]
    rest = [m for m in verdict.metrics if m.status == "no threshold"][:_ROWS]
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
        tag("td", _bar(metric), class_="bar"),
        tag("td", words, class_=f"mark {look}"),
        tag("td", _source(metric.source), class_="wide"),
    )


def _source(source: str) -> Markup:
    """Without the scheme, which says nothing to people."""
    return clip(source.removeprefix("https://"), 100)


def _bar(metric: Metric) -> Markup | None:
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
