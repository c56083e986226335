"""Metrics files of TRL, verl, slime, miles, prime-rl, NeMo RL and rlkernel, read under the names that these write.

A file holds one comparison a step, made by the framework itself. Values keep the definitions of the framework: verl's
differences are of probabilities, slime's of log-probabilities; each maps to the statistic of the same definition.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlkernel_drift.errors import DriftError

MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class Name:
    """A metric as a framework writes it.

    Attributes:
        framework: who writes it. statistic: its name in `profiles.LABELS`.
        names: in its files; "train/" or the like may stand before them.
        label: on its console, where it has another name there.
    """

    framework: str
    statistic: str
    names: tuple[str, ...]
    label: str = ""


NAMES = (
    Name("rlkernel", "tokens.equal", ("exact_frac",)),
    Name("rlkernel", "tokens.maximum", ("max_abs_diff",)),
    Name("TRL", "tokens.mean", ("sampling/sampling_logp_difference/mean",)),
    Name("TRL", "tokens.maximum", ("sampling/sampling_logp_difference/max",)),
    Name("TRL", "tokens.ratio_mean", ("sampling/importance_sampling_ratio/mean",)),
    Name("verl", "tokens.probability_mean", ("training/rollout_probs_diff_mean",)),
    Name("verl", "tokens.probability_max", ("training/rollout_probs_diff_max",)),
    Name("verl", "tokens.pearson_probability", ("training/rollout_actor_probs_pearson_corr",)),
    Name("verl", "tokens.k3", ("rollout_corr/k3_kl", "mismatch/k3_kl", "mismatch/mismatch_k3_kl")),
    Name("verl", "tokens.k1", ("rollout_corr/kl", "mismatch/kl", "mismatch/mismatch_kl")),
    Name(
        "verl",
        "tokens.chi_square",
        ("rollout_corr/chi2_token", "mismatch/chi2_token", "mismatch/mismatch_chi2_token"),
    ),
    Name("slime", "tokens.mean", ("train_rollout_logprob_abs_diff",)),
    Name("prime-rl", "tokens.k3", ("mismatch_kl/all/mean", "mismatch_kl/mean"), "Mismatch KL"),
    Name("NeMo RL", "tokens.multiplicative", ("token_mult_prob_error",)),
    Name("NeMo RL", "tokens.k3", ("gen_kl_error",), "Generation KL Error"),
    Name("AReaL", "tokens.k3", ("rollout_train_k3_kl",)),
    Name("open-instruct", "tokens.mean", ("vllm_vs_local_logprob_diff_mean",)),
    Name("open-instruct", "tokens.maximum", ("vllm_vs_local_logprob_diff_max",)),
    Name("torchtitan", "tokens.mean", ("bit_wise/logprob_diff/mean",)),
    Name("torchtitan", "tokens.maximum", ("bit_wise/logprob_diff/max",)),
)
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)"
_LABELS = {name.label: name.names[0] for name in NAMES if name.label}
_NOTHING_COMPARED = "rollout_probs_diff_valid"
_STEP = re.compile(r"(^|/)(global_step|step|_step)$")
_VERSION = re.compile(r"(^|/)(weights?_version|policy_version|param_version)$")
# `name:1.5`, `'name': 1.5`, `'name': '1.5'` and `name:np.float64(1.5)`: what verl, slime and TRL print.
_CONSOLE = re.compile(
    rf"(?:^|[\s{{,])['\"]?([\w./\-@:]*\w)['\"]?:\s?(?:(?:np\.|numpy\.)?[a-z]\w*\()?['\"]?({_NUMBER})(?=[\s,)}}'\"]|$)"
)
# prime-rl and NeMo RL print labels. A micro step's line is of one micro batch, and the step's own line follows.
_LABEL = re.compile(rf"\b({'|'.join(_LABELS)}):?\s+({_NUMBER})(?=\s|$)")
_BANNER = re.compile(r"(?<!Micro )\b[Ss]tep (\d+)(?: ?\||/\d|: ?\{)|\btrain (\d+): ?\{")
_MICRO = re.compile(r"\bMicro Step \d+/")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Metrics:
    """Comparisons of a run, a row a step.

    Attributes:
        path: the file; frameworks: whose names were found.
        steps: numbers of the steps.
        values: statistic -> a value a step, None where there is none.
        names: statistic -> the name it had in the file.
        versions: version of the weights a step, where there is one.
        broken: statistic -> steps at which it was NaN or infinite.
        compared: rows with at least one value, those apart that say that nothing was compared.
    """

    path: Path
    frameworks: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    values: dict[str, list[float | None]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    versions: list[int | str | None] = field(default_factory=list)
    broken: dict[str, list[int]] = field(default_factory=dict)
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
                result[name] = math.fsum(value / len(known) for value in known)
        return result


def read_metrics(path: Path) -> Metrics:
    """Reads .jsonl, .json (TRL's trainer_state.json, or a list), .csv, or a console log.

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
        raise DriftError(f"{path} holds no metric of drift that is known ({known_names()})")
    return metrics


def known_names() -> str:
    """The names that are read, by framework."""
    found: dict[str, list[str]] = {}
    for name in NAMES:
        found.setdefault(name.framework, []).append(name.names[0])
    return "; ".join(f"{framework}: {', '.join(names)}" for framework, names in found.items())


def collect(path: Path, rows: list[dict[str, Any]]) -> Metrics:
    """Sorts flat rows into columns by statistic."""
    metrics = Metrics(path)
    matched = {key: name for key in {key for row in rows for key in row} if (name := _match(key)) is not None}
    for row in rows:
        found = {
            matched[key].statistic: (key, number)
            for key, value in row.items()
            if key in matched and (number := _number(value)) is not None
        }
        if not found:
            continue
        nothing = any(key.endswith(_NOTHING_COMPARED) and _number(value) == 0 for key, value in row.items())
        step = _first(row, _STEP, _whole)
        metrics.steps.append(len(metrics.steps) if step is None else step)
        metrics.versions.append(_first(row, _VERSION, _version))
        for statistic, (key, value) in found.items():
            column = metrics.values.setdefault(statistic, [])
            column += [None] * (len(metrics.steps) - 1 - len(column))
            column.append(value if math.isfinite(value) and not nothing else None)
            metrics.names[statistic] = key
            if not math.isfinite(value) and not nothing:
                metrics.broken.setdefault(statistic, []).append(metrics.steps[-1])
            if matched[key].framework not in metrics.frameworks:
                metrics.frameworks.append(matched[key].framework)
        metrics.compared += not nothing and any(math.isfinite(value) for _, value in found.values())
    for column in metrics.values.values():
        column += [None] * (len(metrics.steps) - len(column))
    return metrics


def _match(key: str) -> Name | None:
    return next((name for name in NAMES if any(f"/{key}".endswith(f"/{own}") for own in name.names)), None)


def _first(row: dict[str, Any], pattern: re.Pattern[str], convert: Callable[[Any], Any]) -> Any:
    """The first value under a name that can be converted, None without one."""
    found = (convert(value) for key, value in row.items() if pattern.search(key))
    return next((value for value in found if value is not None), None)


def _number(value: Any) -> float | None:
    """A number, or a number in a string, as transformers prints its logs; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None
    except OverflowError:
        return math.inf


def _whole(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and math.isfinite(number) else None


def _version(value: Any) -> int | str | None:
    number = _number(value)
    if number is not None and number.is_integer():
        return int(number)
    return str(value) if isinstance(value, (str, float)) and value == value else None


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
            reader = csv.DictReader(file)
            rows = []
            for row in reader:
                if None in row:
                    raise ValueError(f"line {reader.line_num} has more fields than the header")
                rows.append(row)
            return rows
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        value = json.loads(text)
        if isinstance(value, dict) and isinstance(value.get("log_history"), list):
            return list(value["log_history"])
        return value if isinstance(value, list) else [value]
    lines = [line for line in text.splitlines() if line.strip()]
    return [json.loads(line) for line in lines] if path.suffix == ".jsonl" else _console(lines)


def _console(lines: list[str]) -> list[Any]:
    """Rows of a console log: JSON objects, printed dicts, `name:value` pairs and the labels of prime-rl and NeMo RL."""
    rows: list[Any] = []
    step = None
    for line in lines:
        line = _COLOUR.sub("", line)
        if line.startswith("{"):
            try:
                rows.append(json.loads(line))
                continue
            except ValueError:
                pass  # Python's notation, or a line that was cut
        banner = _BANNER.search(line)
        if banner is not None:
            step = int(banner[1] or banner[2])
        row: dict[str, Any] = dict(_CONSOLE.findall(line))
        if not _MICRO.search(line):
            row |= {_LABELS[label]: value for label, value in _LABEL.findall(line)}
        # A dict names its step in front of it; a pair of that name in the line itself comes first.
        if step is not None and row:
            row.setdefault("step", step)
        rows.append(row)
    return rows
