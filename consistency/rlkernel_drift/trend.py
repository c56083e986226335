"""A metric over steps: the step at which its level changes, and the weight version of that step."""

from __future__ import annotations

import math

import numpy as np

from rlkernel_drift.inputs.metrics import Metrics
from rlkernel_drift.verdict import Trend

_MIN_BEFORE = 3
_MIN_STEPS = 6
_FEW = 3
_FACTOR = 1.5
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
    values behind it lie at the second level, unlike after a spike. The last value alone may be a level, because a run
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
    apart = high > _FACTOR * low or abs(a - b) > 0.05 + 0.05 * high
    there = float((np.abs(y[k:] - b) < np.abs(y[k:] - a)).mean())
    sigmas = _SIGMAS if n - k >= _FEW else 2 * _SIGMAS
    return (k, a, b) if apart and there > 0.5 and abs(a - b) > sigmas * error else None
