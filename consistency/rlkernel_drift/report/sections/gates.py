"""The ladder: every gate in order, with what it found."""

from __future__ import annotations

from rlkernel_drift.report.markup import Child, Markup, tag
from rlkernel_drift.report.sections.common import Section, clip, evidence, icon, more, prose, threads, title_of
from rlkernel_drift.verdict import Finding, Gate, Verdict

LOOK = {
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
    counts = {status: sum(g.status == status for g in verdict.gates) for status in LOOK}
    note = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    most, diagnosed = max(2, int(_FINDINGS * budget)), verdict.diagnosis is not None
    rungs = [_rung(gate, most, diagnosed) for gate in verdict.gates[:16]]
    return Section("gates", "Gates", tag("ol", rungs, class_="ladder"), note)


def _rung(gate: Gate, most: int, diagnosed: bool) -> Markup:
    look, sign, words = LOOK[gate.status]
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
