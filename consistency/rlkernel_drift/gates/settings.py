"""Gates 4 and 5: what both sides declare about the meaning of their log-probabilities and about their configuration.

Gate 4 fails on another temperature, raw against processed, kept tokens, padded vocabulary. Gate 5 only warns of other
settings that differ: they are the first suspects for what the later gates find.
"""

from __future__ import annotations

import re

from rlkernel_drift.capsule import Sampling, dtype_name
from rlkernel_drift.gates import first_few, gate, skipped
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
    findings: list[Finding] = []
    if left != right and not (_is_plain(a) and _is_plain(b)):
        settings = f"temperature {a.temperature:g}, top-p {a.top_p:g}, top-k {a.top_k}, min-p {a.min_p:g}"
        message = f"the rollout's log-probabilities are {left}, the train side's {right}, sampled with {settings}"
        findings.append(finding("logprobs-mode", message, rollout=left, train=right, temperature=a.temperature))
    elif left == "processed" or right == "processed":
        findings += _processed(pair)
    findings += _vocabulary(pair)
    words = f"both sides' log-probabilities are {left}"
    if left != "raw" and not _is_plain(a):
        words += f" at temperature {a.temperature:g}, top-p {a.top_p:g}, top-k {a.top_k}"
    return gate("semantics", findings, words)


def _is_plain(sampling: Sampling) -> bool:
    return sampling.temperature == 1 and not sampling.filters


def _processed(pair: Pair) -> list[Finding]:
    a, b = pair.rollout.manifest.sampling, pair.train.manifest.sampling
    found = []
    if a.temperature != b.temperature:
        message = f"temperature {a.temperature:g} in the rollout, {b.temperature:g} in training"
        found.append(finding("temperature", message, rollout=a.temperature, train=b.temperature))
    for key, cause in (("top_p", "top-p"), ("top_k", "top-k"), ("min_p", "min-p")):
        left, right = getattr(a, key), getattr(b, key)
        if left != right:
            message = f"{cause} {left:g} in the rollout, {right:g} in training: one side renormalises over fewer tokens"
            found.append(finding(cause, message, rollout=left, train=right))
    if a.filters and a == b and pair.rollout.kept is not None and pair.train.kept is None:
        message = "both sides filter, but only the rollout recorded its kept sets; recomputed sets differ at their edge"
        found.append(finding("top-p", message, "warning"))
    return found


def _vocabulary(pair: Pair) -> list[Finding]:
    models = (pair.rollout.manifest.model, pair.train.manifest.model)
    widths = [model.padded_vocab_size or model.vocab_size for model in models]
    if None in widths or widths[0] == widths[1]:
        return []
    message = f"the rollout sums over {widths[0]} vocabulary entries, the train side over {widths[1]}"
    return [finding("padded-vocabulary", message, rollout=widths[0], train=widths[1])]


# Settings that change the bits of log-probabilities, and the cause to which a difference points.
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
# Entries of config.json and generation_config.json that change numbers, by a part of their name.
_MODEL = {
    r"eps": "norm-epsilon",
    r"rope_theta|rotary_emb_base": "rope-base",
    r"rope|rotary": "rope-scaling",
    r"sliding_window$|layer_types|sliding_window_pattern": "attention-window",
    r"softcap": "soft-cap",
    r"hidden_act|activation_function|hidden_activation": "activation",
    r"^generation\.(temperature|top_.|min_p|.*penalty|no_repeat_ngram_size|bad_words|suppress)": "generation-config",
    r"multiplier|logits_scaling|pre_attn_scalar|_scale$|experts_per_tok|norm_topk|use_qk_norm|attention_bias|mlp_bias"
    r"|swiglu_limit|embedding_size|layer_norm|parallel_residual": "model-setting",
}
_ENOUGH = 3
"""Entries that a side must have recorded, so that a missing one counts as not set."""


def setting_cause(key: str) -> str | None:
    """The cause to which a difference in a setting points; None for settings that do not change numbers."""
    if key in NUMERICS:
        return NUMERICS[key]
    return next((cause for pattern, cause in _MODEL.items() if re.search(pattern, key)), None)


def differences(pair: Pair) -> list[Difference]:
    """Every setting and version that differs, those that change numbers first."""
    a, b = pair.rollout.manifest, pair.train.manifest
    # One contract defines every operator, whichever backend computes it.
    free = {"attention_backend"} if a.contract is not None and a.contract == b.contract else set()
    rows = []
    declared = [({"contract": side.contract, **side.config}, side.versions, side.hardware) for side in (a, b)]
    for part, (left, right) in zip(("config", "version", "other"), zip(*declared, strict=True), strict=True):
        for key in sorted({*left, *right}, key=lambda name: (name != "contract", name)):
            x, y = _setting(key, left.get(key)), _setting(key, right.get(key))
            if x != y:
                counts = key == "contract" or (setting_cause(key) is not None and key not in free)
                weight = part if part != "config" else "numerics" if counts else "other"
                rows.append(Difference(key=key, rollout=x, train=y, weight=weight))  # type: ignore[arg-type]
    order = {"numerics": 0, "version": 1, "other": 2}
    return sorted(rows, key=lambda row: order[row.weight])


def _setting(key: str, value: Scalar) -> Scalar:
    """A dtype by its canonical name; `auto` counts as not declared."""
    if key not in ("dtype", "torch_dtype", "head_dtype", "logits_dtype"):
        return value
    return dtype_name(value) or (None if value == "auto" else value)


def configuration_gate(pair: Pair) -> Gate:
    """Warns of settings that change numbers and are known on both sides; the summary lists the others."""
    if not pair.rollout.manifest.config and not pair.train.manifest.config:
        return skipped("configuration", "neither side recorded its configuration")
    findings = []
    rows = differences(pair)
    recorded = [sum(key not in NUMERICS and setting_cause(key) is not None for key in side.manifest.config)
                for side in (pair.rollout, pair.train)]  # fmt: skip
    for row in rows:
        cause = setting_cause(row.key) or "configuration"
        known = None not in (row.rollout, row.train)
        if row.weight == "numerics" and (known or (row.key not in NUMERICS and min(recorded) >= _ENOUGH)):
            shown = ["not set" if value is None else value for value in (row.rollout, row.train)]
            message = f"{row.key}: {shown[0]} in the rollout, {shown[1]} in training"
            findings.append(finding(cause, message, "warning", rollout=row.rollout, train=row.train))
    rest = [row.key for row in rows if row.weight != "numerics"]
    words = f"no setting that changes numbers differs{f'; others do: {first_few(rest)}' if rest else ''}"
    return gate("configuration", findings, words)
