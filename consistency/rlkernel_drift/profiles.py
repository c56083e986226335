"""Acceptance profiles: thresholds on statistics, and who published them.

A profile is a list of thresholds; `--profile FILE` reads one from TOML with the same fields.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlkernel_drift.capsule.manifest import Floor, Manifest
from rlkernel_drift.errors import DriftError
from rlkernel_drift.statistics import SequenceStatistics, TokenStatistics
from rlkernel_drift.verdict import Metric


def _titles(part: str, model: type[BaseModel]) -> dict[str, str]:
    return {f"{part}.{name}": field.title for name, field in model.model_fields.items() if field.title}


LABELS: dict[str, str] = {
    **_titles("tokens", TokenStatistics),
    "tokens.retention.strict": "tokens with ratio in [0.999, 1.002]",
    "tokens.retention.1%": "tokens with ratio within 1%",
    "tokens.retention.5%": "tokens with ratio within 5%",
    **_titles("sequences", SequenceStatistics),
    "sequences.retention.strict": "sequences with mean ratio in [0.999, 1.002]",
}
"""Every metric that a profile can judge, with its label."""

_TWO_SIDED = ("tokens.bias", "tokens.k1", "tokens.ratio_mean")


class Threshold(BaseModel):
    """An upper bound, a lower bound, or both, on a statistic of `LABELS`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    metric: str
    at_most: float | None = None
    at_least: float | None = None
    source: str = ""

    @model_validator(mode="after")
    def _bounded(self) -> Threshold:
        if self.at_most is None and self.at_least is None:
            raise ValueError("needs at_most or at_least")
        if self.at_most is not None and self.at_least is not None and self.at_least > self.at_most:
            raise ValueError(f"at_least {self.at_least:g} is above at_most {self.at_most:g}: no value lies between")
        if self.metric in _TWO_SIDED and None in (self.at_most, self.at_least):
            raise ValueError(
                f"{self.metric} can deviate to both sides: give at_most and at_least (sequences.bias is a magnitude)"
            )
        return self


class Profile(BaseModel):
    """A named set of thresholds; all of them must hold.

    Attributes:
        coverage: share of the larger side's sequences and counted tokens that must be compared.
        tokens: number of tokens that must be compared; with fewer, placeholders and chance look like agreement.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str
    title: str = ""
    source: str = ""
    bitwise: bool = False
    coverage: float = Field(default=0.5, ge=0, le=1)
    tokens: int = Field(default=8, ge=1)
    threshold: Annotated[list[Threshold], Field(min_length=1)]


BITWISE = Profile(
    name="bitwise",
    title="every log-probability has the same bits",
    source="rlkernel's contract; vLLM's batch-invariant mode and torchtitan's RL ask for the same",
    bitwise=True,
    threshold=[Threshold(metric="tokens.equal", at_least=1.0, source="docs/contract.md")],
)


def _published(name: str, title: str, source: str, metric: str, **limits: float) -> Profile:
    threshold = Threshold(metric=metric, source=source, at_most=limits.get("at_most"), at_least=limits.get("at_least"))
    return Profile(name=name, title=title, source=source, threshold=[threshold])


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        BITWISE,
        _published(
            "prime-rl",
            "prime-rl's bar for merging",
            "https://github.com/PrimeIntellect-ai/prime-rl/blob/main/docs/development.md",
            "tokens.k3",
            at_most=0.015,
        ),
        _published(
            "nemo",
            "NeMo RL's bar for new models",
            "https://docs.nvidia.com/nemo/rl/0.6.0/adding-new-models.html",
            "tokens.multiplicative",
            at_most=1.05,
        ),
        _published("miles", "miles' check in CI", "https://github.com/radixark/miles", "tokens.mean", at_most=0.03),
        _published(
            "mlperf",
            "mean ratio in the strict band [0.999, 1.002] that MaxText quotes for MLPerf",
            "https://github.com/AI-Hypercomputer/maxtext/pull/5231",
            "tokens.ratio_mean",
            at_least=0.999,
            at_most=1.002,
        ),
    )
}

_NO_OUTLIER = Threshold(metric="tokens.outliers", at_most=0, source="what rounding to bfloat16 can cause")

GENERAL = Profile(
    name="general",
    title="no noise floor known: the bars of miles and prime-rl, also for the bias and for the worst sequence",
    source="profiles miles and prime-rl",
    threshold=[
        *PROFILES["miles"].threshold,
        *PROFILES["prime-rl"].threshold,
        # E[d] is minus the KL that k3 estimates.
        Threshold(metric="sequences.bias", at_most=0.015, source="the bar on k3"),
        Threshold(metric="sequences.worst_mean", at_most=2.5 * 0.03, source="2.5 times the bar on the mean"),
        _NO_OUTLIER,
    ],
)

FLOOR_FACTOR = {"mean": 1.6, "p99": 2.5, "bias": 0.3, "worst_mean": 2.5}
"""Multiples of a measured noise floor within which healthy pairs lie; docs/drift/power.md measures how often."""
FLOOR_MIN = {"float32": 1e-5, "bfloat16": 1e-3, "float16": 2e-4}
"""Smallest mean |difference| in nats that counts as a difference between two engines of a dtype."""
_SMALLEST_BIAS = 1e-5  # nats; two fp32 log-softmaxes may round all tokens in one direction
_LARGEST_CARRIED = {"mean": 0.03 / FLOOR_FACTOR["mean"], "p99": 0.3 / FLOOR_FACTOR["p99"], "k3": 0.015 / 2}


def raise_floor(floor: Floor, dtype: str) -> Floor:
    """The floor, raised to the smallest difference of two engines of a dtype, because an exact engine measures zero."""
    least = FLOOR_MIN.get(dtype, 1e-5)
    lowest = {"mean": least, "p99": 4 * least, "maximum": 8 * least}
    return floor.model_copy(update={key: max(getattr(floor, key), value) for key, value in lowest.items()})


def floor_profile(floor: Floor) -> Profile:
    """Thresholds from a stack's own noise (`rlkernel-drift floor`)."""
    source = f"noise floor of {floor.tokens} tokens"
    least = raise_floor(floor, "float32")  # a floor does not record its dtype
    mean, p99 = least.mean, least.p99
    bias = max(FLOOR_FACTOR["bias"] * mean, 2 * floor.k3, _SMALLEST_BIAS)
    limits = {
        "tokens.mean": FLOOR_FACTOR["mean"] * mean,
        "tokens.p99": FLOOR_FACTOR["p99"] * p99,
        "sequences.bias": bias,
        "sequences.worst_mean": max(FLOOR_FACTOR["worst_mean"] * mean, _SMALLEST_BIAS),
    }
    return Profile(
        name="floor",
        title="this stack's own noise",
        source=source,
        threshold=[
            *(Threshold(metric=name, at_most=limit, source=source) for name, limit in limits.items()),
            _NO_OUTLIER,
        ],
    )


