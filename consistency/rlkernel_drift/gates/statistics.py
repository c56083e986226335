"""Gate 6: how far apart are the log-probabilities, and is that too far for the profile?

Hints go with it, also where every threshold holds: what two streams alone say about the cause, without a model (shifts,
scales, signs, growth, lattices). They are evidence, not a diagnosis: `diagnose` re-scores with the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlkernel_drift.gates.common import gate, skipped
from rlkernel_drift.knowledge import finding
from rlkernel_drift.pair import Pair
from rlkernel_drift.statistics import Comparable, Lattice, TokenStatistics, outlying
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


_MIN_TOKENS = 32
_LINK = 5.0  # times the next link of the chain
_ROUNDING = 1e-5  # nats; one-signed differences below it come from how a log-softmax rounds, not from kept sets
_PROPORTIONAL = 0.8  # a temperature of 0.985 or 1.02 gives 0.9; every other fault of the power matrix less than 0.75
_LARGE = 0.01  # nats a token; below it a sequence that stands out may have been computed on another path


def hints(pair: Pair, compared: Comparable, lattice: Lattice | None) -> list[Finding]:
    """Findings of severity note or warning, the most telling first."""
    if len(compared.d) < _MIN_TOKENS:
        return []
    found = _shift(pair, compared) or _proportional(compared)
    found += [*_one_signed(compared), *_template(compared), *_concentrated(pair, compared)]
    if lattice is not None:
        found.append(
            finding("bf16-logits", f"{lattice}: something was rounded to few bits", "warning", step=lattice.step)
        )
    return [*found, *_growth(pair, compared)]


def outlier(pair: Pair, compared: Comparable) -> Finding | None:
    """A warning of the tokens that are too far off for rounding, with the place of the worst one."""
    far = np.flatnonzero(outlying(compared))
    if not len(far):
        return None
    worst = int(far[np.argmax(np.abs(compared.d[far]))])
    sequence, index = pair.rollout.place(int(compared.index[worst]))
    count = "1 token is" if len(far) == 1 else f"{len(far)} tokens are"
    message = (
        f"{count} too far off for rounding: sequence {sequence}, token {index}, is {compared.r[worst]:.4g} in the "
        f"rollout and {compared.t[worst]:.4g} in training"
    )
    return finding("drift", message, "warning", tokens=len(far), sequence=sequence, token=index)


def chain(factors: dict[str, TokenStatistics]) -> list[Finding]:
    """Which link of train, prefill, decode, recorded the difference is in, where one is far above the others."""
    known = [(name, s) for name, s in factors.items() if name.endswith("(processed)") and s.tokens]
    links = sorted(known, key=lambda link: -link[1].mean)
    if len(links) < 2 or links[0][1].mean <= _LINK * links[1][1].mean:
        return []
    words = [f"{name.split()[0]} {'equal bits' if s.equal == 1 else f'mean |d| {s.mean:.2g}'}" for name, s in links]
    message = f"the difference arises between {links[0][0].split()[0].replace('/', ' and ')}: {', '.join(words)}"
    return [finding("drift", message, "warning", link=links[0][0].split()[0])]


def lag_correlation(x: NDArray[np.float64], y: NDArray[np.float64], lag: int) -> float:
    """Correlation of x[t] with y[t + lag]."""
    if lag > 0:
        x, y = x[:-lag], y[lag:]
    elif lag < 0:
        x, y = x[-lag:], y[:lag]
    return float(np.corrcoef(x, y)[0, 1]) if len(x) > 2 and x.std() > 0 and y.std() > 0 else 0.0


def _shift(pair: Pair, compared: Comparable) -> list[Finding]:
    """The train stream fits the rollout's better one token earlier or later."""
    here = lag_correlation(compared.r, compared.t, 0)
    best = max((1, -1), key=lambda lag: lag_correlation(compared.r, compared.t, lag))
    there = lag_correlation(compared.r, compared.t, best)
    if there < 0.9 or there < here + 0.3:
        return []
    way = "later" if best > 0 else "earlier"
    message = f"the train stream is the rollout's one token {way}: correlation {there:.3f}, in place {here:.3f}"
    return [finding("off-by-one", message, "warning", shifted=there, in_place=here)]


