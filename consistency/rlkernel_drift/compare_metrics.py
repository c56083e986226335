"""Verdicts on the statistics that a training framework logged: every step of a metrics file, judged by a profile."""

from __future__ import annotations

import math

import numpy as np

from rlkernel_drift.gates import TITLES, conclude, gate, new_verdict, skipped
from rlkernel_drift.gates.statistics import statistics_gate
from rlkernel_drift.inputs import Source
from rlkernel_drift.inputs.metrics import Metrics, how_to_log
from rlkernel_drift.knowledge import finding
from rlkernel_drift.profiles import BITWISE, GENERAL, Profile, judge, load_profile
from rlkernel_drift.verdict import Gate, Metric, Side, Status, Trend, Verdict

_LARGEST = 700.0  # exp of a larger value overflows fp64


def compare_metrics(source: Source, metrics: Metrics, profile: Profile | None, command: list[str]) -> Verdict:
    """A verdict from the statistics that a framework logged, without tokens.

    Args:
        profile: None chooses bits or the thresholds of `general` and `nemo`, by the statistics in the file.
        command: as typed, for the report.
    """
    profile = profile or _metrics_profile(metrics.summary())
    verdict = new_verdict(
        profile,
        command,
        rollout=Side(label=source.label, kind="metrics", engine=", ".join(metrics.frameworks)),
        metrics=_judged(profile, metrics),
        trends=trends(metrics),
        scope=f"{metrics.compared} steps of {source.label}, as logged by {', '.join(metrics.frameworks)}; no tokens",
    )
    own = _metrics_gate(metrics, verdict.metrics)
    verdict.gates = [own if name == "statistics" else skipped(name, "a metrics file has no tokens") for name in TITLES]
    return conclude(verdict)


def _metrics_profile(values: dict[str, float | None]) -> Profile:
    """Bits if the file counted only equal bits, else the thresholds of `general` and `nemo` whose statistics it has.

    The band of the mean ratio (`mlperf`) is not included, because healthy runs leave it.
    """
    if values.get("tokens.equal") == 1.0:
        return BITWISE
    bars = [*GENERAL.threshold, *load_profile("nemo").threshold]
    found = [t for t in bars if values.get(t.metric) is not None]
    return GENERAL.model_copy(update={"threshold": found}) if found else GENERAL


def _judged(profile: Profile, metrics: Metrics) -> list[Metric]:
    """Judges each threshold at the worst step, because a mean over steps would hide that a run broke at its end."""
    known: dict[str, list[tuple[float, int, str]]] = {name: [] for name in metrics.values}
    for key, column in metrics.columns.items():
        pairs = zip(column, metrics.steps, strict=True)
        known[metrics.statistics[key]] += [(value, step, key) for value, step in pairs if value is not None]
    # The smallest and the largest value of each statistic; ties go to the first step.
    ends = [
        {name: pick(found, key=lambda item: item[0]) if found else None for name, found in known.items()}
        for pick in (min, max)
    ]
    sides = [judge(profile, {name: found and found[0] for name, found in end.items()}) for end in ends]
    means = metrics.summary()
    result = []
    for pair in zip(*sides, strict=True):
        if pair[0].status == "no threshold":
            result.append(pair[0].model_copy(update={"value": means[pair[0].name]}))
            continue
        which = max((0, 1), key=lambda i: (pair[i].status == "over", pair[i].ratio or 0.0))
        worst, at = pair[which], ends[which].get(pair[which].name)
        if at is not None and len(known[worst.name]) > 1:
            names = metrics.names_of(worst.name)
            under = f" of {at[2]}, one of {len(names)} names" if len(names) > 1 else ""
            steps = len({step for _, step, _ in known[worst.name]})
            worst = worst.model_copy(update={"label": f"{worst.label} (worst of {steps} steps: step {at[1]}{under})"})
        result.append(worst)
    return result


def _metrics_gate(metrics: Metrics, judged: list[Metric]) -> Gate:
    broken = [
        finding(
            "not-finite",
            f"{name} is NaN or infinite at {len(steps)} of {len(metrics.steps)} steps, first at step {steps[0]}",
            steps=len(steps),
            first=steps[0],
        )
        for name, steps in metrics.broken.items()
    ]
    if broken:
        return gate("statistics", [*broken, *statistics_gate(None, judged).findings], "")
    if not metrics.compared:
        return skipped("statistics", "the framework logged that nothing was compared at any step")
    result = statistics_gate(None, judged)
    if result.status == "skipped":
        advice = how_to_log(metrics.frameworks)
        return result.model_copy(update={"summary": f"{result.summary}{f'. {advice}' if advice else ''}"})
    if result.status != "passed":
        return result
    words = []
    for name, steps in metrics.missing.items():
        words.append(f"{name} has no value at {len(steps)} of {len(metrics.steps)} steps, last at step {steps[-1]}")
        if steps[-1] == metrics.steps[-1]:
            # A broken run logs NaN, which pandas and others write as null.
            return skipped("statistics", f"{words[-1]}, the end of the run")
    if metrics.cut:
        words.append(f"{metrics.cut} of {metrics.path.name} is cut off and was left out")
    return result.model_copy(
        update={
            "status": "warned" if words else result.status,
            "summary": "; ".join([*words, result.summary]),
            "findings": [*result.findings, *(finding("nothing-compared", word, "warning") for word in words)],
        }
    )


