"""What a gate is: a function of a pair that returns its rung of the ladder."""

from __future__ import annotations

from collections.abc import Sequence

from rlkernel_drift.verdict import Finding, Gate

TITLES = {
    "schema": "schema and versions",
    "weights": "weights",
    "tokens": "tokens, positions, masks, template",
    "semantics": "meaning of the log-probabilities",
    "configuration": "configuration",
    "statistics": "statistics",
    "layers": "layers and operators",
}
INPUT_GATES = ("schema", "weights", "tokens", "semantics")
"""Gates that compare what went in; where one fails, the numbers behind it belong to different things."""


def gate(name: str, findings: Sequence[Finding], passed: str) -> Gate:
    """A gate's result by the worst of its findings; `passed` is its summary where there is nothing to say."""
    severities = {finding.severity for finding in findings}
    status = "failed" if "error" in severities else "warned" if "warning" in severities else "passed"
    first = next((f for f in findings if f.severity == ("error" if status == "failed" else "warning")), None)
    return Gate(
        name=name,
        title=TITLES[name],
        status=status,  # type: ignore[arg-type]
        summary=first.message if first else passed,
        findings=list(findings),
    )


def skipped(name: str, why: str) -> Gate:
    """A gate without evidence; it never counts as passed."""
    return Gate(name=name, title=TITLES[name], status="skipped", summary=why)


def some(names: Sequence[object], limit: int = 5) -> str:
    """The first few of many, in words."""
    shown = ", ".join(str(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
