"""Gate 6: how far apart are the log-probabilities, and is that too far for the profile?"""

from __future__ import annotations

from collections.abc import Sequence

from rlkernel_drift.gates.common import gate, skipped
from rlkernel_drift.knowledge import finding
from rlkernel_drift.statistics import TokenStatistics
from rlkernel_drift.verdict import Finding, Gate, Metric


def statistics_gate(
    statistics: TokenStatistics | None, metrics: list[Metric], hints: list[Finding], links: Sequence[Finding] = ()
) -> Gate:
    """Fails where a threshold is exceeded, or where a side has values that no log-probability can have.

    Args:
        hints: what the streams say about a cause; they warn where every threshold holds too.
        links: of the chain that are worse than what is judged; said where nothing fails.
    """
    if statistics is not None and statistics.tokens == 0 and not _broken(statistics):
        return skipped("statistics", "no token counts on both sides with a log-probability")
    judged = [metric for metric in metrics if metric.status != "no threshold"]
    findings = _broken(statistics) if statistics is not None else []
    missing = [metric.label for metric in judged if metric.status == "missing"]
    over = [metric for metric in judged if metric.status == "over"]
    if not findings and not over and (missing or not judged):
        return skipped("statistics", f"statistics that the profile asks for are not there: {', '.join(missing)}")
    if not findings and not over and statistics is not None and statistics.constant:
        words = f"{statistics.commonest:.0%} of a side's {statistics.tokens} log-probabilities are one value"
        return skipped("statistics", f"{words}: placeholders, no evidence")
    for metric in over:
        findings.append(finding("drift", _words(metric), value=metric.value, ratio=metric.ratio))
    findings += hints if over else [*links, *hints]
    count = "" if statistics is None else f"{statistics.tokens} tokens: "
    return gate("statistics", findings, count + "; ".join(_words(metric) for metric in judged))


def _words(metric: Metric) -> str:
    limits = [f"at most {metric.at_most:g}" if metric.at_most is not None else ""]
    limits.append(f"at least {metric.at_least:g}" if metric.at_least is not None else "")
    value = "missing" if metric.value is None else f"{metric.value:.4g}"
    return f"{metric.label} is {value} ({', '.join(limit for limit in limits if limit)})"


def _broken(statistics: TokenStatistics) -> list[Finding]:
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
