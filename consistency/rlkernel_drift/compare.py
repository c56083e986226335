"""The comparison: runs the gates in order up to the first one that fails, and concludes a verdict.

An empty comparison never passes: `aligned` requires compared tokens or logged statistics within every threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from rlkernel_drift.capsule import Capsule, Floor, Sampling, SpanKind
from rlkernel_drift.compare_metrics import compare_metrics, trends, with_metrics
from rlkernel_drift.consequences import Settings, consequences
from rlkernel_drift.errors import DriftError
from rlkernel_drift.gates import TITLES, conclude, new_verdict, schema_gate, skipped
from rlkernel_drift.gates.layers import layers_gate
from rlkernel_drift.gates.settings import configuration_gate, differences, semantics_gate
from rlkernel_drift.gates.statistics import chain, hints, outlier, position_profile, statistics_gate
from rlkernel_drift.gates.tokens import tokens_gate
from rlkernel_drift.gates.weights import weights_gate
from rlkernel_drift.inputs import Source, open_input, open_sides, train_side
from rlkernel_drift.inputs.sequences import NO_SAMPLING
from rlkernel_drift.knowledge import finding
from rlkernel_drift.layout import layout_findings
from rlkernel_drift.pair import Pair, match
from rlkernel_drift.profiles import (
    BITWISE,
    GENERAL,
    Profile,
    carried_profile,
    floor_profile,
    judge,
    load_profile,
    metric_values,
)
from rlkernel_drift.statistics import (
    Comparable,
    SequenceSums,
    TokenStatistics,
    find_lattice,
    owners,
    sequence_statistics,
    token_statistics,
    ulp_distance,
    ulp_histogram,
)
from rlkernel_drift.verdict import Finding, Gate, Histogram, Side, Token, TokenView, Verdict

_MAX_ULP_TOKENS = 4_000_000


@dataclass(frozen=True)
class Options:
    """How to compare.

    Attributes:
        profile: None chooses `floor` if given, else bits if both sides declare one contract, else the floor that a
            capsule contains, else `general`.
        keep_going: continue after a failed gate.
        floor: measured by `rlkernel-drift floor`.
        settings: corrections whose cost is reported.
        command: as typed, for the report.
        partial: one side may have few of the other's sequences; else the profile sets how many must be compared.
    """

    profile: Profile | None = None
    keep_going: bool = False
    floor: Floor | None = None
    settings: Settings = field(default_factory=Settings)
    command: list[str] = field(default_factory=list)
    partial: bool = False


def compare(
    rollout: str | Path | Capsule,
    train: str | Path | Capsule | None = None,
    *,
    profile: str | Profile | None = None,
    keep_going: bool = False,
    floor: Floor | None = None,
    settings: Settings | None = None,
    partial: bool = False,
) -> Verdict:
    """Compares two inputs; docs/drift/compare.md lists their kinds.

    Args:
        train: None if `rollout` holds both sides, as a run folder or a metrics file does.

    Raises:
        DriftError, CapsuleError: an input cannot be used (exit status 2 of the command).
    """
    chosen = load_profile(profile) if isinstance(profile, str) else profile
    options = Options(chosen, keep_going, floor, settings or Settings(), partial=partial)
    return compare_sources(*_sources(rollout, train), options)


def _sources(rollout: str | Path | Capsule, train: str | Path | Capsule | None) -> tuple[Source, Source]:
    if train is None:
        if not isinstance(rollout, Capsule):
            return open_sides(str(rollout), None)
        first = _source(rollout, "rollout")
        return first, train_side(first)
    return _source(rollout, "rollout"), _source(train, "train")


def _source(value: str | Path | Capsule, side: Literal["rollout", "train"]) -> Source:
    if isinstance(value, Capsule):
        return Source(value.manifest.engine or side, "capsule", capsule=value)
    return open_input(str(value), side)


def compare_sources(rollout: Source, train: Source, options: Options) -> Verdict:
    """Compares two opened inputs; a model must already have scored its capsule."""
    for source in (rollout, train):
        if source.model is not None and source.capsule is None:
            raise DriftError(f"{source.label} is a model, which needs a capsule on the other side, or --prompts")
    if rollout.capsule is not None and train.capsule is not None:
        _check_complete(rollout, rollout.capsule, train, train.capsule)
        layout = layout_findings(rollout.layout, train.layout)
        verdict = compare_capsules(rollout.capsule, train.capsule, options, layout)
        series = {s.metrics.path: s.metrics for s in (rollout, train) if s.metrics is not None}
        update = {
            "rollout": _side(rollout, rollout.capsule),
            "train": _side(train, train.capsule),
            "trends": [trend for metrics in series.values() for trend in trends(metrics)],
        }
        verdict = verdict.model_copy(update=update)
        for metrics in series.values():
            verdict = with_metrics(verdict, metrics, _profile(rollout.capsule, train.capsule, options))
        return verdict
    source = rollout if rollout.metrics is not None else train
    if source.metrics is None:
        raise DriftError(
            f"{rollout.label} and {train.label} cannot be compared: they have neither tokens on both sides nor metrics"
        )
    if len({s.metrics.path if s.metrics is not None else None for s in (rollout, train)}) > 1:
        first = rollout if rollout.kind == "metrics" else train
        raise DriftError(
            f"{rollout.label} and {train.label} cannot be compared: {first.label} is a metrics file, which already "
            "holds the comparison of both sides; name one metrics file alone"
        )
    return compare_metrics(source, source.metrics, options.profile, options.command)


def with_settings(rollout: Source, train: Source) -> tuple[Source, Source]:
    """Both sources; one that does not say how its log-probabilities were computed takes the other's settings.

    A diagnosis starts from there, because the search finds other settings.
    """
    found = []
    for one, other in ((rollout, train), (train, rollout)):
        if one.capsule is not None and other.capsule is not None and NO_SAMPLING in one.capsule.manifest.left_out:
            manifest, sampling = one.capsule.manifest, other.capsule.manifest.sampling
            left_out = [f"{x}, taken from {other.label}" if x == NO_SAMPLING else x for x in manifest.left_out]
            if sampling != Sampling():
                manifest = manifest.model_copy(update={"sampling": sampling, "left_out": left_out})
                one = replace(one, capsule=replace(one.capsule, manifest=manifest))
        found.append(one)
    return found[0], found[1]


def _check_complete(rollout: Source, a: Capsule, train: Source, b: Capsule) -> None:
    """Refuses a file of sequences that lacks prompts or sampling settings which the other side has.

    Raises:
        DriftError: it names the missing field.
    """
    for one, mine, other, theirs in ((rollout, a, train, b), (train, b, rollout, a)):
        if NO_SAMPLING in mine.manifest.left_out and theirs.manifest.sampling != Sampling():
            declared = theirs.manifest.sampling.model_dump_json(exclude_defaults=True)
            raise DriftError(
                f"{one.label} does not say how its log-probabilities were computed, but {other.label} does: add "
                f'"sampling": {declared} to its records, or the settings with which they were computed'
            )
    for one, mine, other, theirs in ((rollout, a, train, b), (train, b, rollout, a)):
        bare = [bool(side.mask[side.cu_seqlens[:-1]].all()) for side in (mine, theirs)]
        if bare == [True, False] and one.kind == "sequences":
            raise DriftError(
                f"{one.label} has no prompt_token_ids, and {other.label} has prompts; write prompt_token_ids into "
                "both, or leave the prompts out of both"
            )


# ---- capsules ------------------------------------------------------------------------------------------------------


def compare_capsules(rollout: Capsule, train: Capsule, options: Options, layout: Sequence[Finding] = ()) -> Verdict:
    """All gates over two capsules.

    Args:
        layout: findings of `layout_findings`, which belong to the gate of the tokens.
    """
    pair = match(rollout, train)
    profile = _profile(rollout, train, options)
    compared = pair.compared()
    verdict = new_verdict(
        profile,
        options.command,
        rollout=_side(Source(rollout.manifest.engine or "rollout", "capsule"), rollout),
        train=_side(Source(train.manifest.engine or "train", "capsule"), train),
        differences=differences(pair),
    )
    checks: dict[str, Callable[[], Gate]] = {
        "schema": lambda: schema_gate(pair),
        "weights": lambda: weights_gate(pair),
        "tokens": lambda: tokens_gate(pair, layout),
        "semantics": lambda: semantics_gate(pair),
        "configuration": lambda: configuration_gate(pair),
        "statistics": lambda: _statistics(pair, compared, profile, verdict, options),
        "layers": lambda: _layers(pair, profile, verdict),
    }
    stopped = False
    for name, run in checks.items():
        if stopped:
            reason = "an earlier gate failed; --keep-going continues"
            verdict.gates.append(Gate(name=name, title=TITLES[name], status="not reached", summary=reason))
            continue
        result = run()
        verdict.gates.append(result)
        # After a failed statistics gate the layers show where the difference begins.
        stopped = result.status == "failed" and name != "statistics" and not options.keep_going
    verdict.scope = _scope(pair, compared, profile)
    return conclude(verdict)


def _profile(rollout: Capsule, train: Capsule, options: Options) -> Profile:
    if options.profile is not None:
        return options.profile
    if options.floor is not None:
        return floor_profile(options.floor)
    a, b = rollout.manifest, train.manifest
    if a.contract is not None and a.contract == b.contract:
        return BITWISE
    return carried_profile(a, b) or GENERAL


def _statistics(pair: Pair, compared: Comparable | None, profile: Profile, verdict: Verdict, options: Options) -> Gate:
    if compared is None:
        return skipped("statistics", "a side has no log-probabilities")
    sums = SequenceSums(compared, pair.rollout.cu_seqlens)
    verdict.statistics = token_statistics(compared)
    verdict.sequence_statistics = sequence_statistics(sums)
    # Statistics of placeholders are not judged, and invalid values are not evidence for a cause.
    judged = bool(verdict.statistics.tokens) and not verdict.statistics.constant
    valid = judged and not verdict.statistics.invalid
    values = metric_values(verdict.statistics, verdict.sequence_statistics) if judged else {}
    verdict.metrics = judge(profile, values)
    verdict.lattice = find_lattice(compared.d) if valid else None
    index = compared.index[:_MAX_ULP_TOKENS]
    verdict.ulps = ulp_histogram(ulp_distance(compared.rollout[index], compared.train[index]))
    verdict.tokens = token_view(pair, compared)
    verdict.consequences = consequences(compared, sums, options.settings) if valid else []
    verdict.factors = _factors(pair)
    verdict.coverage = pair.coverage
    result = statistics_gate(
        verdict.statistics,
        verdict.metrics,
        [*chain(verdict.factors), *hints(pair, compared, verdict.lattice)],
        _links(profile, verdict.factors),
        outlier(pair, compared),
    )
    if result.status not in ("passed", "warned"):
        return result
    tokens = verdict.statistics.tokens
    if tokens < profile.tokens:
        count = "1 token was" if tokens == 1 else f"{tokens} tokens were"
        return skipped("statistics", f"only {count} compared; at least {profile.tokens} are needed to call it aligned")
    if verdict.coverage.share < (0.0 if options.partial else profile.coverage):
        words = f"only {verdict.coverage} were compared; provide all of them on both sides, or pass --partial"
        return skipped("statistics", words)
    return result


def _links(profile: Profile, factors: dict[str, TokenStatistics]) -> list[Finding]:
    """Links of the chain that exceed the profile, even if the judged streams do not."""
    found = []
    for name, link in factors.items():
        over = [m for m in judge(profile, metric_values(link, None)) if m.status == "over"] if link.tokens else []
        if over:
            message = f"{name}: {over[0].label} is {over[0].value:.4g}, which the profile would not allow"
            found.append(finding("drift", message, "warning", link=name))
    return found


def _factors(pair: Pair) -> dict[str, TokenStatistics]:
    """Statistics of each link of the chain train, prefill, decode, recorded for which both streams exist."""
    found = {}
    for values in ("processed", "raw"):
        known = {p: pair.rollout.logprobs.get(f"{p}.{values}") for p in ("prefill", "decode", "recorded")}
        streams = {phase: stream for phase, stream in known.items() if stream is not None}
        if "prefill" in streams and f"train.{values}" in pair.train.logprobs:
            compared = pair.compared((f"prefill.{values}", f"train.{values}"))
            if compared is not None:
                found[f"train/prefill ({values})"] = token_statistics(compared)
        for left, right in pairwise(streams):
            link = Comparable(streams[right], streams[left], pair.rollout.mask)
            found[f"{left}/{right} ({values})"] = token_statistics(link)
    return found


def _layers(pair: Pair, profile: Profile, verdict: Verdict) -> Gate:
    result, verdict.layers = layers_gate(pair, profile.bitwise)
    return result


def _scope(pair: Pair, compared: Comparable | None, profile: Profile) -> str:
    tokens = 0 if compared is None else len(compared.d)
    streams = pair.streams()
    which = f"{streams[0]} against {streams[1]}" if streams else "no log-probabilities"
    bar = f"; bar: {profile.title}" if profile.name == "floor" else ""
    return f"{tokens} tokens, compared {pair.coverage}; {which}{bar}"


def _side(source: Source, capsule: Capsule) -> Side:
    m = capsule.manifest
    return Side(
        label=source.label,
        kind=source.kind,
        engine=m.engine,
        stream=capsule.stream,
        contract=m.contract,
        model=m.model.name,
        step=m.step,
        weights_version=m.weights.version if m.weights else None,
        tokens=capsule.tokens,
        sequences=capsule.sequences,
        sampling=m.sampling.model_dump(),
        config=m.config,
        versions=m.versions,
        hardware=m.hardware,
        command=m.command,
    )


# ---- tokens for the report -------------------------------------------------------------------------------------------


_WORST = 50  # tokens of the table
_STRIP_SEQUENCES = 4
_STRIP_TOKENS = 400  # of each sequence
_SCATTER = 2000  # points


def token_view(pair: Pair, compared: Comparable) -> TokenView:
    """The view of a comparison."""
    if not len(compared.d):
        return TokenView()
    size = np.abs(compared.d)
    worst = np.argsort(-size, kind="stable")[:_WORST]
    difference = np.full(pair.rollout.tokens, np.nan)
    difference[compared.index] = compared.d
    train = np.full(pair.rollout.tokens, np.nan)
    train[compared.index] = compared.t
    make = lambda token: _token(pair, int(token), compared, difference, train)
    owner = owners(pair.rollout.cu_seqlens, compared.index[worst])
    sequences = list(dict.fromkeys(int(i) for i in owner))[:_STRIP_SEQUENCES]
    strips = [[make(t) for t in _window(pair, i, compared.index[worst], owner)] for i in sequences]
    step = max(1, len(compared.d) // _SCATTER)
    limit = float(np.quantile(size, 0.999)) or float(size.max()) or 1e-6
    counts, edges = np.histogram(np.clip(compared.d, -limit, limit), bins=81, range=(-limit, limit))
    return TokenView(
        worst=[make(compared.index[i]) for i in worst if size[i] > 0],
        strip=strips,
        scatter=[(float(r), float(t)) for r, t in zip(compared.r[::step], compared.t[::step], strict=True)],
        signed=Histogram(edges=edges.tolist(), counts=counts.tolist()),
        by_position=position_profile(pair, compared),
    )


def _window(pair: Pair, sequence: int, worst: np.ndarray, owner: np.ndarray) -> range:
    """The tokens of a sequence, or those around its worst one if the sequence is too long."""
    tokens = pair.rollout.sequence(sequence)
    if tokens.stop - tokens.start <= _STRIP_TOKENS:
        return range(tokens.start, tokens.stop)
    centre = int(worst[owner == sequence][0])
    begin = min(max(tokens.start, centre - _STRIP_TOKENS // 2), tokens.stop - _STRIP_TOKENS)
    return range(begin, begin + _STRIP_TOKENS)


def _token(pair: Pair, token: int, compared: Comparable, difference: np.ndarray, train: np.ndarray) -> Token:
    sequence, index = pair.rollout.place(token)
    identity = int(pair.rollout.ids[token])
    text = pair.rollout.text(identity)
    return Token(
        sequence=sequence,
        index=index,
        position=int(pair.rollout.positions[token]),
        id=identity,
        text=text if text is not None else pair.train.text(identity),
        rollout=_number(compared.rollout[token]),
        train=_number(train[token]),
        difference=_number(difference[token]),
        span=_span(pair, sequence, index),
    )


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _span(pair: Pair, sequence: int, index: int) -> str:
    spans = pair.rollout.spans
    if spans is None:
        return ""
    mine = spans[(spans[:, 0] == sequence) & (spans[:, 1] <= index) & (index < spans[:, 2])]
    return SpanKind(int(mine[0, 3])).name.lower() if len(mine) else ""
