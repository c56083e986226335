"""Which hypotheses were tried, how well each explains the differences, and what was excluded."""

from __future__ import annotations

from rlkernel_drift.knowledge import CAUSES
from rlkernel_drift.report.charts.axes import line, logarithmic, rect
from rlkernel_drift.report.markup import Child, Markup, tag
from rlkernel_drift.report.numbers import number
from rlkernel_drift.report.sections.common import Section, clip, evidence, more, prose, scalar, table, threads, title_of
from rlkernel_drift.verdict import Diagnosis, HypothesisResult, Verdict

_ROWS = 24


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
        shown = found.hypotheses[:_ROWS]
        accepted = next((h for h in shown if h.cause == found.cause and h.residual == found.residual), None)
        parts.append(tag("h3", "Hypotheses, best first"))
        parts.append(table(head, [_row(h, found, h is accepted) for h in shown], "hypotheses"))
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


def _row(result: HypothesisResult, found: Diagnosis, accepted: bool) -> Markup:
    settings = ", ".join(f"{key} {scalar(value)}" for key, value in list(result.parameters.items())[:4])
    mark = tag("span", "accepted", class_="tagged") if accepted else None
    return tag(
        "tr",
        tag("th", clip(result.name, 80), " ", mark, scope="row"),
        tag("td", clip(result.side, 20)),
        tag("td", clip(settings, 80)),
        tag("td", number(result.residual), class_="n"),
        tag("td", _bar(result.residual, found), class_="bar"),
        tag("td", number(result.over_floor, 3), class_="n"),
        class_="best" if accepted else None,
    )


def _bar(residual: float, found: Diagnosis) -> Markup | None:
    """The residual by orders of magnitude, up to what the difference is as it stands."""
    known = [value for value in (found.floor, found.as_is, *(h.residual for h in found.hypotheses)) if value]
    if not known:
        return None
    x = logarithmic(known, 0, 150)
    parts: list[Child] = [rect(0, 4, 150, 8, "track"), rect(0, 4, x(residual) if residual > 0 else 0, 8, "within")]
    if found.floor:
        parts.append(line(x(found.floor), 1, x(found.floor), 15, "base"))
    return tag("svg", parts, viewBox="0 0 150 16", width="150", height="16", aria_hidden="true")
