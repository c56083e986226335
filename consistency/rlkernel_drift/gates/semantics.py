"""Gate 4: do the numbers mean the same? Temperature, raw or processed, kept tokens, padded vocabulary."""

from __future__ import annotations

from rlkernel_drift.capsule import Capsule
from rlkernel_drift.gates.common import gate, skipped
from rlkernel_drift.knowledge import finding
from rlkernel_drift.pair import Pair
from rlkernel_drift.verdict import Finding, Gate


def semantics_gate(pair: Pair) -> Gate:
    """Compares what both sides declare about their log-probabilities."""
    streams = pair.streams()
    if streams is None:
        return skipped("semantics", "a side has no log-probabilities")
    left, right = (name.split(".")[1] for name in streams)
    a, b = pair.rollout.manifest.sampling, pair.train.manifest.sampling
    plain = a.temperature == 1 and not a.filters
    findings: list[Finding] = []
    if left != right and not (plain and b.temperature == 1 and not b.filters):
        settings = f"temperature {a.temperature:g}, top-p {a.top_p:g}, top-k {a.top_k}, min-p {a.min_p:g}"
        message = f"the rollout's log-probabilities are {left}, the train side's {right}, sampled with {settings}"
        findings.append(finding("logprobs-mode", message, rollout=left, train=right, temperature=a.temperature))
    elif left == "processed" or right == "processed":
        findings += _processed(pair)
    findings += _vocabulary(pair)
    return gate("semantics", findings, f"both sides' log-probabilities are {left}" + _settings(pair.rollout, left))


def _processed(pair: Pair) -> list[Finding]:
    a, b = pair.rollout.manifest.sampling, pair.train.manifest.sampling
    found = []
    if a.temperature != b.temperature:
        message = f"temperature {a.temperature:g} in the rollout, {b.temperature:g} in training"
        found.append(finding("temperature", message, rollout=a.temperature, train=b.temperature))
    for key, cause in (("top_p", "top-p"), ("top_k", "top-k"), ("min_p", "min-p")):
        left, right = getattr(a, key), getattr(b, key)
        if left != right:
            message = f"{cause} {left:g} in the rollout, {right:g} in training: one renormalises over fewer tokens"
            found.append(finding(cause, message, rollout=left, train=right))
    if a.filters and a == b and pair.rollout.kept is not None and pair.train.kept is None:
        message = "both sides filter, but only the rollout recorded the kept sets; recomputed sets differ at their edge"
        found.append(finding("top-p", message, "warning"))
    return found


def _vocabulary(pair: Pair) -> list[Finding]:
    widths = [_width(side) for side in (pair.rollout, pair.train)]
    if None in widths or widths[0] == widths[1]:
        return []
    message = f"the rollout sums over {widths[0]} vocabulary entries, the train side over {widths[1]}"
    return [finding("padded-vocabulary", message, rollout=widths[0], train=widths[1])]


def _width(capsule: Capsule) -> int | None:
    model = capsule.manifest.model
    return model.padded_vocab_size or model.vocab_size


def _settings(capsule: Capsule, values: str) -> str:
    sampling = capsule.manifest.sampling
    if values == "raw" or (sampling.temperature == 1 and not sampling.filters):
        return ""
    return f" at temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, top-k {sampling.top_k}"
