"""The conclusion of a comparison: status, exit code and headline from its gates."""

from __future__ import annotations

import sys
from typing import Any

from rlkernel_drift import __version__
from rlkernel_drift.errors import DriftError
from rlkernel_drift.gates import INPUT_GATES
from rlkernel_drift.knowledge import CAUSES
from rlkernel_drift.profiles import Profile
from rlkernel_drift.verdict import EXIT_CODES, Gate, Status, Verdict

TOOL = f"rlkernel-drift {__version__}"


def new_verdict(profile: Profile, command: list[str], **parts: Any) -> Verdict:
    """A verdict without gates: nothing was compared."""
    return Verdict(
        tool=TOOL,
        status=Status.INCONCLUSIVE,
        exit_code=3,
        headline="",
        profile=profile.name,
        profile_source=profile.source,
        command=command or list(sys.argv),
        **parts,
    )


def conclude(verdict: Verdict) -> Verdict:
    """Status, exit code and headline from the gates."""
    failed = [g for g in verdict.gates if g.status == "failed"]
    if verdict.gate("schema").status == "failed":
        status = Status.INCONCLUSIVE
    elif any(g.name in INPUT_GATES for g in failed):
        status = Status.INPUTS_DIFFER
    elif failed:
        status = Status.DRIFT
    elif verdict.gate("statistics").status in ("passed", "warned"):
        status = Status.ALIGNED
    else:
        status = Status.INCONCLUSIVE
    return verdict.model_copy(
        update={"status": status, "exit_code": EXIT_CODES[status], "headline": _headline(verdict, status, failed)}
    )


def _headline(verdict: Verdict, status: Status, failed: list[Gate]) -> str:
    coverage = verdict.coverage
    part = f"; compared {coverage}" if coverage is not None and coverage.share < 1 else ""
    if status == Status.ALIGNED:
        statistics = verdict.statistics
        if statistics is None:
            own = verdict.gate("statistics")
            less = f" that has one; {own.findings[0].message}" if own.status == "warned" and own.findings else ""
            return f"Aligned: every logged statistic is within profile {verdict.profile} at every step{less}."
        if statistics.equal == 1:
            return f"Aligned: all {statistics.tokens} log-probabilities have equal bits{part}."
        size = f"mean |d| {statistics.mean:.3g}, k3 {statistics.k3:.3g}"
        return f"Aligned within profile {verdict.profile}: {statistics.tokens} tokens, {size}{part}."
    if status == Status.INCONCLUSIVE:
        reasons = [g.summary for g in verdict.gates if g in failed or (g.name == "statistics" and g.status != "passed")]
        return f"Inconclusive: {reasons[0] if reasons else 'nothing was compared'}."
    words = "The inputs differ" if status == Status.INPUTS_DIFFER else "Drift"
    begins = [
        f"; it begins at {f.evidence['operator']}: {CAUSES[f.cause].title}"
        for g in failed[1:]
        for f in g.findings
        if g.name == "layers" and f.severity == "error"
    ]
    return f"{words} ({failed[0].title}): {failed[0].summary}{''.join(begins[:1])}{part}."


def unusable(error: DriftError, command: list[str]) -> Verdict:
    """The verdict of an input that cannot be used, so that JSON and JUnit outputs exist for it too."""
    return Verdict(
        tool=TOOL,
        status=Status.UNUSABLE,
        exit_code=2,
        headline=f"Unusable input: {error}.".encode("utf-8", "backslashreplace").decode(),
        command=command,
    )
