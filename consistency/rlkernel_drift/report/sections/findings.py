"""Sections with what was found: the gates in order, the hypotheses that were tried, and the cost of the drift."""

from __future__ import annotations

from rlkernel_drift.report.charts.axes import gauge, logarithmic
from rlkernel_drift.report.markup import Child, Markup, number, share, tag
from rlkernel_drift.report.sections.common import (
    Section,
    clip,
    fold,
    icon,
    more,
    prose,
    scalar,
    settings,
    table,
    threads,
    title_of,
)
from rlkernel_drift.verdict import Consequence, Diagnosis, Finding, Gate, HypothesisResult, Verdict

# status -> class, icon
_LOOK = {
    "passed": ("good", "check"),
    "failed": ("bad", "cross"),
    "warned": ("warn", "bang"),
    "skipped": ("none", "dash"),
    "not reached": ("none", "dot"),
}
_MOST = 24


def gates(verdict: Verdict, budget: float = 1.0) -> Section | None:
    """The section; None for a verdict without gates. `budget`: share of the findings that fits the page."""
    if not verdict.gates:
        return None
    counts = {status: sum(g.status == status for g in verdict.gates) for status in _LOOK}
    note = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    most, diagnosed = max(2, int(_MOST * budget)), verdict.diagnosis is not None
    rungs = [_rung(gate, most, diagnosed) for gate in verdict.gates[:16]]
    return Section("gates", "Gates", tag("ol", rungs, class_="ladder"), note)


def _rung(gate: Gate, most: int, diagnosed: bool) -> Markup:
    look, sign = _LOOK[gate.status]
    parts: list[Child] = [
        tag("span", icon(sign), class_="node"),
        tag("div", tag("h3", clip(gate.title, 80)), tag("span", gate.status, class_="word"), class_="rung"),
        tag("p", prose(gate.summary)),
    ]
    found = gate.findings[:most]
    if found:
        serious = gate.status in ("failed", "warned") and any(f.severity != "note" for f in found)
        title = "Finding" if len(found) == 1 else f"Findings ({len(gate.findings)})"
        body: list[Child] = []
        advised = {"drift"} if diagnosed else set()  # after a diagnosis, its fix replaces the advice to diagnose
        for finding in found:
            body.append(_finding(finding, gate.summary, finding.cause not in advised))
            advised.add(finding.cause)
        body.append(more(len(found), len(gate.findings), "findings"))
        parts.append(tag("details", tag("summary", title), body, open=serious))
    return tag("li", parts, class_=look)


def _finding(finding: Finding, summary: str, advise: bool) -> Markup:
    cause = title_of(finding.cause)
    return tag(
        "article",
        tag("h4", tag("span", finding.severity, class_=f"tagged {finding.severity}"), cause[:1].upper() + cause[1:]),
        None if finding.message == summary else tag("p", prose(finding.message)),
        settings(finding.evidence),
        tag("p", tag("b", "Fix: "), prose(finding.fix)) if finding.fix and advise else None,
        threads(finding.threads) if advise else None,
        class_="finding",
    )


def diagnosis(verdict: Verdict) -> Section | None:
    """The section; None where nothing was re-scored."""
    found = verdict.diagnosis
    if found is None:
        return None
    parts: list[Child] = [tag("p", tag("b", prose(found.statement)))]
    parts += [tag("p", prose(words)) for words in found.summary]
    if found.finding is None or not found.finding.evidence:
        parts.append(settings(found.parameters))
    if found.finding is not None:
        parts += [settings(found.finding.evidence), tag("p", prose(found.finding.fix)) if found.finding.fix else None]
        parts.append(threads(found.finding.threads))
    if found.hypotheses:
        columns = [("hypothesis", ""), ("side", ""), ("with", "")]
        columns += [("remaining |d|", "n"), ("against the floor", "bar"), ("times the floor", "n")]
        shown = found.hypotheses[:_MOST]
        accepted = next((h for h in shown if h.cause == found.cause and h.residual == found.residual), None)
        rows = [_hypothesis(h, found, h is accepted) for h in shown]
        parts.append(tag("h3", "Hypotheses, best first"))
        parts.append(table(columns, rows, "hypotheses", ["best" if h is accepted else "" for h in shown]))
        parts.append(more(len(shown), len(found.hypotheses), "hypotheses"))
        parts.append(_key(found))
    if found.tried:
        items = [tag("li", prose(f"{stage}: {count} changes", 200)) for stage, count in list(found.tried.items())[:40]]
        parts.append(fold(f"Tried ({sum(found.tried.values())})", tag("ul", items, class_="plain")))
    return Section("diagnosis", "Diagnosis", tag("div", parts), f"cause: {title_of(found.cause)}"[:120])


def _key(found: Diagnosis) -> Markup | None:
    words = [] if found.as_is is None else [f"Without a hypothesis, mean |d| is {number(found.as_is)}."]
    if found.floor is not None:
        source = f" ({found.floor_source[:160]})" if found.floor_source else ""
        words.append(f"The noise floor is {number(found.floor)}{source}. It is the tick of each bar.")
    return tag("p", " ".join(words), class_="aside") if words else None


def _hypothesis(result: HypothesisResult, found: Diagnosis, accepted: bool) -> list[Child]:
    parameters = ", ".join(f"{key} {scalar(value)}" for key, value in list(result.parameters.items())[:4])
    name = [clip(result.name, 80), " ", tag("span", "accepted", class_="tagged") if accepted else None]
    bar, times = _residual_bar(result.residual, found), number(result.over_floor, 3)
    return [name, clip(result.side, 20), clip(parameters, 80), number(result.residual), bar, times]


def _residual_bar(residual: float, found: Diagnosis) -> Markup | None:
    """The residual by orders of magnitude, up to the difference without a hypothesis."""
    known = [value for value in (found.floor, found.as_is, *(h.residual for h in found.hypotheses)) if value]
    if not known:
        return None
    x = logarithmic(known, 0, 150)
    return gauge(150, x(residual) if residual > 0 else 0, "within", x(found.floor) if found.floor else None)


def consequences(verdict: Verdict) -> Section | None:
    """The section; None where nothing was compared."""
    if not verdict.consequences:
        return None
    if not any(c.tokens or c.sequences or c.cosine is not None for c in verdict.consequences):
        words = f"None of {len(verdict.consequences)} corrections and clips would touch a token or a sequence."
        return Section("cost", "Cost", tag("p", words, class_="aside"))
    columns = [("correction", ""), ("setting", ""), ("tokens", "n"), ("", "bar"), ("sequences", "n"), ("", "bar")]
    rows = [_correction(c) for c in verdict.consequences[:_MOST]]
    body = table([*columns, ("in words", "")], rows, "cost")
    return Section("cost", "Cost", body, "what this run would lose to each correction")


def _correction(consequence: Consequence) -> list[Child]:
    cells: list[Child] = [clip(consequence.name, 80), clip(consequence.setting, 100)]
    for value in (consequence.tokens, consequence.sequences):
        # a share above zero is at least visible
        long = None if value is None else max(60 * min(value, 1), 1.5 if value > 0 else 0)
        cells += [share(value), None if long is None else gauge(60, long, "over")]
    return [*cells, clip(consequence.words, 240)]