def _proportional(compared: Comparable) -> list[Finding]:
    """A temperature scales logits: the differences go with the log-probabilities, which noise does not."""
    if float(np.abs(compared.d).mean()) < _ROUNDING:
        return []
    together = lag_correlation(compared.r, compared.d, 0)
    if abs(together) < _PROPORTIONAL:
        return []
    slope = together * float(compared.d.std() / compared.r.std())
    message = f"the differences go with the log-probabilities, {slope:+.2g} a nat (correlation {together:.2f})"
    return [finding("temperature", f"{message}, as under another temperature", "warning", slope=slope)]


def _one_signed(compared: Comparable) -> list[Finding]:
    """Renormalising over kept tokens makes every log-probability larger, never smaller."""
    size = float(np.abs(compared.d).mean())
    large = compared.d[np.abs(compared.d) > 0.25 * size]
    if len(large) < _MIN_TOKENS or size < _ROUNDING:
        return []
    share = float((large < 0).mean())
    if max(share, 1 - share) < 0.98:
        return []
    side = "rollout" if share > 0.5 else "train"
    message = f"{max(share, 1 - share):.1%} of the differences have one sign: the {side} side is always the larger"
    return [finding("top-p", f"{message}, as after renormalising over kept tokens", "warning", share=share)]


def _template(compared: Comparable) -> list[Finding]:
    """miles' rule of thumb: about 0.8 nats a token on an instruction model is almost always the chat template."""
    size = float(np.abs(compared.d).mean())
    if not 0.5 < size < 2.0:
        return []
    message = f"{size:.2f} nats a token is a different input, not arithmetic: template, tokens or weights"
    return [finding("chat-template", message, "note", mean=size)]


def _concentrated(pair: Pair, compared: Comparable) -> list[Finding]:
    """Most of the difference lies in few sequences: those were computed otherwise, not all of them slightly so."""
    owner = np.searchsorted(pair.rollout.cu_seqlens, compared.index, side="right") - 1
    count = np.bincount(owner)
    sums = np.bincount(owner, np.abs(compared.d))
    there = count > 0
    if there.sum() < 4:
        return []
    means = sums[there] / count[there]
    typical = float(np.median(means))
    outliers = np.flatnonzero(there)[means > 8 * max(typical, 1e-9)]
    if not 0 < len(outliers) <= there.sum() // 3:
        return []
    message = f"{len(outliers)} of {int(there.sum())} sequences carry the difference, first sequence {int(outliers[0])}"
    severity: Literal["warning", "note"] = "warning" if float(means.max()) > _LARGE else "note"
    return [finding("drift", message, severity, sequences=[int(i) for i in outliers[:20]])]


def _growth(pair: Pair, compared: Comparable) -> list[Finding]:
    """Later tokens differ more: cache, positions or a long context, not the head."""
    places = position_profile(pair, compared)
    if len(places) < 4:
        return []
    first, last = places[0][1], places[-1][1]
    if last < 3 * max(first, 1e-9):
        return []
    message = f"differences grow along the sequence, from {first:.2g} in its first to {last:.2g} in its last tokens"
    return [finding("drift", message, "note", first=first, last=last)]


def position_profile(pair: Pair, compared: Comparable, parts: int = 10) -> list[tuple[float, float]]:
    """(mean index in the sequence, mean |d|) of tokens grouped by their index, at most `parts` groups."""
    owner = np.searchsorted(pair.rollout.cu_seqlens, compared.index, side="right") - 1
    index = compared.index - pair.rollout.cu_seqlens[owner]
    order = np.argsort(index, kind="stable")
    groups = [group for group in np.array_split(order, parts) if len(group) >= 8]
    return [(float(index[group].mean()), float(np.abs(compared.d[group]).mean())) for group in groups]
