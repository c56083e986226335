"""Writes a verdict as text for a terminal, Markdown for an issue, or JUnit XML; JSON is the model itself.

The texts are untrusted: control characters are printed as escapes and never sent to a terminal, and Markdown and HTML
syntax is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from rlkernel_drift.verdict import Finding, Metric, Status, Verdict

_STYLE = {"passed": "green", "failed": "bold red", "warned": "yellow", "skipped": "dim", "not reached": "dim"}
_MARK = {"passed": "ok", "failed": "FAIL", "warned": "warn", "skipped": "skip", "not reached": "-"}
_COLOUR = {Status.ALIGNED: "green", Status.INCONCLUSIVE: "yellow"}
_KEY_METRICS = {f"tokens.{name}" for name in ("mean", "p99", "maximum", "bias", "k3", "chi_square", "ess")}


def printable(text: str) -> str:
    """Text with control characters escaped, because they could move a terminal's cursor or change its colours."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def write_text(verdict: Verdict, console: Any, *, details: bool = True) -> None:
    """Prints a verdict.

    Args:
        console: a `rich.console.Console`.
        details: whether to print the tables of metrics and of the worst tokens as well.
    """
    from rich.text import Text

    show = lambda text, style="": console.print(Text(printable(text), style=style))
    show(verdict.headline, f"bold {_COLOUR.get(verdict.status, 'red')}")
    if verdict.diagnosis is not None:
        show(verdict.diagnosis.statement, "bold")
        for words in verdict.diagnosis.summary:
            show(words, "bold")
    if verdict.scope:
        show(f"{verdict.scope}; {f'profile {verdict.profile}' if verdict.profile else ''}", "dim")
    if verdict.gates:
        table = _table(None, ("", "", ""), ("",))
        for gate in verdict.gates:
            mark = Text(_MARK[gate.status], style=_STYLE[gate.status])
            table.add_row(mark, Text(gate.title), Text(printable(gate.summary)))
        console.print(table)
    shown: set[str] = set()
    for finding in _worth_showing(verdict):
        console.print()
        show(finding.message)
        if finding.fix in shown:
            continue
        shown.add(finding.fix)
        if finding.fix:
            show(f"  fix: {finding.fix}", "cyan")
        for thread in finding.threads[:2]:
            show(f"  seen: {thread.url} ({thread.seen})", "dim")
    if not details:
        return
    _metrics_table(verdict, console)
    if verdict.consequences and verdict.status == Status.DRIFT:
        console.print()
        for c in verdict.consequences:
            show(f"{c.name}, {c.setting}: {c.words}", "magenta")
    for trend in verdict.trends:
        if trend.change is not None:
            show(f"{trend.metric}: {trend.words}", "magenta")
    _worst_tokens(verdict, console)
    if verdict.lattice is not None:
        show(str(verdict.lattice), "magenta")


def _table(title: str | None, columns: Sequence[str], left: Sequence[str]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=title is not None)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    return table


def _worth_showing(verdict: Verdict) -> list[Finding]:
    found = [f for f in verdict.findings if f.severity != "note"]
    if verdict.diagnosis is not None and verdict.diagnosis.finding is not None:
        found = [verdict.diagnosis.finding, *found]
    return found[:8]


def _limit(metric: Metric) -> float | None:
    return metric.at_most if metric.at_most is not None else metric.at_least


def _metrics_table(verdict: Verdict, console: Any) -> None:
    table = _table("statistics", ("metric", "value", "threshold", "ratio", ""), ("metric", ""))
    for m in verdict.metrics:
        if m.status == "no threshold" and m.name not in _KEY_METRICS:
            continue
        limit, state = _limit(m), "" if m.status == "no threshold" else m.status
        value = "-" if m.value is None else f"{m.value:.4g}"
        ratio = "-" if m.ratio is None else f"{m.ratio:.2f}"
        table.add_row(m.label, value, "-" if limit is None else f"{limit:g}", ratio, state)
    if table.row_count:
        console.print()
        console.print(table)


def _worst_tokens(verdict: Verdict, console: Any) -> None:
    from rich.text import Text

    worst = verdict.tokens.worst[:5] if verdict.tokens else []
    if not worst or verdict.status == Status.ALIGNED:
        return
    columns = ("sequence", "token", "id", "text", "rollout", "train", "train - rollout")
    table = _table("worst tokens", columns, ("text",))
    for t in worst:
        numbers = ["-" if v is None else f"{v:.5f}" for v in (t.rollout, t.train, t.difference)]
        text = printable(t.text) if t.text else ""
        table.add_row(str(t.sequence), str(t.index), str(t.id), Text(text[:24]), *numbers)
    console.print()
    console.print(table)


