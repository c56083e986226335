"""Gate 6: how much do the log-probabilities differ, and does the profile allow it?

It adds hints about the cause that need no model: shifts, scales, signs, growth, lattices. They are evidence, not a
diagnosis; `diagnose` re-scores with the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from rlkernel_drift.gates import first_few, gate, skipped
from rlkernel_drift.knowledge import finding
from rlkernel_drift.pair import Pair
from rlkernel_drift.statistics import (
    Comparable,
    Floats,
    Lattice,
    SequenceSums,
    TokenStatistics,
    outlying,
    owners,
    pearson,
)
from rlkernel_drift.verdict import Finding, Gate, Metric


def statistics_gate(
    statistics: TokenStatistics | None,
    metrics: list[Metric],
    hints: Sequence[Finding] = (),
    links: Sequence[Finding] = (),
    outlier: Finding | None = None,
) -> Gate:
    """Fails if a threshold is exceeded, or if a side has values that no log-probability can have.

    Args:
        hints: evidence about the cause, reported even if every threshold holds.
        links: links of the chain that exceed the profile, reported if the judged streams do not.
        outlier: tokens too far off for rounding: an error if the profile judges them, else a warning.
    """
    if statistics is not None and statistics.invalid:
        # Other hints from the other tokens would point to a cause that these values contradict.
        units = (
            [h for h in hints if h.cause == "units"] if statistics.above_rollout + statistics.above_train > 1 else []
        )
        return gate("statistics", [*units, *_invalid(statistics)], "")
    if statistics is not None and statistics.tokens == 0:
        return skipped("statistics", "no token counts on both sides with a log-probability")
    if statistics is not None and statistics.constant:
        side = "rollout" if statistics.commonest_rollout >= statistics.commonest_train else "train"
        words = f"{statistics.commonest:.0%} of the {side} side's {statistics.tokens} log-probabilities are one value"
        return skipped("statistics", f"{words}: placeholders, not evidence")
    judged = [metric for metric in metrics if metric.status != "no threshold"]
    findings = []
    missing = [metric.label for metric in judged if metric.status == "missing"]
    over = [metric for metric in judged if metric.status == "over"]
    if not over and (missing or not judged):
        return skipped("statistics", f"statistics that the profile requires are missing: {', '.join(missing)}")
    for metric in over:
        if metric.name == "tokens.outliers" and outlier is not None:
            findings.append(outlier.model_copy(update={"severity": "error"}))
            outlier = None
        else:
            findings.append(finding("drift", _words(metric), value=metric.value, ratio=metric.ratio))
    if any(f.severity == "error" for f in hints):
        return gate("statistics", [*(f for f in hints if f.severity == "error"), *findings], "")
    findings += [] if outlier is None else [outlier]
    findings += hints if over else [*links, *hints]
    count = "" if statistics is None else f"{statistics.tokens} tokens: "
    return gate("statistics", findings, count + "; ".join(_words(metric) for metric in judged))


def _words(metric: Metric) -> str:
    bounds = (("at most", metric.at_most), ("at least", metric.at_least))
    limits = ", ".join(f"{words} {bound:g}" for words, bound in bounds if bound is not None)
    value = "missing" if metric.value is None else f"{metric.value:.4g}"
    return f"{metric.label} is {value} ({limits})"


def _invalid(statistics: TokenStatistics) -> list[Finding]:
    found = []
    for side in ("rollout", "train"):
        nan, inf, support, above = (
            getattr(statistics, f"{name}_{side}") for name in ("nan", "inf", "support", "above")
        )
        if nan or inf:
            message = f"{nan} NaN and {inf} infinite log-probabilities of counted tokens on the {side} side"
            found.append(finding("not-finite", message, nan=nan, inf=inf))
        if support:
            message = f"the {side} side gives {support} sampled tokens probability zero"
            found.append(finding("support", message, tokens=support))
        if above:
            message = f"{above} log-probabilities of counted tokens are above zero on the {side} side"
            found.append(finding("above-zero", message, tokens=above))
    order = ("not-finite", "support", "above-zero")
    return sorted(found, key=lambda f: order.index(f.cause))


_MIN_TOKENS = 32
_LINK = 5.0  # times the next link of the chain
_ROUNDING = 1e-5  # nats; smaller differences of one sign come from the rounding of a log-softmax, not from kept sets
_PROPORTIONAL = 0.8  # a temperature of 0.985 or 1.02 gives 0.9; every other fault of the power matrix less than 0.75
_LARGE = 0.01  # nats per token; a sequence below it may merely have been computed on another path


def hints(pair: Pair, compared: Comparable, lattice: Lattice | None) -> list[Finding]:
    """Notes and warnings about the cause, the most specific first."""
    if len(compared.d) < _MIN_TOKENS:
        return []
    found = [*recording(compared), *_exchanged(pair, compared), *_few(pair, compared)]
    if any(f.severity == "error" for f in found):
        return found
    found += _shift(compared) or _proportional(compared)
    found += [*_one_signed(compared), *_template(compared), *_of_ranks(pair, compared), *_concentrated(pair, compared)]
    if lattice is not None:
        found.append(
            finding("bf16-logits", f"{lattice}: values were rounded to few bits", "warning", step=lattice.step)
        )
    return [*found, *_growth(pair, compared)]


def outlier(pair: Pair, compared: Comparable) -> Finding | None:
    """A warning about tokens that are too far off for rounding, with the position of the worst one."""
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
    """The link of train, prefill, decode, recorded in which the difference arises, if one is far above the others."""
    known = [(name, s) for name, s in factors.items() if name.endswith("(processed)") and s.tokens]
    links = sorted(known, key=lambda link: -link[1].mean)
    if len(links) < 2 or links[0][1].mean <= _LINK * links[1][1].mean:
        return []
    words = [f"{name.split()[0]} {'equal bits' if s.equal == 1 else f'mean |d| {s.mean:.2g}'}" for name, s in links]
    message = f"the difference arises between {links[0][0].split()[0].replace('/', ' and ')}: {', '.join(words)}"
    return [finding("drift", message, "warning", link=links[0][0].split()[0])]


_SAME = 1e-5  # nats; below it two fp32 log-softmaxes of the same logits may differ
_JUMP = 0.3  # nats; a rounding of bfloat16 logits moves a token by less
_VISIBLE = 1e-4
_REQUESTS = 256


def recording(compared: Comparable) -> list[Finding]:
    """What was done to one side's log-probabilities when they were recorded: errors, because chance cannot cause it."""
    size = float(np.abs(compared.d).mean())
    if size < _VISIBLE:
        return []
    found = []
    for side, mine, other in (("rollout", compared.r, compared.t), ("train", compared.t, compared.r)):
        grid = _grid(mine)
        if grid is not None and _grid(other) is None and (np.abs(mine - other) <= _step(mine, grid)).all():
            message = (
                f"all log-probabilities of the {side} side lie on the grid of {grid}, the other side's within a step"
            )
            found.append(finding("rounded-records", message, grid=grid))
        low = mine.min()
        held = mine == low
        if held.sum() >= 3 and low < 0 and (other[held] < low).all() and np.median(np.abs(compared.d[~held])) < 0.01:
            message = (
                f"{int(held.sum())} log-probabilities of the {side} side are {low:.6g}, the other side's are lower"
            )
            found.append(finding("clamped", message, bound=float(low)))
    return found or _unit(compared)