def carried_floor(rollout: Manifest, train: Manifest) -> Floor | None:
    """The floor that a capsule contains, the train side's first.

    It cannot widen a bar beyond those of `GENERAL`, because a capsule may come from an untrusted source.
    """
    floor = train.floor or rollout.floor
    if floor is None:
        return None
    update = {key: min(getattr(floor, key), largest) for key, largest in _LARGEST_CARRIED.items()}
    return floor.model_copy(update=update)


def carried_profile(rollout: Manifest, train: Manifest) -> Profile | None:
    """Thresholds from the floor that a capsule contains, and prime-rl's on k3."""
    floor = carried_floor(rollout, train)
    if floor is None:
        return None
    profile = floor_profile(floor)
    title = (
        f"the noise floor that the {'train' if train.floor else 'rollout'} capsule contains, at most that of general"
    )
    threshold = [*profile.threshold, *PROFILES["prime-rl"].threshold]
    return profile.model_copy(update={"title": title, "threshold": threshold})


def load_profile(name: str) -> Profile:
    """A built-in profile, or one from a TOML file.

    Raises:
        DriftError: the profile is unknown, or its file is missing or invalid; the message names the field.
    """
    if name in PROFILES:
        return PROFILES[name]
    path = Path(name)
    if not path.is_file():
        raise DriftError(f"profile {name!r} is neither a file nor one of {', '.join(PROFILES)}")
    try:
        profile = Profile.model_validate({"name": path.stem, **tomllib.loads(path.read_text(encoding="utf-8"))})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise DriftError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise DriftError(f"{path}: {error}") from None
    unknown = [t.metric for t in profile.threshold if t.metric not in LABELS]
    if unknown:
        raise DriftError(f"{path}: metric {unknown[0]!r} is unknown; known are {', '.join(LABELS)}")
    return profile


def metric_values(tokens: TokenStatistics, sequences: SequenceStatistics | None) -> dict[str, float | None]:
    """Every statistic under its name in `LABELS`."""
    parts = {"tokens": tokens.model_dump(), "sequences": {} if sequences is None else sequences.model_dump()}
    values: dict[str, float | None] = {}
    for name in LABELS:
        node: Any = parts
        for key in name.split(".", 2):
            node = node.get(key, {})
        values[name] = float(node) if isinstance(node, (int, float)) else None
    return values


def judge(profile: Profile, values: dict[str, float | None]) -> list[Metric]:
    """All statistics with their thresholds, those that have one first."""
    judged = [_judge(threshold, values.get(threshold.metric)) for threshold in profile.threshold]
    named = {metric.name for metric in judged}
    rest = [
        Metric(name=name, label=LABELS[name], value=value)
        for name, value in values.items()
        if name not in named and value is not None
    ]
    return judged + rest


def _judge(threshold: Threshold, value: float | None) -> Metric:
    metric = Metric(
        name=threshold.metric,
        label=LABELS[threshold.metric],
        value=value,
        at_most=threshold.at_most,
        at_least=threshold.at_least,
        source=threshold.source,
        status="missing",
    )
    if value is None or value != value:
        return metric
    ratios = []
    if threshold.at_most is not None:
        ratios.append(value / threshold.at_most if threshold.at_most else float(value > 0) * 2)
    if threshold.at_least is not None:
        ratios.append(threshold.at_least / value if value else 2.0)
    over = (threshold.at_most is not None and value > threshold.at_most) or (
        threshold.at_least is not None and value < threshold.at_least
    )
    return metric.model_copy(update={"ratio": max(ratios), "status": "over" if over else "ok"})
