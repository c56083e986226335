"""The gates, in the order of `TITLES`: each is a function of a pair of capsules that returns a `Gate`.

Gate 1 is here: does each side have log-probabilities of its own, and do the sequences match?
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rlkernel_drift import __version__
from rlkernel_drift.errors import DriftError
from rlkernel_drift.knowledge import CAUSES, finding
from rlkernel_drift.pair import Pair
from rlkernel_drift.profiles import Profile
from rlkernel_drift.verdict import EXIT_CODES, Finding, Gate, Status, Verdict

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
"""Gates that compare the inputs; if one fails, the log-probabilities belong to different computations."""


def gate(name: str, findings: Sequence[Finding], passed: str) -> Gate:
    """A gate's result by the worst of its findings; `passed` is the summary without errors and warnings."""
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


def first_few(names: Sequence[object], limit: int = 5) -> str:
    """The first few of many names, as text."""
    shown = ", ".join(str(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def schema_gate(pair: Pair) -> Gate:
    """Fails if a side has no log-probabilities of its own; lists sequences without a partner."""
    findings = []
    # vLLM's hidden states have no log-probabilities, but they show where two sides diverge.
    located = bool(set(pair.rollout.operators.values) & set(pair.train.operators.values))
    for name, side in (("rollout", pair.rollout), ("train", pair.train)):
        if side.stream is None:
            rest = ": only its layers are compared" if located else ""
            message = f"the {name} side has no log-probabilities{rest}"
            findings.append(finding("nothing-compared", message, "warning" if located else "error"))
        if side.manifest.left_out:
            left = "; ".join(side.manifest.left_out)
            findings.append(finding("nothing-compared", f"the {name} side left out: {left}", "note"))
    if _same(pair):
        message = "both sides are the same capsule, byte for byte: their agreement shows nothing"
        findings.append(finding("same-capsule", message))
    elif _handed_over(pair):
        message = (
            "the train side holds only the rollout's own recorded log-probabilities and none of training: their "
            "agreement shows nothing"
        )
        findings.append(finding("same-capsule", message))
    if (pair.rollout.manifest.side, pair.train.manifest.side) == ("train", "rollout"):
        message = "the first input is declared as training, the second as rollout: all signs are reversed"
        findings.append(finding("sides-exchanged", message, "warning"))
    alone = [len(part) for part in pair.alone]
    if all(alone) and not pair.matches:
        message = "no sequence of the rollout has the id of a sequence of the train side"
        findings.append(finding("nothing-compared", message, rollout=alone[0], train=alone[1]))
    elif any(alone):
        message = f"{alone[0]} sequences of the rollout and {alone[1]} of the train side have no partner"
        findings.append(finding("nothing-compared", message, "warning", rollout=alone[0], train=alone[1]))
    return gate("schema", findings, f"rlkernel.trace/1 on both sides, {len(pair.matches)} sequences matched")


def _handed_over(pair: Pair) -> bool:
    """Whether the train side has only the rollout's recording, which trainers pass along with the tokens."""
    streams = pair.streams()
    if streams is None or pair.train.manifest.side != "train" or not streams[1].startswith("recorded."):
        return False
    compared = pair.compared(streams)
    return streams[0] == streams[1] and compared is not None and bool(len(compared.d)) and not compared.d.any()


def _same(pair: Pair) -> bool:
    """Whether a stream is compared with itself; a capsule that holds both sides has two streams."""
    a, b, streams = pair.rollout.manifest, pair.train.manifest, pair.streams()
    one = pair.rollout is pair.train or (bool(a.files) and a == b)
    return one and (streams is None or streams[0] == streams[1])


# ---- conclusion ------------------------------------------------------------------------------------------------------


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
