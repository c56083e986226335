"""Metrics files of TRL, verl, slime, miles, prime-rl, NeMo RL and others, under the names that they log.

A file holds the framework's own comparison at each step. Each name maps to the statistic of the same definition: verl's
differences are of probabilities, slime's of log-probabilities.
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

from rlkernel_drift.capsule.tensor_file import unique_keys
from rlkernel_drift.errors import DriftError

MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class Name:
    """A metric of a framework.

    Attributes:
        framework: the framework that logs it.
        statistic: its name in `profiles.LABELS`.
        names: its names in files, where a prefix such as "train/" may precede them.
        label: its name on the console, where it differs.
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
# verl, slime and TRL print `name:1.5`, `'name': 1.5`, `'name': '1.5'` and `name:np.float64(1.5)`
_CONSOLE = re.compile(
    rf"(?:^|[\s{{,])['\"]?([\w./\-@:]*\w)['\"]?:\s?(?:(?:np\.|numpy\.)?[a-z]\w*\()?['\"]?({_NUMBER})(?=[\s,)}}'\"]|$)"
)
# prime-rl and NeMo RL print labels; lines of micro steps are ignored, because the line of the step follows
_LABEL = re.compile(rf"\b({'|'.join(_LABELS)}):?\s+({_NUMBER})(?=\s|$)")
_BANNER = re.compile(r"(?<!Micro )\b[Ss]tep (\d+)(?: ?\||/\d|: ?\{)|\btrain (\d+): ?\{")
_MICRO = re.compile(r"\bMicro Step \d+/")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Metrics:
    """Comparisons of a run, one row per step. Two names of one statistic are two columns, so neither hides the other.

    Attributes:
        path: the file.
        frameworks: frameworks whose names were found.
        steps: numbers of the steps.
        columns: name in the file -> value at each step, or None.
        statistics: name in the file -> statistic.
        versions: version of the weights at each step, or None.
        broken: name -> steps at which it was NaN or infinite.
        missing: name -> steps at which it was null.
        compared: rows with at least one value, except those that report an empty comparison.
        cut: place of the last line, if the writer was stopped inside it.
    """

    path: Path
    frameworks: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    columns: dict[str, list[float | None]] = field(default_factory=dict)
    statistics: dict[str, str] = field(default_factory=dict)
    versions: list[int | str | None] = field(default_factory=list)
    broken: dict[str, list[int]] = field(default_factory=dict)
    missing: dict[str, list[int]] = field(default_factory=dict)
    compared: int = 0
    cut: str = ""

    def names_of(self, statistic: str) -> list[str]:
        """Names of a statistic in the file."""
        return [name for name in self.columns if self.statistics[name] == statistic]

    @property
    def values(self) -> dict[str, list[float | None]]:
        """Statistic -> the column of its first name."""
        return {name: self.columns[self.names_of(name)[0]] for name in dict.fromkeys(self.statistics.values())}

    def summary(self) -> dict[str, float | None]:
        """Mean over the steps of each statistic's first name; for maxima and equal bits, the worst of all names."""
        result: dict[str, float | None] = {}
        for statistic, first in self.values.items():
            known = [value for value in first if value is not None]
            everywhere = [v for name in self.names_of(statistic) for v in self.columns[name] if v is not None]
            if not everywhere:
                result[statistic] = None
            elif statistic in ("tokens.maximum", "tokens.probability_max"):
                result[statistic] = max(everywhere)
            elif statistic == "tokens.equal":
                result[statistic] = min(everywhere)
            else:
                shown = known or everywhere
                result[statistic] = math.fsum(value / len(shown) for value in shown)
        return result


def read_metrics(path: Path) -> Metrics:
    """Reads .jsonl, .json (TRL's trainer_state.json, or a list), .csv, or a console log.

    Raises:
        DriftError: unreadable, too large, or without a known metric.
    """
    if path.stat().st_size > MAX_BYTES:
        raise DriftError(f"{path} has {path.stat().st_size} bytes; at most {MAX_BYTES} are read")
    try:
        rows, cut = _rows(path)
        flat = [(place, flatten(row)) for place, row in rows]
    except (OSError, UnicodeDecodeError, ValueError, RecursionError, csv.Error) as error:
        raise DriftError(f"{path} cannot be read as metrics: {error}") from None
    if not flat:
        raise DriftError(f"{path} is empty; expected a framework's metrics, or one line per sequence")
    metrics = collect(path, flat)
    metrics.cut = cut
    if not metrics.columns:
        raise DriftError(
            f"{path} has neither lines of token_ids and logprobs nor a known metric of drift ({known_names()})"
        )
    return metrics


