"""Gate 6: how far apart are the log-probabilities, and is that too far for the profile?"""

from __future__ import annotations

from collections.abc import Sequence

from rlkernel_drift.gates.common import gate, skipped
from rlkernel_drift.knowledge import finding
from rlkernel_drift.statistics import TokenStatistics
from rlkernel_drift.verdict import Finding, Gate, Metric


def statistics_gate(
    statistics: TokenStatistics | None,
    metrics: list[Metric],
    hints: Sequence[Finding] = (),
    links: Sequence[Finding] = (),
    outlier: Finding | None = None,
) -> Gate:
    """Fails where a threshold is exceeded, or where a side has values that no log-probability can have.

    Args:
        hints: what the streams say about a cause; they warn where every threshold holds too.
        links: of the chain that are worse than what is judged; said where nothing fails.
        outlier: the tokens that are too far off for rounding, a warning; an error where the profile judges them.
    """
    if statistics is not None and statistics.invalid:
        # Statistics and hints of the other tokens would name a cause that these values contradict.
        return gate("statistics", _invalid(statistics), "")
    if statistics is not None and statistics.tokens == 0:
        return skipped("statistics", "no token counts on both sides with a log-probability")
    if statistics is not None and statistics.constant:
        side = "rollout" if statistics.commonest_rollout >= statistics.commonest_train else "train"
        words = f"{statistics.commonest:.0%} of the {side} side's {statistics.tokens} log-probabilities are one value"
        return skipped("statistics", f"{words}: placeholders, no evidence")
    judged = [metric for metric in metrics if metric.status != "no threshold"]
    findings = []
    missing = [metric.label for metric in judged if metric.status == "missing"]
    over = [metric for metric in judged if metric.status == "over"]
    if not over and (missing or not judged):
        return skipped("statistics", f"statistics that the profile asks for are not there: {', '.join(missing)}")
    for metric in over:
        if metric.name == "tokens.outliers" and outlier is not None:
            findings.append(outlier.model_copy(update={"severity": "error"}))
            outlier = None
        else:
            findings.append(finding("drift", _words(metric), value=metric.value, ratio=metric.ratio))
    findings += [] if outlier is None else [outlier]
    findings += hints if over else [*links, *hints]
    count = "" if statistics is None else f"{statistics.tokens} tokens: "
    return gate("statistics", findings, count + "; ".join(_words(metric) for metric in judged))


def _words(metric: Metric) -> str:
    limits = [f"at most {metric.at_most:g}" if metric.at_most is not None else ""]
    limits.append(f"at least {metric.at_least:g}" if metric.at_least is not None else "")
    value = "missing" if metric.value is None else f"{metric.value:.4g}"
    return f"{metric.label} is {value} ({', '.join(limit for limit in limits if limit)})"


def _invalid(statistics: TokenStatistics) -> list[Finding]:
    found = []
    for side in ("rollout", "train"):
        nan, inf = getattr(statistics, f"nan_{side}"), getattr(statistics, f"inf_{side}")
        if nan or inf:
            message = f"{nan} NaN and {inf} infinite log-probabilities of counted tokens on the {side} side"
            found.append(finding("not-finite", message, nan=nan, inf=inf))
    for side in ("rollout", "train"):
        support = getattr(statistics, f"support_{side}")
        if support:
            message = f"the {side} side gives {support} sampled tokens no probability at all"
            found.append(finding("support", message, tokens=support))
    for side in ("rollout", "train"):
        above = getattr(statistics, f"above_{side}")
        if above:
            message = f"{above} log-probabilities of counted tokens are above zero on the {side} side"
            found.append(finding("above-zero", message, tokens=above))
    return found
