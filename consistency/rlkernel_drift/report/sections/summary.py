"""The answer first: the verdict in words, its cause, what to change, what it costs, and the numbers that carry it."""

from __future__ import annotations

import re

from rlkernel_drift.profiles import LABELS
from rlkernel_drift.report.markup import Child, Markup, number, share, tag
from rlkernel_drift.report.sections.common import clip, evidence, icon, prose, threads, title_of
from rlkernel_drift.verdict import Finding, Metric, Status, Verdict

LOOK = {
    Status.ALIGNED: ("good", "check", "Aligned"),
    Status.DRIFT: ("bad", "unequal", "Drift"),
    Status.INPUTS_DIFFER: ("bad", "swap", "Inputs differ"),
    Status.INCONCLUSIVE: ("unsure", "question", "Inconclusive"),
    Status.UNUSABLE: ("unsure", "bang", "Unusable input"),
}
"""Class, icon and words of each status: never the colour alone."""


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
    """The headline without the status, which stands above it."""
    status = LOOK[verdict.status][2]
    words = re.sub(rf"^({status}|The inputs differ)( \([^()]*\))?: ", "", verdict.headline)
    if verdict.status == Status.DRIFT and verdict.diagnosis is None:
        words = f"The log-probabilities drift apart: {words}"
    # A sentence begins with a capital, a path does not.
    return words[:1].upper() + words[1:] if words.partition(" ")[0].isalpha() else words


def _words(verdict: Verdict) -> list[Child]:
    """The cause where it was named, else the finding; the numbers below."""
    words = headline(verdict)
    if verdict.diagnosis is None or verdict.diagnosis.cause == "none" or verdict.status == Status.ALIGNED:
        return [tag("h1", prose(words)), _statement(verdict)]
    if verdict.status == Status.INPUTS_DIFFER:
        return [tag("h1", prose(words))]
    first, rest = sentence(verdict.diagnosis.statement)
    return [tag("h1", prose(first)), tag("p", prose(rest or words), class_="statement")]


def sentence(text: str) -> tuple[str, str]:
    """The first sentence, and the rest, both with a full stop."""
    first, _, rest = text.partition(". ")
    ended = lambda part: part if not part or part.endswith((".", "!", "?")) else f"{part}."
    return ended(first), ended(rest)


def _statement(verdict: Verdict) -> Child:
    return tag("p", prose(verdict.diagnosis.statement), class_="statement") if verdict.diagnosis else None


def _main_finding(verdict: Verdict) -> tuple[str, Finding | None]:
    """The cause, else the suspect, else that a threshold was exceeded, with its title."""
    if verdict.named is not None:
        return "Cause", verdict.named
    if verdict.suspect is not None:
        return "Suspect, not diagnosed" if verdict.diagnosis is None else "Suspect, not confirmed", verdict.suspect
    errors = [f for f in verdict.findings if f.severity == "error"]
    return "Cause", errors[0] if errors and verdict.diagnosis is None else None


def _columns(verdict: Verdict) -> Markup | None:
    """Cause, fix, cost and beginning beside each other."""
    calm = verdict.status in (Status.ALIGNED, Status.UNUSABLE)
    title, finding = ("", None) if calm else _main_finding(verdict)
    columns: list[Child] = []
    stated = verdict.diagnosis.statement if verdict.diagnosis else None
    if finding is not None:
        cause = title_of(finding.cause)
        columns.append(
            tag(
                "div",
                tag("h2", title),
                tag("p", tag("b", cause[:1].upper() + cause[1:], ".")),
                evidence(finding) if finding.message == stated else tag("p", prose(finding.message)),
            )
        )
        if finding.fix:
            columns.append(
                tag("div", tag("h2", "What to change"), tag("p", prose(finding.fix)), threads(finding.threads[:2]))
            )
    costs = [c for c in verdict.consequences if not calm and (c.tokens or c.sequences or c.cosine is not None)]
    if costs:
        costs.sort(key=lambda c: c.cosine is None)
        items = [tag("li", clip(c.words, 160), tag("small", clip(f"{c.name}, {c.setting}", 120))) for c in costs[:3]]
        columns.append(tag("div", tag("h2", "What it costs"), tag("ul", items, class_="costs")))
    change = next((t for t in verdict.trends if t.change is not None), None)
    if change is not None:
        label = LABELS.get(change.metric, change.metric)
        columns.append(
            tag("div", tag("h2", "Since when"), tag("p", tag("b", clip(label, 80)), ": ", clip(change.words, 200), "."))
        )
    return tag("div", columns, class_="columns") if columns else None


def _figures(verdict: Verdict) -> Markup | None:
    """Up to six numbers, those with a threshold first; none where nothing was compared."""
    if verdict.statistics is not None and not verdict.statistics.tokens:
        return None
    judged = [m for m in verdict.metrics if m.status in ("ok", "over")]
    by_name = {m.name: m for m in verdict.metrics}
    cards: list[Child] = [_card(m) for m in judged[:3]]
    shown = {m.name for m in judged[:3]}
    statistics = verdict.statistics
    if statistics is not None and statistics.tokens:
        cards.append(_plain_card("tokens compared", f"{statistics.tokens:,}", ""))
        if "tokens.equal" not in shown:
            cards.append(_plain_card("equal bits", share(statistics.equal), ""))
    for name in ("tokens.mean", "tokens.maximum", "tokens.k3", "tokens.bias"):
        if len(cards) < 6 and name in by_name and name not in shown:
            cards.append(_plain_card(by_name[name].label, number(by_name[name].value), ""))
    return tag("dl", cards, class_="figures") if cards else None


def _card(metric: Metric) -> Markup:
    over = metric.status == "over"
    limits = [f"at most {number(metric.at_most, 3)}" if metric.at_most is not None else ""]
    limits.append(f"at least {number(metric.at_least, 3)}" if metric.at_least is not None else "")
    words = ", ".join(limit for limit in limits if limit)
    times = f" · {number(metric.ratio, 3)}×" if over and metric.ratio is not None and metric.at_most else ""
    value = share(metric.value) if metric.name.endswith("equal") else number(metric.value)
    return _plain_card(metric.label, value, words + times, "over" if over else "ok")


def _plain_card(label: str, value: str, note: str, class_: str | None = None) -> Markup:
    mark = {"over": "over the limit", "ok": "within the limit"}.get(class_ or "")
    return tag(
        "div",
        tag("dt", label),
        tag("dd", value, tag("small", note) if note else None, tag("span", mark, class_="sr") if mark else None),
        class_=class_,
    )