def _grid(values: Floats) -> str | None:
    """The coarsest of decimals, bfloat16 and float16 on which all values lie; None for full precision."""
    for n in range(5):
        if (np.abs(values - values.round(n)) <= np.abs(values) * 2.0**-24).all():
            return f"{n} decimals"
    bits = values.astype(np.float32).view(np.uint32)
    if not (bits & 0xFFFF).any():
        return "bfloat16"
    return "float16" if (values.astype(np.float16).astype(np.float64) == values).all() else None


def _step(values: Floats, grid: str) -> Floats:
    if grid.endswith("decimals"):
        return np.full_like(values, 10.0 ** -int(grid.split()[0]))
    bits = 7 if grid == "bfloat16" else 10
    return 2.0 ** (np.floor(np.log2(np.maximum(np.abs(values), 1e-4))) - bits + 1)


def _unit(compared: Comparable) -> list[Finding]:
    """One side is the other times a factor or plus a constant, token by token."""
    size = float(np.abs(compared.d).mean())
    fits = lambda rest: float(np.abs(rest).mean()) < 0.02 * min(size, float(np.abs(compared.r).mean()))
    far = compared.t < -0.01
    if far.sum() >= _MIN_TOKENS:
        factor = float(np.median(compared.r[far] / compared.t[far]))
        if abs(factor - 1) > 0.02 and fits(compared.r - factor * compared.t):
            message = f"the rollout's log-probabilities are the train side's times {factor:.4g}, token by token"
            return [finding("units", message, factor=factor)]
    if fits(compared.r - np.exp(compared.t)):
        return [finding("units", "the rollout's values are the probabilities of the train side's log-probabilities")]
    constant = float(np.median(compared.d))
    if abs(constant) > 0.01 and float(np.abs(compared.d - constant).mean()) < 0.02 * size:
        message = f"all log-probabilities of training are the rollout's plus {constant:.4g}"
        return [finding("units", message, "warning", constant=constant)]
    return []


