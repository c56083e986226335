"""What was found: the ladder of gates, the hypotheses that were tried, and what the drift costs.

Every gate stands in order, with its findings. Of the diagnosis: how well each hypothesis explains the differences, and
what was excluded. Costs are those under the corrections of the trainers.
"""

from __future__ import annotations

from rlkernel_drift.knowledge import CAUSES
from rlkernel_drift.report.charts.axes import line, logarithmic, rect
from rlkernel_drift.report.markup import Child, Markup, number, share, tag
from rlkernel_drift.report.sections.common import (
    Section,
    clip,
    evidence,
    icon,
    more,
    prose,
    scalar,
    table,
    threads,
    title_of,
)
from rlkernel_drift.verdict import Consequence, Diagnosis, Finding, Gate, HypothesisResult, Verdict

_LOOK = {
    "passed": ("good", "check", "passed"),
    "failed": ("bad", "cross", "failed"),
    "warned": ("warn", "bang", "warned"),
    "skipped": ("none", "dash", "skipped"),
    "not reached": ("none", "dot", "not reached"),
}
_FINDINGS = 24


def gates(verdict: Verdict, budget: float = 1.0) -> Section | None:
    """The section; None for a verdict without gates. `budget`: share of the findings that the page has room for."""
    if not verdict.gates:
        return None
    counts = {status: sum(g.status == status for g in verdict.gates) for status in _LOOK}
    note = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    most, diagnosed = max(2, int(_FINDINGS * budget)), verdict.diagnosis is not None
    rungs = [_rung(gate, most, diagnosed) for gate in verdict.gates[:16]]
    return Section("gates", "Gates", tag("ol", rungs, class_="ladder"), note)


def _rung(gate: Gate, most: int, diagnosed: bool) -> Markup:
    look, sign, words = _LOOK[gate.status]
    parts: list[Child] = [
        tag("span", icon(sign), class_="node"),
        tag("div", tag("h3", clip(gate.title, 80)), tag("span", words, class_="word"), class_="rung"),
        tag("p", prose(gate.summary)),
    ]
    found = gate.findings[:most]
    if found:
        serious = any(f.severity != "note" for f in found)
        title = "What was found" if len(found) == 1 else f"What was found ({len(gate.findings)})"
        body: list[Child] = []
        said = {"drift"} if diagnosed else set()  # the fix of drift as such is a diagnosis
        for finding in found:
            body.append(_finding(finding, gate.summary, finding.cause not in said))
            said.add(finding.cause)
        body.append(more(len(found), len(gate.findings), "findings"))
        parts.append(tag("details", tag("summary", title), body, open=serious and gate.status in ("failed", "warned")))
    return tag("li", parts, class_=look)


def _finding(finding: Finding, summary: str, first: bool) -> Markup:
    message = None if finding.message == summary else tag("p", prose(finding.message))
    cause = title_of(finding.cause)
    return tag(
        "article",
        tag("h4", tag("span", finding.severity, class_=f"tagged {finding.severity}"), cause[:1].upper() + cause[1:]),
        message,
        evidence(finding),
        tag("p", tag("b", "Fix: "), prose(finding.fix)) if finding.fix and first else None,
        threads(finding.threads) if first else None,
        class_="finding",
    )


_HYPOTHESES = 24