def known_names() -> str:
    """The known names, by framework."""
    found: dict[str, list[str]] = {}
    for name in NAMES:
        found.setdefault(name.framework, []).append(name.names[0])
    return "; ".join(f"{framework}: {', '.join(names)}" for framework, names in found.items())


_SETTINGS = {
    "verl": "rollout_corr/k3_kl needs actor_rollout_ref.rollout.calculate_log_probs=True and "
    "algorithm.rollout_correction",
    "TRL": "sampling/sampling_logp_difference needs use_vllm=True and vllm_importance_sampling_correction=True",
    "slime": "train_rollout_logprob_abs_diff needs the rollout's log-probabilities; see --get-mismatch-metrics",
    "rlkernel": "name the run folder, or --profile bitwise: metrics.jsonl counts equal bits",
}


def how_to_log(frameworks: list[str]) -> str:
    """Settings that make frameworks log the metrics of profiles; "" if none is known."""
    known = [f"{name}: {_SETTINGS[name]}" for name in frameworks if name in _SETTINGS]
    return "; ".join(known)


def collect(path: Path, rows: list[tuple[str, dict[str, Any]]]) -> Metrics:
    """Sorts flat rows, each with its place in the file, into columns.

    Raises:
        DriftError: a value under a known name is not a number, or outside the range of its statistic.
    """
    metrics = Metrics(path)
    matched = {key: name for key in {key for _, row in rows for key in row} if (name := _match(key)) is not None}
    null: list[tuple[str, int]] = []
    for place, row in rows:
        values = {key: _value(value, key, f"{path}, {place}") for key, value in row.items() if key in matched}
        if not values:
            continue
        nothing = any(key.endswith(_NOTHING_COMPARED) and _number(value) == 0 for key, value in row.items())
        found = _first(row, _STEP, _whole)
        step = len(metrics.steps) if found is None else found
        metrics.steps.append(step)
        metrics.versions.append(_first(row, _VERSION, _version))
        for key, value in values.items():
            column = metrics.columns.setdefault(key, [])
            column += [None] * (len(metrics.steps) - 1 - len(column))
            column.append(value if value is not None and math.isfinite(value) and not nothing else None)
            metrics.statistics[key] = matched[key].statistic
            if value is None:
                null.append((key, step))
            elif not nothing:
                _possible(value, matched[key].statistic, f"{path}, {place}: {key}")
                if not math.isfinite(value):
                    metrics.broken.setdefault(key, []).append(step)
            if matched[key].framework not in metrics.frameworks:
                metrics.frameworks.append(matched[key].framework)
        if not nothing:
            _consistent({matched[k].statistic: v for k, v in values.items()}, f"{path}, {place}")
        metrics.compared += not nothing and any(v is not None and math.isfinite(v) for v in values.values())
    for column in metrics.columns.values():
        column += [None] * (len(metrics.steps) - len(column))
    there = {
        key: {step for step, value in zip(metrics.steps, column, strict=True) if value is not None}
        for key, column in metrics.columns.items()
    }
    for key, step in null:
        # another row of the same step may have it
        if step not in there[key] and step not in metrics.broken.get(key, []):
            metrics.missing.setdefault(key, []).append(step)
    return metrics


# range of each statistic by its definition; a value further outside than rounding is another quantity
_ROUNDING = 1e-5
_RANGES = {
    "tokens.mean": (0.0, math.inf),
    "tokens.maximum": (0.0, math.inf),
    "tokens.k3": (0.0, math.inf),
    "tokens.probability_mean": (0.0, 1.0),
    "tokens.probability_max": (0.0, 1.0),
    "tokens.pearson_probability": (-1.0, 1.0),
    "tokens.multiplicative": (1.0, math.inf),
    "tokens.ratio_mean": (0.0, math.inf),
    "tokens.equal": (0.0, 1.0),
}