def _exchanged(pair: Pair, compared: Comparable) -> list[Finding]:
    """Requests that hold the log-probabilities of other requests."""
    owner = owners(pair.rollout.cu_seqlens, compared.index)
    names = np.unique(owner)
    if not 2 <= len(names) <= _REQUESTS:
        return []
    parts = [np.flatnonzero(owner == name) for name in names]
    own = np.array([np.abs(compared.d[p]).mean() for p in parts])
    if own.max() < 0.1:
        return []
    pairs = []
    for i in np.flatnonzero(own > 0.1):
        for j, other in enumerate(parts):
            n = min(len(parts[i]), len(other))
            mine, theirs = compared.r[parts[i][:n]], compared.t[other[:n]]
            if j != i and n >= 8 and np.abs(mine - theirs).mean() < 0.1 * min(own[i], float(mine.std())):
                pairs.append(f"{names[i]} holds {names[j]}")
                break
    if len(pairs) < 2:
        return []
    message = f"{len(pairs)} requests of the rollout hold the log-probabilities of other requests: {first_few(pairs)}"
    return [finding("exchanged-requests", message, requests=len(pairs))]


def _few(pair: Pair, compared: Comparable) -> list[Finding]:
    """A handful of tokens jumps while the rest agrees, which no arithmetic of all tokens does."""
    size = np.abs(compared.d)
    far = size > _JUMP
    if not 2 <= far.sum() <= 0.05 * len(size) or float(np.quantile(size[~far], 0.99)) > _SAME:
        return []
    owner = owners(pair.rollout.cu_seqlens, compared.index)
    if (np.bincount(owner, far) > 0.5 * np.bincount(owner)).any():
        return []
    places = first_few(compared.index[far].tolist())
    message = f"{int(far.sum())} of {len(size)} tokens jump by up to {size.max():.3g}, the rest agrees: tokens {places}"
    return [finding("few-tokens", message, tokens=int(far.sum()))]


def _shift(compared: Comparable) -> list[Finding]:
    """The train stream fits the rollout's better if shifted by one token."""
    here = pearson(compared.r, compared.t) or 0.0
    later, earlier = pearson(compared.r[:-1], compared.t[1:]) or 0.0, pearson(compared.r[1:], compared.t[:-1]) or 0.0
    there = max(later, earlier)
    if there < 0.9 or there < here + 0.3:
        return []
    way = "later" if there == later else "earlier"
    message = f"the train stream fits the rollout's one token {way}: correlation {there:.3f}, in place {here:.3f}"
    return [finding("off-by-one", message, "warning", shifted=there, in_place=here)]


def _proportional(compared: Comparable) -> list[Finding]:
    """A temperature scales logits, so the differences correlate with the log-probabilities, unlike noise."""
    if float(np.abs(compared.d).mean()) < _ROUNDING:
        return []
    correlation = pearson(compared.r, compared.d) or 0.0
    if abs(correlation) < _PROPORTIONAL:
        return []
    slope = correlation * float(compared.d.std() / compared.r.std())
    message = (
        f"the differences are proportional to the log-probabilities: {slope:+.2g} per nat (correlation "
        f"{correlation:.2f}), as under another temperature"
    )
    return [finding("temperature", message, "warning", slope=slope)]


