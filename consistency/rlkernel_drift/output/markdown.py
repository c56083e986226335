"""The verdict to paste in an issue: under sixty lines, every foreign text in code spans that it cannot leave."""

from __future__ import annotations

from rlkernel_drift.output.text import printable
from rlkernel_drift.verdict import Verdict

_MARK = {"passed": "pass", "failed": "**FAIL**", "warned": "warn", "skipped": "skipped", "not reached": "not reached"}
_ROWS = 12
_ESCAPES = {c: f"\\{c}" for c in "\\`*_[]#"} | {c: f"&#{ord(c)};" for c in "<>&|"}


def write_markdown(verdict: Verdict) -> str:
    """Markdown of a verdict."""
    lines = [f"## {plain(verdict.headline)}", ""]
    if verdict.diagnosis is not None:
        lines += [f"**{plain(verdict.diagnosis.statement)}**", ""]
    lines += [f"{plain(verdict.scope)}. Profile `{verdict.profile}`, exit status {verdict.exit_code}.", ""]
    if verdict.gates:
        lines += ["| gate | | |", "|---|---|---|"]
        lines += [f"| {g.title} | {_MARK[g.status]} | {plain(g.summary)} |" for g in verdict.gates]
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
