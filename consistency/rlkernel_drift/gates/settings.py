"""Gates 4 and 5: what both sides declare, about their log-probabilities and about their configuration.

Gate 4: do the numbers mean the same? Temperature, raw or processed, kept tokens, padded vocabulary. Gate 5: which
settings differ? Differences do not fail, they are the first suspects of what the next gates find.
"""

from __future__ import annotations

from rlkernel_drift.capsule import Capsule, dtype_name
from rlkernel_drift.gates.common import gate, skipped, some
from rlkernel_drift.knowledge import finding
from rlkernel_drift.pair import Pair
from rlkernel_drift.verdict import Difference, Finding, Gate, Scalar


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


# Settings that change the bits of log-probabilities, and the cause that a difference points to.
NUMERICS = {
    "dtype": "body-dtype",
    "head_dtype": "head-dtype",
    "logits_dtype": "bf16-logits",
    "attention_backend": "configuration",
    "attention_variant": "configuration",
    "tensor_parallel": "configuration",
    "kv_cache_dtype": "body-dtype",
    "quantization": "quantised-weights",
    "rope_theta": "rope-base",
    "rope_scaling": "rope-scaling",
    "tie_word_embeddings": "tied-embedding",
    "lora_scale": "lora-scale",
    "batch_invariant": "configuration",
    "backend": "configuration",
}


def differences(pair: Pair) -> list[Difference]:
    """Every setting and version that differs, those that change numbers first."""
    a, b = pair.rollout.manifest, pair.train.manifest
    # One contract means one definition of every operator, whatever the backend is called.
    weights = {key: "numerics" for key in NUMERICS}
    if a.contract is not None and a.contract == b.contract:
        weights |= {"attention_backend": "other"}
    rows = [_row("contract", a.contract, b.contract, "numerics")] if a.contract != b.contract else []
    for key in sorted(set(a.config) | set(b.config)):
        left, right = (_setting(key, side.config.get(key)) for side in (a, b))
        if left != right:
            rows.append(_row(key, left, right, weights.get(key, "other")))
    for key in sorted(set(a.versions) | set(b.versions)):
        if a.versions.get(key) != b.versions.get(key):
            rows.append(_row(key, a.versions.get(key), b.versions.get(key), "version"))
    for key in sorted(set(a.hardware) | set(b.hardware)):
        if a.hardware.get(key) != b.hardware.get(key):
            rows.append(_row(key, a.hardware.get(key), b.hardware.get(key), "other"))
    order = {"numerics": 0, "version": 1, "other": 2}
    return sorted(rows, key=lambda row: order[row.weight])


def _setting(key: str, value: Scalar) -> Scalar:
    """A dtype by its one name; `auto` says no more of layers and head than a record that is missing."""
    if key not in ("dtype", "torch_dtype", "head_dtype", "logits_dtype"):
        return value
    return dtype_name(value) or (None if value == "auto" else value)


def _row(key: str, rollout: Scalar, train: Scalar, weight: str) -> Difference:
    return Difference(key=key, rollout=rollout, train=train, weight=weight)  # type: ignore[arg-type]


def configuration_gate(pair: Pair) -> Gate:
    """Warns of settings known on both sides that change numbers; the rest is a note."""
    if not pair.rollout.manifest.config and not pair.train.manifest.config:
        return skipped("configuration", "neither side recorded its configuration")
    findings = []
    rows = differences(pair)
    for row in rows:
        if row.weight == "numerics" and None not in (row.rollout, row.train):
            message = f"{row.key}: {row.rollout} in the rollout, {row.train} in training"
            cause = NUMERICS.get(row.key, "configuration")
            findings.append(finding(cause, message, "warning", rollout=row.rollout, train=row.train))
    rest = [row.key for row in rows if row.weight != "numerics"]
    words = f"no setting that changes numbers differs{f'; others do: {some(rest)}' if rest else ''}"
    return gate("configuration", findings, words)