def with_metrics(verdict: Verdict, metrics: Metrics, profile: Profile) -> Verdict:
    """Also judges the run's own statistics, which cover all its steps and tokens; the run kept only some tokens."""
    judged = [m for m in _judged(profile, metrics) if m.status not in ("no threshold", "missing")]
    own = _metrics_gate(metrics, judged) if judged or metrics.broken else _bounded(profile, metrics)
    if own.status in ("failed", "skipped") and not (own.status == "skipped" and verdict.status != Status.ALIGNED):
        update = {"metrics": judged + verdict.metrics}
        return conclude(verdict.with_gate(own).model_copy(update=update))
    if verdict.status != Status.ALIGNED:
        return verdict
    if own.findings:
        findings = [*verdict.gate("statistics").findings, *own.findings]
        verdict = verdict.with_gate(own.model_copy(update={"status": "warned", "findings": findings}))
    step = verdict.rollout.step if verdict.rollout is not None else None
    kept = "the tokens that the run kept" if step is None else f"the tokens of step {step}"
    words = f"{verdict.headline.rstrip('.')}; these are {kept}, its own figures of {metrics.compared} steps agree."
    return verdict.model_copy(update={"headline": words})


def _bounded(profile: Profile, metrics: Metrics) -> Gate:
    """Judges upper bounds of the statistics, for a run that logged only equal bits and the largest difference."""
    values = metrics.summary()
    share = 1.0 - (values.get("tokens.equal") or 0.0)
    largest = values.get("tokens.maximum")
    size = 0.0 if share == 0 else math.inf if largest is None else min(largest, _LARGEST)
    most = {
        "tokens.mean": share * size,
        "tokens.p99": size,
        "tokens.k3": share * (math.expm1(min(size, _LARGEST)) - min(size, _LARGEST)),
        "tokens.multiplicative": 1 + share * math.expm1(min(size, _LARGEST)),
    }
    bounds = [(most.get(t.metric, math.inf), t) for t in profile.threshold]
    if share == 0 or all(t.at_least is None and t.at_most is not None and m <= t.at_most for m, t in bounds):
        return gate("statistics", [], "")
    found = ", ".join(f"{name} {value:.4g}" for name, value in values.items() if value is not None)
    return skipped(
        "statistics",
        f"the run's own statistics (worst step: {found or 'none'}) do not show whether profile {profile.name} held at "
        "every step, and the run kept only some tokens",
    )


# ---- trends over steps -----------------------------------------------------------------------------------------------


_MIN_BEFORE = 3  # steps at the first level
_MIN_STEPS = 6
_FEW = 3  # steps at the second level, below which the evidence must be twice as strong
_FACTOR = 1.5  # between the levels
_SIGMAS = 4.0
_MAX_POINTS = 2000
_EXTREMES = ("tokens.maximum", "tokens.probability_max")


def trends(metrics: Metrics) -> list[Trend]:
    """The trend of each statistic of the file, except extremes, which change level by chance."""
    return [
        _trend(metrics, name, column)
        for name, column in metrics.columns.items()
        if metrics.statistics[name] not in _EXTREMES and sum(value is not None for value in column) >= 2
    ]


def _trend(metrics: Metrics, name: str, values: list[float | None]) -> Trend:
    steps, title = metrics.steps, metrics.statistics[name]
    if len(metrics.names_of(title)) > 1:
        title = f"{title} ({name})"
    thin = max(1, len(steps) // _MAX_POINTS)
    result = Trend(metric=title, steps=steps[::thin], values=values[::thin], words="no change of level")
    keep = [i for i, value in enumerate(values) if value is not None]
    found = change_point(np.array([values[i] for i in keep], np.float64))
    if found is None:
        return result
    at, before, after = found
    step, version = steps[keep[at]], metrics.versions[keep[at]] if metrics.versions else None
    words = f"level changes from {before:.3g} to {after:.3g} at step {step}"
    if version is not None:
        words += f", with version {version} of the weights"
    return result.model_copy(
        update={"change": step, "version": version, "before": before, "after": after, "words": words}
    )


def change_point(y: np.ndarray) -> tuple[int, float, float] | None:
    """Best split of a series into two levels: (first index of the second, both levels); None without a clear split.

    A split is clear if the levels differ by half and by four standard errors of the noise around them, and if most
    values after it lie at the second level, unlike after a spike. The last value alone may be a level, because a run
    that breaks is soon stopped.
    """
    n = len(y)
    if n < _MIN_STEPS:
        return None
    at = np.arange(_MIN_BEFORE, n)
    sums = np.concatenate([[0.0], np.cumsum(y)])
    left, right = sums[at] / at, (sums[n] - sums[at]) / (n - at)
    # The split with the largest sum of squares between the two parts has the smallest within them.
    best = int(np.argmax(at * (n - at) / n * (left - right) ** 2))
    k, a, b = int(at[best]), float(left[best]), float(right[best])
    within = np.concatenate([y[:k] - a, y[k:] - b])
    noise = max(float(np.sqrt((within**2).sum() / max(1, n - 2))), 1e-12 * max(abs(a), abs(b)))
    error = noise * math.sqrt(1 / k + 1 / (n - k))
    low, high = sorted((abs(a), abs(b)))
    distinct = high > _FACTOR * low or abs(a - b) > 0.05 + 0.05 * high
    at_second = float((np.abs(y[k:] - b) < np.abs(y[k:] - a)).mean())
    sigmas = _SIGMAS if n - k >= _FEW else 2 * _SIGMAS
    return (k, a, b) if distinct and at_second > 0.5 and abs(a - b) > sigmas * error else None
