"""The head of the page: the verdict in words, its cause, what to change, what it costs, and the main numbers."""

from __future__ import annotations

import re

from rlkernel_drift.profiles import LABELS
from rlkernel_drift.report.markup import Child, Markup, number, share, tag
from rlkernel_drift.report.sections.common import clip, icon, prose, settings, threads, title_of
from rlkernel_drift.verdict import Finding, Metric, Status, Verdict

LOOK = {
    Status.ALIGNED: ("good", "check", "Aligned"),
    Status.DRIFT: ("bad", "unequal", "Drift"),
    Status.INPUTS_DIFFER: ("bad", "swap", "Inputs differ"),
    Status.INCONCLUSIVE: ("unsure", "question", "Inconclusive"),
    Status.UNUSABLE: ("unsure", "bang", "Unusable input"),
}
"""Class, icon and words of each status, so that the colour never stands alone."""
MAIN_METRICS = ("tokens.mean", "tokens.maximum", "tokens.k3", "tokens.bias")


def summary(verdict: Verdict) -> Markup:
    """The head of the page."""
    look, sign, words = LOOK[verdict.status]
    facts: list[Child] = [tag("span", f"exit status {verdict.exit_code}")]
    if verdict.profile:
        facts.append(tag("span", "profile ", tag("b", clip(verdict.profile, 80))))
    status = tag("p", tag("span", icon(sign), class_="glyph"), tag("strong", words), class_="status")
    return tag(
        "header",
        tag("div", status, tag("p", facts, class_="chips"), class_="top"),
        *_words(verdict),
        tag("p", clip(verdict.scope), class_="scope") if verdict.scope else None,
        _columns(verdict),
        _figures(verdict),
        class_=f"verdict {look}",
        id="verdict",
    )


def headline(verdict: Verdict) -> str:
    """The headline without the status, which the page shows above it."""
    status = LOOK[verdict.status][2]
    words = re.sub(rf"^({status}|The inputs differ)( \([^()]*\))?: ", "", verdict.headline)
    if verdict.status == Status.DRIFT and verdict.diagnosis is None:
        words = f"The log-probabilities drift apart: {words}"
    # a sentence begins with a capital letter, a path keeps its spelling
    return words[:1].upper() + words[1:] if words.partition(" ")[0].isalpha() else words


def _words(verdict: Verdict) -> list[Child]:
    """The diagnosed cause as the title where there is one, else the headline."""
    words, found = headline(verdict), verdict.diagnosis
    if found is None or (verdict.status == Status.INPUTS_DIFFER and found.cause != "none"):
        return [tag("h1", prose(words))]
    if found.cause == "none" or verdict.status == Status.ALIGNED:
        return [tag("h1", prose(words)), tag("p", prose(found.statement), class_="statement")]
    first, rest = sentence(found.statement)
    return [tag("h1", prose(first)), tag("p", prose(rest or words), class_="statement")]


def sentence(text: str) -> tuple[str, str]:
    """The first sentence and the rest, both with a full stop."""
    first, _, rest = text.partition(". ")
    ended = lambda part: part if not part or part.endswith((".", "!", "?")) else f"{part}."
    return ended(first), ended(rest)


def _main_finding(verdict: Verdict) -> tuple[str, Finding | None]:
    """(title, finding): the named cause, else the suspect, else the first error where nothing was diagnosed."""
    if verdict.named is not None:
        likely = verdict.diagnosis is not None and verdict.diagnosis.confidence == "likely"
        return "Likely cause" if likely else "Cause", verdict.named
    if verdict.suspect is not None:
        return "Suspect, not diagnosed" if verdict.diagnosis is None else "Suspect, not confirmed", verdict.suspect
    errors = [f for f in verdict.findings if f.severity == "error"]
    return "Cause", errors[0] if errors and verdict.diagnosis is None else None


def _columns(verdict: Verdict) -> Markup | None:
    """Cause, fix, cost and beginning, next to each other."""
    calm = verdict.status in (Status.ALIGNED, Status.UNUSABLE)
    title, finding = ("", None) if calm else _main_finding(verdict)
    columns: list[Child] = []
    stated = verdict.diagnosis.statement if verdict.diagnosis else None
    if finding is not None:
        cause = title_of(finding.cause)
        words = settings(finding.evidence) if finding.message == stated else tag("p", prose(finding.message))
        columns.append(_column(title, tag("p", tag("b", cause[:1].upper() + cause[1:], ".")), words))
        if finding.fix:
            columns.append(_column("What to change", tag("p", prose(finding.fix)), threads(finding.threads[:2])))
    costs = [c for c in verdict.consequences if not calm and (c.tokens or c.sequences or c.cosine is not None)]
    if costs:
        costs.sort(key=lambda c: c.cosine is None)
        items = [tag("li", clip(c.words, 160), tag("small", clip(f"{c.name}, {c.setting}", 120))) for c in costs[:3]]
        columns.append(_column("What it costs", tag("ul", items, class_="costs")))
    change = next((t for t in verdict.trends if t.change is not None), None)
    if change is not None:
        label = tag("b", clip(LABELS.get(change.metric, change.metric), 80))
        columns.append(_column("Since when", tag("p", label, ": ", clip(change.words, 200), ".")))
    return tag("div", columns, class_="columns") if columns else None


def _column(title: str, *children: Child) -> Markup:
    return tag("div", tag("h2", title), *children)


def _figures(verdict: Verdict) -> Markup | None:
    """Up to six numbers, those with a threshold first; None where nothing was compared."""
    statistics = verdict.statistics
    if statistics is not None and not statistics.tokens:
        return None
    judged = [m for m in verdict.metrics if m.status in ("ok", "over")][:3]
    by_name = {m.name: m for m in verdict.metrics}
    cards: list[Child] = [_judged_card(m) for m in judged]
    shown = {m.name for m in judged}
    if statistics is not None:
        cards.append(_card("tokens compared", f"{statistics.tokens:,}"))
        if "tokens.equal" not in shown:
            cards.append(_card("equal bits", share(statistics.equal)))
    for name in MAIN_METRICS:
        if len(cards) < 6 and name in by_name and name not in shown:
            cards.append(_card(by_name[name].label, number(by_name[name].value)))
    return tag("dl", cards, class_="figures") if cards else None


def _judged_card(metric: Metric) -> Markup:
    over = metric.status == "over"
    limits = [f"at most {number(metric.at_most, 3)}"] if metric.at_most is not None else []
    limits += [f"at least {number(metric.at_least, 3)}"] if metric.at_least is not None else []
    times = f" · {number(metric.ratio, 3)}×" if over and metric.ratio is not None and metric.at_most else ""
    value = share(metric.value) if metric.name.endswith("equal") else number(metric.value)
    mark = tag("span", "over the limit" if over else "within the limit", class_="sr")
    return _card(metric.label, [value, tag("small", ", ".join(limits), times), mark], "over" if over else "ok")


def _card(label: str, value: Child, class_: str | None = None) -> Markup:
    return tag("div", tag("dt", label), tag("dd", value), class_=class_)