def _possible(value: float, statistic: str, where: str) -> None:
    low, high = _RANGES.get(statistic, (-math.inf, math.inf))
    if math.isfinite(value) and not low - _ROUNDING <= value <= high + _ROUNDING:
        bound = f"below {low:g}" if value < low else f"above {high:g}"
        raise DriftError(f"{where} is {value:g}; it cannot be {bound}, so it is not a {statistic.split('.')[1]}")


def _consistent(values: dict[str, float | None], where: str) -> None:
    equal, largest = values.get("tokens.equal"), values.get("tokens.maximum")
    if equal == 1 and largest is not None and largest > 0:
        raise DriftError(f"{where}: all bits are equal and the largest difference is {largest:g}; one is wrong")


def _value(value: Any, key: str, where: str) -> float | None:
    """The number under a known name; None for null and empty fields.

    Raises:
        DriftError: the value is something else.
    """
    if value is None or (isinstance(value, str) and value.strip().lower() in ("", "null", "none")):
        return None
    number = _number(value)
    if number is None:
        raise DriftError(f"{where}: {key} is {str(value)[:80]!r}; expected a number")
    return number


def _match(key: str) -> Name | None:
    return next((name for name in NAMES if any(f"/{key}".endswith(f"/{own}") for own in name.names)), None)


def _first(row: dict[str, Any], pattern: re.Pattern[str], convert: Callable[[Any], Any]) -> Any:
    """The first value under a matching name that can be converted; None without one."""
    found = (convert(value) for key, value in row.items() if pattern.search(key))
    return next((value for value in found if value is not None), None)


def _number(value: Any) -> float | None:
    """A number, also one in a string, as in transformers' logs; None for anything else."""
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
    """A nested object as a flat one, with keys joined by "/"."""
    if not isinstance(row, dict):
        return {}
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}/")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _rows(path: Path) -> tuple[list[tuple[str, Any]], str]:
    """Rows with their places in the file, and the place of a last line that is cut off."""
    if path.suffix == ".csv":
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or []
            unique_keys([(name, None) for name in names if name])
            rows: list[tuple[str, Any]] = []
            for row in reader:
                if None in row:
                    raise ValueError(f"line {reader.line_num} has more fields than the header")
                rows.append((f"line {reader.line_num}", row))
            return rows, ""
    if path.suffix == ".jsonl":
        return json_lines(path)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        value = json.loads(text, object_pairs_hook=unique_keys)
        if isinstance(value, dict) and isinstance(value.get("log_history"), list):
            value = value["log_history"]
        entries = value if isinstance(value, list) else [value]
        return [(f"entry {i}", entry) for i, entry in enumerate(entries, 1)], ""
    return _console(text), ""


def json_lines(path: Path) -> tuple[list[tuple[str, Any]], str]:
    """Values of a file of JSON lines with their places, and the place of a last line that is cut off.

    Raises:
        ValueError: another line is not JSON; the message names it.
    """
    with open(path, encoding="utf-8-sig", newline="\n") as file:
        lines = file.readlines()
    rows: list[tuple[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append((f"line {number}", json.loads(line, object_pairs_hook=unique_keys)))
        except ValueError as error:
            # a run that is killed while it writes leaves its last line incomplete
            if number == len(lines) and rows and not line.endswith("\n"):
                return rows, f"line {number}"
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise ValueError(f"line {number} is not JSON: {reason}") from None
    return rows, ""


def _console(text: str) -> list[tuple[str, Any]]:
    """Rows of a console log: JSON objects, printed dicts, `name:value` pairs and the labels of prime-rl and NeMo RL."""
    rows: list[tuple[str, Any]] = []
    step = None
    for number, line in enumerate(text.splitlines(), 1):
        place, line = f"line {number}", _COLOUR.sub("", line)
        if line.startswith("{"):
            try:
                rows.append((place, json.loads(line)))
                continue
            except ValueError:
                pass  # a printed dict, or a line that is cut off
        banner = _BANNER.search(line)
        if banner is not None:
            step = int(banner[1] or banner[2])
        row: dict[str, Any] = dict(_CONSOLE.findall(line))
        if not _MICRO.search(line):
            row |= {_LABELS[label]: value for label, value in _LABEL.findall(line)}
        # the banner before a printed dict names the step, unless the line itself does
        if step is not None and row:
            row.setdefault("step", step)
        rows.append((place, row))
    return rows
