"""What a verdict is written as: text on a terminal, Markdown for an issue, JUnit XML. JSON is the model itself.

Texts in it come from strangers: a terminal is shown control characters and never sent them, and Markdown keeps foreign
text in code spans that it cannot leave.
"""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

from rlkernel_drift.verdict import Finding, Status, Verdict

_STYLE = {
    "passed": "green",
    "failed": "bold red",
    "warned": "yellow",
    "skipped": "dim",
    "not reached": "dim",
}
_MARK = {"passed": "ok", "failed": "FAIL", "warned": "warn", "skipped": "skip", "not reached": "-"}
_COLOUR = {Status.ALIGNED: "green", Status.INCONCLUSIVE: "yellow"}


def printable(text: str) -> str:
    """Text without control characters, which could move a terminal's cursor or change its colours."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def write_text(verdict: Verdict, console: Any, *, details: bool = True) -> None:
    """Prints a verdict.

    Args:
        console: a `rich.console.Console`.
        details: tables of metrics and of the worst tokens too.
    """
    from rich.table import Table
    from rich.text import Text

    style = _COLOUR.get(verdict.status, "red")
    console.print(Text(printable(verdict.headline), style=f"bold {style}"))
    if verdict.diagnosis is not None:
        console.print(Text(printable(verdict.diagnosis.statement), style="bold"))
    if verdict.scope:
        profile = f"profile {verdict.profile}" if verdict.profile else ""
        console.print(Text(printable(f"{verdict.scope}; {profile}"), style="dim"))
    if verdict.gates:
        table = Table(box=None, pad_edge=False, show_header=False)
        for gate in verdict.gates:
            mark = Text(_MARK[gate.status], style=_STYLE[gate.status])
            table.add_row(mark, Text(gate.title), Text(printable(gate.summary)))
        console.print(table)
    said: set[str] = set()
    for finding in _worth_showing(verdict):
        console.print(Text(f"\n{printable(finding.message)}"))
        if finding.fix in said:
            continue
        said.add(finding.fix)
        if finding.fix:
            console.print(Text(f"  fix: {finding.fix}", style="cyan"))
        for thread in finding.threads[:2]:
            console.print(Text(f"  seen: {thread.url} ({thread.seen})", style="dim"))
    if details:
        _details(verdict, console, Table, Text)


def _worth_showing(verdict: Verdict) -> list[Finding]:
    found = [f for f in verdict.findings if f.severity != "note"]
    if verdict.diagnosis is not None and verdict.diagnosis.finding is not None:
        found = [verdict.diagnosis.finding, *found]
    return found[:8]


def _details(verdict: Verdict, console: Any, table_of: Any, text_of: Any) -> None:
    judged = [m for m in verdict.metrics if m.status != "no threshold"]
    keys = (
        "tokens.mean",
        "tokens.p99",
        "tokens.maximum",
        "tokens.bias",
        "tokens.k3",
        "tokens.chi_square",
        "tokens.ess",
    )
    named = {m.name for m in judged}
    rows = judged + [m for m in verdict.metrics if m.name in keys and m.name not in named]
    if rows:
        table = table_of(title="statistics", title_justify="left", box=None, pad_edge=False)
        for column in ("metric", "value", "threshold", "ratio", ""):
            table.add_column(column, justify="left" if column in ("metric", "") else "right")
        for m in rows:
            limit = m.at_most if m.at_most is not None else m.at_least
            value = "-" if m.value is None else f"{m.value:.4g}"
            ratio = "-" if m.ratio is None else f"{m.ratio:.2f}"
            state = {"over": "over", "ok": "ok", "missing": "missing"}.get(m.status, "")
            table.add_row(m.label, value, "-" if limit is None else f"{limit:g}", ratio, state)
        console.print()
        console.print(table)
    if verdict.consequences and verdict.status == Status.DRIFT:
        console.print()
        for c in verdict.consequences:
            console.print(text_of(f"{c.name}, {c.setting}: {c.words}", style="magenta"))
    for trend in verdict.trends:
        if trend.change is not None:
            console.print(text_of(printable(f"{trend.metric}: {trend.words}"), style="magenta"))
    worst = verdict.tokens.worst[:5] if verdict.tokens else []
    if worst and verdict.status != Status.ALIGNED:
        table = table_of(title="worst tokens", title_justify="left", box=None, pad_edge=False)
        for column in ("sequence", "token", "id", "text", "rollout", "train", "train - rollout"):
            table.add_column(column, justify="left" if column == "text" else "right")
        for t in worst:
            numbers = ["-" if v is None else f"{v:.5f}" for v in (t.rollout, t.train, t.difference)]
            text = printable(t.text) if t.text else ""
            table.add_row(str(t.sequence), str(t.index), str(t.id), text_of(text[:24]), *numbers)
        console.print()
        console.print(table)
    if verdict.lattice is not None:
        console.print(text_of(str(verdict.lattice), style="magenta"))


_WORD = {"passed": "pass", "failed": "**FAIL**", "warned": "warn", "skipped": "skipped", "not reached": "not reached"}
_ROWS = 12
_ESCAPES = {c: f"\\{c}" for c in "\\`*_[]#"} | {c: f"&#{ord(c)};" for c in "<>&|"}


def write_markdown(verdict: Verdict) -> str:
    """Markdown of a verdict to paste in an issue: under sixty lines."""
    lines = [f"## {plain(verdict.headline)}", ""]
    if verdict.diagnosis is not None:
        lines += [f"**{plain(verdict.diagnosis.statement)}**", ""]
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
            limit = m.at_most if m.at_most is not None else m.at_least
            cells = ["-" if v is None else f"{v:.4g}" for v in (m.value, limit, m.ratio)]
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
    """Text that Markdown and HTML leave alone."""
    return "".join(_ESCAPES.get(c, c) for c in printable(text.replace("\n", " ")))


_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_junit(verdict: Verdict) -> str:
    """XML text, a test case a gate, so that CI systems show the ladder.

    A failed gate is a failure, an unusable input an error, a gate without evidence is skipped.
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
