"""Metrics files of TRL, verl, slime, miles, prime-rl, NeMo RL and rlkernel, read under the names that these write.

A file holds one comparison a step, made by the framework itself. Values keep the definitions of the framework: verl's
differences are of probabilities, slime's of log-probabilities; each maps to the statistic of the same definition.
"""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlkernel_drift.errors import DriftError

MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class Name:
    """A metric as a framework writes it.

    Attributes:
        framework: who writes it; pattern: of its name, without a leading "train/" or the like.
        statistic: name in `profiles.LABELS`, or None where it only says whether there was something to compare.
    """

    framework: str
    pattern: str
    statistic: str


NAMES = (
    Name("rlkernel", r"exact_frac", "tokens.equal"),
    Name("rlkernel", r"max_abs_diff", "tokens.maximum"),
    Name("TRL", r"sampling/sampling_logp_difference/mean", "tokens.mean"),
    Name("TRL", r"sampling/sampling_logp_difference/max", "tokens.maximum"),
    Name("TRL", r"sampling/importance_sampling_ratio/mean", "tokens.ratio_mean"),
    Name("verl", r"training/rollout_probs_diff_mean", "tokens.probability_mean"),
    Name("verl", r"training/rollout_probs_diff_max", "tokens.probability_max"),
    Name("verl", r"training/rollout_actor_probs_pearson_corr", "tokens.pearson_probability"),
    Name("verl", r"(rollout_corr|mismatch)/(mismatch_)?k3_kl", "tokens.k3"),
    Name("verl", r"(rollout_corr|mismatch)/(mismatch_)?kl", "tokens.k1"),
    Name("verl", r"(rollout_corr|mismatch)/(mismatch_)?chi2_token", "tokens.chi_square"),
    Name("slime", r"train_rollout_logprob_abs_diff", "tokens.mean"),
    Name("prime-rl", r"mismatch_kl/(all/)?mean", "tokens.k3"),
    Name("NeMo RL", r"token_mult_prob_error", "tokens.multiplicative"),
    Name("NeMo RL", r"gen_kl_error", "tokens.k3"),
    Name("AReaL", r"rollout_train_k3_kl", "tokens.k3"),
    Name("open-instruct", r"(debug/)?vllm_vs_local_logprob_diff_mean", "tokens.mean"),
    Name("open-instruct", r"(debug/)?vllm_vs_local_logprob_diff_max", "tokens.maximum"),
    Name("torchtitan", r"bit_wise/logprob_diff/mean", "tokens.mean"),
    Name("torchtitan", r"bit_wise/logprob_diff/max", "tokens.maximum"),
)
_NOTHING_COMPARED = re.compile(r"(^|/)rollout_probs_diff_valid$")
_STEP = re.compile(r"(^|/)(global_step|step|_step)$")
_VERSION = re.compile(r"(^|/)(weights?_version|policy_version|param_version)$")
_CONSOLE = re.compile(r"(?:^|\s)([\w./\-@:]*[\w]):\s?(-?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))(?=\s|$)")


@dataclass
class Metrics:
    """Comparisons of a run, a row a step.

    Attributes:
        path: the file; frameworks: whose names were found.
        steps: numbers of the steps.
        values: statistic -> a value a step, None where there is none.
        names: statistic -> the name it had in the file.
        versions: version of the weights a step, where there is one.
        compared: rows with at least one value, those apart that say that nothing was compared.
    """

    path: Path
    frameworks: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    values: dict[str, list[float | None]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    versions: list[int | str | None] = field(default_factory=list)
    compared: int = 0

    def summary(self) -> dict[str, float | None]:
        """Mean over the steps of each statistic; the extreme of those that are extremes themselves."""
        result: dict[str, float | None] = {}
        for name, column in self.values.items():
            known = [value for value in column if value is not None]
            if not known:
                result[name] = None
            elif name in ("tokens.maximum", "tokens.probability_max"):
                result[name] = max(known)
            elif name == "tokens.equal":
                result[name] = min(known)
            else:
                result[name] = math.fsum(known) / len(known)
        return result


def read_metrics(path: Path) -> Metrics:
    """Reads .jsonl, .json (TRL's trainer_state.json, or a list), .csv, or a console log with `name:value` pairs.

    Raises:
        DriftError: unreadable, too large, or without any metric that is known.
    """
    if path.stat().st_size > MAX_BYTES:
        raise DriftError(f"{path} has {path.stat().st_size} bytes; at most {MAX_BYTES} are read")
    try:
        rows = [flatten(row) for row in _rows(path)]
    except (OSError, UnicodeDecodeError, ValueError, RecursionError, csv.Error) as error:
        raise DriftError(f"{path} cannot be read as metrics: {error}") from None
    metrics = collect(path, rows)
    if not metrics.values:
        known = "; ".join(sorted({f"{name.framework}: {name.pattern}" for name in NAMES}))
        raise DriftError(f"{path} holds no metric of drift that is known ({known})")
    return metrics


def collect(path: Path, rows: list[dict[str, Any]]) -> Metrics:
    """Sorts flat rows into columns by statistic."""
    metrics = Metrics(path)
    matched = {key: name for row in rows for key in row if (name := _match(key)) is not None}
    for number, row in enumerate(rows):
        found = {
            matched[key].statistic: (key, float(value))
            for key, value in row.items()
            if key in matched and isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        if not found:
            continue
        nothing = any(_NOTHING_COMPARED.search(key) and value == 0 for key, value in row.items())
        metrics.steps.append(_first(row, _STEP, number, int))
        metrics.versions.append(_first(row, _VERSION, None, lambda v: v))
        for statistic, (key, value) in found.items():
            column = metrics.values.setdefault(statistic, [])
            column += [None] * (len(metrics.steps) - 1 - len(column))
            column.append(value if math.isfinite(value) and not nothing else None)
            metrics.names[statistic] = key
            if matched[key].framework not in metrics.frameworks:
                metrics.frameworks.append(matched[key].framework)
        metrics.compared += not nothing and any(math.isfinite(value) for _, value in found.values())
    for column in metrics.values.values():
        column += [None] * (len(metrics.steps) - len(column))
    return metrics


def _match(key: str) -> Name | None:
    return next((name for name in NAMES if re.search(rf"(^|/){name.pattern}$", key)), None)


def _first(row: dict[str, Any], pattern: re.Pattern[str], default: Any, convert: Any) -> Any:
    for key, value in row.items():
        if pattern.search(key) and isinstance(value, (int, float, str)) and value == value:
            return convert(value)
    return default


def flatten(row: Any, prefix: str = "") -> dict[str, Any]:
    """Nested objects as one, keys joined by "/"."""
    if not isinstance(row, dict):
        return {}
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}/")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _rows(path: Path) -> list[Any]:
    if path.suffix == ".csv":
        with open(path, encoding="utf-8", newline="") as file:
            return [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(file)]
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        value = json.loads(text)
        if isinstance(value, dict) and isinstance(value.get("log_history"), list):
            return list(value["log_history"])
        return value if isinstance(value, list) else [value]
    lines = [line for line in text.splitlines() if line.strip()]
    if path.suffix == ".jsonl" or (lines and lines[0].lstrip().startswith("{")):
        return [json.loads(line) for line in lines]
    return [dict((name, float(value)) for name, value in _CONSOLE.findall(line)) for line in lines]


def _number(text: str | None) -> Any:
    try:
        return float(text) if text else None
    except ValueError:
        return text
