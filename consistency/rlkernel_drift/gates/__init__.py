"""The gates, in the order of `TITLES`: each is a function of a pair of capsules that returns a `Gate`.

Gate 1 is here: does each side have log-probabilities of its own, and do the sequences match?
"""

from __future__ import annotations

from collections.abc import Sequence

from rlkernel_drift.knowledge import finding
from rlkernel_drift.pair import Pair
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