_WORD = {"passed": "pass", "failed": "**FAIL**", "warned": "warn", "skipped": "skipped", "not reached": "not reached"}
_ROWS = 12
_ESCAPES = {c: f"\\{c}" for c in "\\`*_[]#"} | {c: f"&#{ord(c)};" for c in "<>&|"}


def write_markdown(verdict: Verdict) -> str:
    """Markdown of a verdict, to paste into an issue; under sixty lines."""
    lines = [f"## {plain(verdict.headline)}", ""]
    if verdict.diagnosis is not None:
        lines += [f"**{plain(verdict.diagnosis.statement)}**", ""]
        lines += [f"- {plain(words)}" for words in verdict.diagnosis.summary]
    lines += [f"{plain(verdict.scope)}. Profile `{verdict.profile}`, exit status {verdict.exit_code}.", ""]
    if verdict.gates:
        lines += ["| gate | | |", "|---|---|---|"]
        lines += [f"| {g.title} | {_WORD[g.status]} | {plain(g.summary)} |" for g in verdict.gates]
        lines.append("")
    findings = [f for f in verdict.findings if f.severity == "error" and f.fix]
    if verdict.diagnosis is not None and verdict.diagnosis.finding is not None:
        findings = [verdict.diagnosis.finding, *findings]
    once = {finding.fix: finding for finding in reversed(findings)}
    for finding in list(reversed(once.values()))[:3]:
        seen = ", ".join(f"[{t.name}]({t.url})" for t in finding.threads)
        lines.append(f"- **Fix:** {finding.fix}{f' Seen in {seen}.' if seen else ''}")
    judged = [m for m in verdict.metrics if m.status != "no threshold"]
    rest = [m for m in verdict.metrics if m.status == "no threshold"]
    rows = (judged + rest)[:_ROWS]
    if rows:
        lines += ["", "| metric | value | threshold | ratio |", "|---|---:|---:|---:|"]
        for m in rows:
            cells = ["-" if v is None else f"{v:.4g}" for v in (m.value, _limit(m), m.ratio)]
            lines.append(f"| {plain(m.label)} | {' | '.join(cells)} |")
    numerics = [d for d in verdict.differences if d.weight != "other"][:8]
    if numerics:
        lines += ["", "| setting | rollout | train |", "|---|---|---|"]
        lines += [f"| {plain(d.key)} | {plain(str(d.rollout))} | {plain(str(d.train))} |" for d in numerics]
    if verdict.command:
        command = printable(" ".join(verdict.command)).replace("`", "'")
        lines += ["", f"`{command}`"]
    return "\n".join(lines) + "\n"


def plain(text: str) -> str:
    """Text with Markdown and HTML syntax escaped."""
    return "".join(_ESCAPES.get(c, c) for c in printable(text.replace("\n", " ")))


_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_junit(verdict: Verdict) -> str:
    """XML text with one test case per gate.

    A failed gate is a failure, an unusable input an error, and a gate without evidence is skipped.
    """
    gates = verdict.gates
    failed = sum(g.status == "failed" for g in gates)
    quiet = sum(g.status in ("skipped", "not reached") for g in gates)
    errors = int(verdict.status in (Status.UNUSABLE, Status.INCONCLUSIVE))
    suite = ElementTree.Element(
        "testsuite",
        name="rlkernel-drift",
        tests=str(len(gates) + 1),
        failures=str(failed),
        errors=str(errors),
        skipped=str(quiet),
    )
    for gate in gates:
        case = ElementTree.SubElement(suite, "testcase", classname="rlkernel-drift", name=gate.title)
        if gate.status == "failed":
            body = ElementTree.SubElement(case, "failure", message=_clean(gate.summary))
            body.text = "\n".join(_clean(f.message + (f"\n  fix: {f.fix}" if f.fix else "")) for f in gate.findings)
        elif gate.status in ("skipped", "not reached"):
            ElementTree.SubElement(case, "skipped", message=_clean(gate.summary))
    case = ElementTree.SubElement(suite, "testcase", classname="rlkernel-drift", name="verdict")
    if errors:
        ElementTree.SubElement(case, "error", message=_clean(verdict.headline))
    ElementTree.SubElement(case, "system-out").text = _clean(verdict.headline)
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("?", text)
