"""Which curves a page shows: the known metrics with headings and units, and all others under their own names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlkernel.training.runs import Row

LEARNING, UPDATES, SAMPLING, SPEED, OTHER = "Learning", "Updates", "Sampling", "Speed", "Other metrics"


@dataclass(frozen=True)
class Curve:
    """One chart.

    Attributes:
        section: heading above it.
        lines: metric to its name in the legend.
        low: lower end of the y axis, or None to fit the data.
        is_primary: shown even if it is constant.
    """

    title: str
    unit: str
    section: str
    lines: dict[str, str]
    low: float | None = None
    is_primary: bool = False


def _curve(metric: str, title: str, unit: str, section: str, low: float | None = None, primary: bool = False) -> Curve:
    return Curve(title, unit, section, {metric: title}, low, primary)


KNOWN = (
    _curve("reward", "Reward", "mean reward", LEARNING, primary=True),
    _curve("loss", "Loss", "loss", LEARNING, primary=True),
    _curve("perplexity", "Perplexity", "exp(mean loss per token)", LEARNING, primary=True),
    _curve("accuracy", "Accuracy", "share of pairs ranked right", LEARNING, 0.0, primary=True),
    _curve("rewards/accuracies", "Reward accuracy", "share of pairs ranked right", LEARNING, 0.0, primary=True),
    _curve("rewards/margins", "Reward margin", "mean of chosen minus rejected reward", LEARNING, primary=True),
    Curve("Implicit rewards", "mean reward", LEARNING, {"rewards/chosen": "chosen", "rewards/rejected": "rejected"}),
    Curve("Rewards of both sides", "reward", LEARNING,
          {"max_reward": "largest", "mean_reward": "mean", "min_reward": "smallest"}),
    _curve("margin", "Margin", "mean of chosen minus rejected reward", LEARNING, primary=True),
    _curve("length", "Completion length", "mean tokens per completion", LEARNING, 0.0, primary=True),
    _curve("entropy", "Entropy", "mean nats per token", UPDATES, 0.0, primary=True),
    _curve("grad_norm", "Gradient norm", "before clipping", UPDATES, 0.0, primary=True),
    _curve("lr", "Learning rate", "of the step's last update", UPDATES, 0.0, primary=True),
    _curve("kl_ref", "KL to the reference", "nats per token", UPDATES, primary=True),
    Curve("KL to the sampling policy", "nats per token", UPDATES, {"kl_old_k1": "k1", "kl_old_k3": "k3"}),
    Curve("Importance ratio", "ratio", UPDATES,
          {"ratio_max": "largest", "ratio_mean": "mean", "ratio_min": "smallest"}),
    Curve("Clipped tokens", "share of tokens", UPDATES,
          {"clip_fraction_low": "low", "clip_fraction_high": "high", "clip_fraction_dual": "dual"}, 0.0),
    Curve("Importance weight", "truncated weight", UPDATES, {"tis_mean": "mean", "tis_fraction": "share truncated"}),
    Curve("Distance to the rollout", "nats per token", UPDATES, {"drift_mean": "mean", "drift_max": "largest"}),
    _curve("kl_reward", "KL in the reward", "nats per completion", UPDATES),
    _curve("value_loss", "Value loss", "half the mean squared error", UPDATES, 0.0, primary=True),
    _curve("value_explained", "Explained variance", "share of the returns' variance", UPDATES, primary=True),
    _curve("value_grad_norm", "Gradient norm of the value model", "before clipping", UPDATES, 0.0, primary=True),
    Curve("Log-probabilities", "nats per completion", UPDATES,
          {"logps/chosen": "chosen", "logps/rejected": "rejected"}),
    _curve("updates", "Updates", "optimizer updates per step", UPDATES, 0.0),
    _curve("reward_std", "Spread of rewards", "standard deviation in the step", SAMPLING, 0.0),
    _curve("groups_all_equal", "Groups without signal", "share of groups with equal rewards", SAMPLING, 0.0),
    _curve("truncated", "Truncated completions", "share cut at rollout.max_tokens", SAMPLING, 0.0),
    _curve("masked", "Completions outside the loss", "per step", SAMPLING, 0.0),
    _curve("length_max", "Longest completion", "tokens", SAMPLING, 0.0),
    _curve("turns", "Turns", "mean per completion", SAMPLING, 0.0),
    _curve("tokens_per_s", "Throughput", "completion tokens per second", SPEED, 0.0, primary=True),
    _curve("seconds", "Time per step", "seconds", SPEED, 0.0),
    _curve("memory_mib", "Peak memory", "MiB", SPEED, 0.0),
    _curve("tokens", "Tokens per step", "completion tokens", SPEED, 0.0),
)  # fmt: skip
ELSEWHERE = {"step", "contract", "exact_frac", "mismatch_tokens", "max_abs_diff", "rows"}
"""Numbers that the section on drift or a table shows."""


def curves_of(logs: Iterable[Sequence[Row]]) -> tuple[list[Curve], dict[str, float]]:
    """The curves of one or more logs, in order of sections, and the metrics that are constant, with their value.

    `reward_NAME` is the mean of one reward function, `logged/NAME` is logged by a reward; all `pass@k` share a chart.
    """
    seen: dict[str, set[float]] = {}
    for log in logs:
        for row in log:
            for name, value in row.items():
                if name in ELSEWHERE or name.startswith("seconds_") or isinstance(value, bool):
                    continue
                if isinstance(value, (int, float)) and math.isfinite(value):
                    seen.setdefault(name, set()).add(value)
    curves: list[Curve] = []
    constant: dict[str, float] = {}
    taken = {name for curve in KNOWN for name in curve.lines}
    for curve in [KNOWN[0], *_named(name for name in seen if name not in taken), *KNOWN[1:]]:
        lines = {name: label for name, label in curve.lines.items() if name in seen}
        if not lines:
            continue
        if curve.is_primary or any(len(seen[name]) > 1 for name in lines):
            curves.append(Curve(curve.title, curve.unit, curve.section, lines, curve.low, curve.is_primary))
        else:
            constant |= {name: next(iter(seen[name])) for name in lines}
    order = [LEARNING, UPDATES, SAMPLING, SPEED, OTHER]
    return sorted(curves, key=lambda curve: order.index(curve.section)), constant


def _named(names: Iterable[str]) -> Iterable[Curve]:
    passed = {}
    for name in names:
        if name.startswith("pass@"):
            passed[name] = name
        elif name.startswith("reward_"):
            yield _curve(name, f"Reward {name.removeprefix('reward_')}", "mean reward", LEARNING, primary=True)
        elif name.startswith("logged/"):
            yield _curve(name, name.removeprefix("logged/"), "logged by a reward, mean of the step", OTHER)
        else:
            yield _curve(name, name, "value of the step", OTHER)
    if passed:
        yield Curve("pass@k", "share of held-out prompts solved", LEARNING, passed, 0.0, True)


def drawable(rows: list[Row], algorithm: str) -> list[Row]:
    """The rows as they are drawn.

    With `perplexity` where `loss` is a mean negative log-likelihood per token (sft); without norm and learning rate
    where the step had no update.
    """
    drawn = []
    for row in rows:
        if algorithm == "sft" and row.get("loss") is not None and row["loss"] < 700:
            row = {**row, "perplexity": math.exp(row["loss"])}
        if row.get("updates") == 0:
            row = {key: value for key, value in row.items() if key not in ("grad_norm", "lr")}
        drawn.append(row)
    return drawn