def _one_signed(compared: Comparable) -> list[Finding]:
    """Renormalising over kept tokens only ever makes log-probabilities larger."""
    size = float(np.abs(compared.d).mean())
    large = compared.d[np.abs(compared.d) > 0.25 * size]
    if len(large) < _MIN_TOKENS or size < _ROUNDING:
        return []
    share = float((large < 0).mean())
    if max(share, 1 - share) < 0.98:
        return []
    side = "rollout" if share > 0.5 else "train"
    message = f"{max(share, 1 - share):.1%} of the differences have one sign: the {side} side is larger"
    return [finding("top-p", f"{message}, as after renormalising over kept tokens", "warning", share=share)]


def _template(compared: Comparable) -> list[Finding]:
    """miles' rule of thumb: about 0.8 nats per token on an instruction model is almost always the chat template."""
    size = float(np.abs(compared.d).mean())
    if not 0.5 < size < 2.0:
        return []
    message = f"{size:.2f} nats per token means different inputs, not arithmetic: template, tokens or weights"
    return [finding("chat-template", message, "note", mean=size)]


def _of_ranks(pair: Pair, compared: Comparable) -> list[Finding]:
    """Some ranks carry the difference, and at least half of them do not."""
    if pair.rollout.ranks is None:
        return []
    rank = pair.rollout.ranks[owners(pair.rollout.cu_seqlens, compared.index)]
    known, place, tokens = np.unique(rank, return_inverse=True, return_counts=True)
    differs = compared.rollout[compared.index].view(np.int32) != compared.train[compared.index].view(np.int32)
    wrong = np.bincount(place, differs, len(known)).astype(np.int64)
    means = np.bincount(place, np.abs(compared.d), len(known)) / tokens
    if (wrong == 0).any():
        faulty, others = wrong > 0, f"all {int(tokens[wrong == 0].sum())} tokens of the others have equal bits"
    else:
        lower = float(np.sort(means)[(len(known) - 1) // 2])
        faulty = means > 8 * max(lower, 1e-9)
        others = f"mean |d| of the others is at most {means[~faulty].max():.2g}"
    if not 0 < faulty.sum() <= len(known) // 2:
        return []
    ranks = known[faulty].tolist()[:20]
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    share = f"{int(wrong[faulty].sum())} of {int(tokens[faulty].sum())} tokens differ"
    message = f"the difference is that of {names}: {share}, mean |d| {means[faulty].max():.2g}; {others}"
    return [finding("rank-fault", message, "warning", ranks=ranks)]


def _concentrated(pair: Pair, compared: Comparable) -> list[Finding]:
    """Most of the difference lies in few sequences, which were computed differently from the others."""
    sums = SequenceSums(compared, pair.rollout.cu_seqlens)
    count = len(sums.sequence)
    if count < 4:
        return []
    means = sums.size / sums.count
    outliers = sums.sequence[means > 8 * max(float(np.median(means)), 1e-9)]
    if not 0 < len(outliers) <= count // 3:
        return []
    message = f"{len(outliers)} of {count} sequences carry the difference, first sequence {int(outliers[0])}"
    severity: Literal["warning", "note"] = "warning" if float(means.max()) > _LARGE else "note"
    return [finding("drift", message, severity, sequences=[int(i) for i in outliers[:20]])]


def _growth(pair: Pair, compared: Comparable) -> list[Finding]:
    """Later tokens differ more, which points to the cache, positions or a long context instead of the head."""
    places = position_profile(pair, compared)
    if len(places) < 4:
        return []
    first, last = places[0][1], places[-1][1]
    if last < 3 * max(first, 1e-9):
        return []
    message = f"differences grow along the sequence, from {first:.2g} in the first to {last:.2g} in the last tokens"
    return [finding("drift", message, "note", first=first, last=last)]


def position_profile(pair: Pair, compared: Comparable) -> list[tuple[float, float]]:
    """(mean index in the sequence, mean |d|) of tokens grouped by their index, at most ten groups."""
    starts = pair.rollout.cu_seqlens
    index = compared.index - starts[owners(starts, compared.index)]
    order = np.argsort(index, kind="stable")
    groups = [group for group in np.array_split(order, 10) if len(group) >= 8]
    return [(float(index[group].mean()), float(np.abs(compared.d[group]).mean())) for group in groups]