def diagnosis(verdict: Verdict) -> Section | None:
    """The section; None where nothing was re-scored."""
    found = verdict.diagnosis
    if found is None:
        return None
    parts: list[Child] = [tag("p", tag("b", prose(found.statement)))]
    if found.parameters and (found.finding is None or not found.finding.evidence):
        parts.append(_facts(found))
    if found.finding is not None:
        parts += [evidence(found.finding), tag("p", prose(found.finding.fix)) if found.finding.fix else None]
        parts.append(threads(found.finding.threads))
    if found.hypotheses:
        head = [
            ("hypothesis", ""),
            ("side", ""),
            ("with", ""),
            ("left of |d|", "n"),
            ("against the floor", "bar"),
            ("times the floor", "n"),
        ]
        shown = found.hypotheses[:_HYPOTHESES]
        accepted = next((h for h in shown if h.cause == found.cause and h.residual == found.residual), None)
        parts.append(tag("h3", "Hypotheses, best first"))
        parts.append(table(head, [_hypothesis(h, found, h is accepted) for h in shown], "hypotheses"))
        parts.append(more(len(shown), len(found.hypotheses), "hypotheses"))
        parts.append(_key(found))
    if found.excluded:
        items = [tag("li", prose(title_of(words) if words in CAUSES else words, 200)) for words in found.excluded[:40]]
        parts.append(
            tag("details", tag("summary", f"Excluded ({len(found.excluded)})"), tag("ul", items, class_="plain"))
        )
    return Section("diagnosis", "Diagnosis", tag("div", parts), f"cause: {title_of(found.cause)}"[:120])


def _facts(found: Diagnosis) -> Markup:
    pairs = [tag("div", tag("dt", clip(k, 60)), tag("dd", scalar(v))) for k, v in list(found.parameters.items())[:12]]
    return tag("dl", pairs, class_="facts")


def _key(found: Diagnosis) -> Markup | None:
    words = []
    if found.as_is is not None:
        words.append(f"As it is, mean |d| is {number(found.as_is)}.")
    if found.floor is not None:
        words.append(
            f"Normal here is {number(found.floor)}" + (f" ({found.floor_source[:160]})." if found.floor_source else ".")
        )
        words.append("The tick of each bar is the floor.")
    return tag("p", " ".join(words), class_="aside") if words else None


def _hypothesis(result: HypothesisResult, found: Diagnosis, accepted: bool) -> Markup:
    settings = ", ".join(f"{key} {scalar(value)}" for key, value in list(result.parameters.items())[:4])
    mark = tag("span", "accepted", class_="tagged") if accepted else None
    return tag(
        "tr",
        tag("th", clip(result.name, 80), " ", mark, scope="row"),
        tag("td", clip(result.side, 20)),
        tag("td", clip(settings, 80)),
        tag("td", number(result.residual), class_="n"),
        tag("td", _residual_bar(result.residual, found), class_="bar"),
        tag("td", number(result.over_floor, 3), class_="n"),
        class_="best" if accepted else None,
    )


def _residual_bar(residual: float, found: Diagnosis) -> Markup | None:
    """The residual by orders of magnitude, up to what the difference is as it stands."""
    known = [value for value in (found.floor, found.as_is, *(h.residual for h in found.hypotheses)) if value]
    if not known:
        return None
    x = logarithmic(known, 0, 150)
    parts: list[Child] = [rect(0, 4, 150, 8, "track"), rect(0, 4, x(residual) if residual > 0 else 0, 8, "within")]
    if found.floor:
        parts.append(line(x(found.floor), 1, x(found.floor), 15, "base"))
    return tag("svg", parts, viewBox="0 0 150 16", width="150", height="16", aria_hidden="true")


_CORRECTIONS = 24


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
    rows = [_correction(c) for c in verdict.consequences[:_CORRECTIONS]]
    return Section("cost", "Cost", table(head, rows, "cost"), "what this run would lose to each correction")


def _correction(consequence: Consequence) -> Markup:
    cells: list[Child] = []
    for value in (consequence.tokens, consequence.sequences):
        cells += [tag("td", share(value), class_="n"), tag("td", _share_bar(value), class_="bar")]
    return tag(
        "tr",
        tag("th", clip(consequence.name, 80), scope="row"),
        tag("td", clip(consequence.setting, 100)),
        cells,
        tag("td", clip(consequence.words, 240)),
    )


def _share_bar(value: float | None) -> Markup | None:
    if value is None:
        return None
    parts = [rect(0, 4, 60, 8, "track"), rect(0, 4, max(60 * min(value, 1), 1.5 if value > 0 else 0), 8, "over")]
    return tag("svg", parts, viewBox="0 0 60 16", width="60", height="16", aria_hidden="true")
