"""Gate 2: did the same weights compute both sides? Names tensors that differ, and trained ones that did not change."""

from __future__ import annotations

from typing import Any

from rlkernel_drift.capsule import WeightFingerprint, Weights
from rlkernel_drift.gates import first_few, gate, skipped
from rlkernel_drift.knowledge import finding
from rlkernel_drift.pair import Pair
from rlkernel_drift.verdict import Finding, Gate

_STALE_SHARE = 0.95
_COMMON_SHARE = 0.5  # equal tensors are evidence if at least this share of all names is on both sides


def weights_gate(pair: Pair) -> Gate:
    """Compares the fingerprints of all common tensors, in the coarser of their dtypes.

    Versions decide only if no tensor can be compared, because equal bits under two version numbers are equal weights.
    """
    rollout, train = pair.rollout.manifest.weights, pair.train.manifest.weights
    findings: list[Finding] = []
    if train is not None:
        findings += _unchanged(train)
    findings += _adapters(rollout, train)
    if rollout is None or train is None or not rollout.tensors or not train.tensors:
        findings += _versions(rollout, train)
        return gate("weights", findings, "") if findings else skipped("weights", "no weight fingerprints on both sides")
    common = sorted(set(rollout.tensors) & set(train.tensors))
    every = set(rollout.tensors) | set(train.tensors)
    if not common:
        findings += _versions(rollout, train)
    differ = [name for name in common if not same_weight(rollout.tensors[name], train.tensors[name])]
    if differ:
        findings.append(_describe(rollout, train, common, differ))
    missing = sorted(every - set(common) - {"lm_head.weight"})
    if len(common) < _COMMON_SHARE * len(every) and not findings:
        words = f"only {len(common)} of {len(every)} tensors have a name on both sides; unmatched: {first_few(missing)}"
        return skipped("weights", words)
    if missing and not differ:
        message = f"{len(missing)} tensors are on one side only: {first_few(missing)}"
        findings.append(finding("weights-differ", message, "warning", tensors=list(missing[:50])))
    return gate("weights", findings, f"{len(common)} tensors are equal, by name and by bits")


def same_weight(a: WeightFingerprint, b: WeightFingerprint) -> bool:
    """Whether two tensors hold the same values, in the coarser dtype if their dtypes differ."""
    if a.shape != b.shape:
        return False
    return a.digest == b.digest if a.dtype == b.dtype else a.bf16 is not None and a.bf16 == b.bf16


def _digests(fingerprint: WeightFingerprint) -> set[str]:
    return {fingerprint.digest, *([fingerprint.bf16] if fingerprint.bf16 else [])}


def _describe(rollout: Weights, train: Weights, common: list[str], differ: list[str]) -> Finding:
    evidence: dict[str, Any] = {"differ": len(differ), "of": len(common), "tensors": list(differ[:50])}
    old = [name for name in differ if train.previous.get(name) in _digests(rollout.tensors[name])]
    versions = ""
    if rollout.version is not None and train.version is not None and rollout.version != train.version:
        versions = f" (version {rollout.version} against {train.version})"
    if old and len(old) == len(differ):
        moved = [name for name in common if train.previous.get(name) not in (None, *_digests(train.tensors[name]))]
        stale = len(differ) >= _STALE_SHARE * max(1, len(moved))
        what = "all weights are of" if stale else f"{len(differ)} of {len(common)} tensors are of"
        cause = "stale-weights" if stale else "partial-sync"
        return finding(cause, f"{what} the previous version{versions}: {first_few(differ)}", **evidence)
    swapped = _swapped(rollout, train, differ)
    if swapped:
        message = f"{swapped[0]} and {swapped[1]} hold each other's values"
        return finding("swapped-weights", message, **evidence)
    names = ("lm_head.weight", "model.embed_tokens.weight")
    head, embedding = (rollout.tensors.get(name) for name in names)
    if "lm_head.weight" in differ and set(differ) <= set(names) and head and embedding and same_weight(head, embedding):
        message = "the rollout's head is its embedding, the train side's is not"
        return finding("tied-embedding", message, **evidence)
    cause = "weights-differ" if len(differ) >= _STALE_SHARE * len(common) else "partial-sync"
    message = f"{len(differ)} of {len(common)} tensors differ{versions}: {first_few(differ)}"
    return finding(cause, message, **evidence)


def _swapped(rollout: Weights, train: Weights, differ: list[str]) -> tuple[str, str] | None:
    by_digest = {rollout.tensors[name].digest: name for name in differ}
    for name in differ:
        other = by_digest.get(train.tensors[name].digest)
        if other and other != name and rollout.tensors[name].digest == train.tensors[other].digest:
            return name, other
    return None


def _versions(rollout: Weights | None, train: Weights | None) -> list[Finding]:
    left, right = (None if side is None else side.version for side in (rollout, train))
    if left is None or right is None or left == right:
        return []
    message = f"version {left} computed the rollout, version {right} the train side"
    return [finding("stale-weights", message, rollout=left, train=right)]


def _adapters(rollout: Weights | None, train: Weights | None) -> list[Finding]:
    left, right = (None if side is None else side.adapter for side in (rollout, train))
    if left == right:
        return []
    words = [(side and side.adapter) or ("none" if side else "unknown") for side in (rollout, train)]
    message = f"adapter of the rollout: {words[0]}; of the train side: {words[1]}"
    # A side that declares nothing about its weights may have the adapter too.
    unknown = rollout is None or train is None
    return [finding("lora-missing", message, "warning" if unknown else "error", rollout=left, train=right)]


def _unchanged(weights: Weights) -> list[Finding]:
    """Tensors that equal the previous version although the optimizer stepped."""
    known = [name for name in weights.tensors if name in weights.previous]
    still = [name for name in known if weights.previous[name] in _digests(weights.tensors[name])]
    if not still:
        return []
    message = f"{len(still)} of {len(known)} tensors did not change while the others did: {first_few(still)}"
    if len(still) == len(known):
        message = f"no tensor moved: all {len(known)} are equal to the previous version"
    return [finding("unchanged-though-trained", message, "warning", tensors=list(still[:50]))]
