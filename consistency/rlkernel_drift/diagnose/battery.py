"""Runs the battery over one side: every hypothesis once, then a temperature on top of the most promising bodies.

Hypotheses about what the numbers mean are defined here (temperature, kept tokens, padded vocabulary, a shift by one
token, precision); those about how the body was computed are in `diagnose.bodies`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rlkernel_drift.capsule import Floor
from rlkernel_drift.diagnose.bodies import body_battery
from rlkernel_drift.diagnose.context import LAYOUTS, Context, correlation
from rlkernel_drift.diagnose.hypothesis import Hypothesis, Prediction, Trial
from rlkernel_drift.scoring.model import Head, Layout, name_of
from rlkernel_drift.scoring.semantics import (
    Scaled,
    SortedLogits,
    distance,
    fit_min_p,
    fit_temperature,
    fit_top_k,
    fit_top_p,
    golden,
    scan,
)

BF16, FP16 = torch.bfloat16, torch.float16
_LAYOUTS = (("right padding", Layout("right")), *LAYOUTS)
_CORRELATED = 0.2
_MOST_DECIMALS = 5
_TEMPERATURES = [0.3 * 1.1**i for i in range(24)]
_FEW_ROWS, _VALLEYS = 160, 2
_PAIRED = 3

Fit = Callable[[Scaled, Tensor], tuple[dict[str, float], float]]
"""Fits the setting of one filter to a target: the setting, and the distance that it leaves."""

_FILTERS: dict[str, Fit] = {"top-p": fit_top_p, "top-k": fit_top_k, "min-p": fit_min_p}


class KnownLogits:
    """Logits of the tokens whose target is finite, sorted once for all hypotheses on their meaning."""

    def __init__(self, context: Context, hidden: Tensor, weight: Tensor | None = None) -> None:
        self.context = context
        self.logits = context.model.head(hidden, context.head, weight)
        self.targets = context.sequences.targets.to(self.logits.device)
        target = context.target.to(self.logits.device)
        self.known = torch.isfinite(target)
        self.rows = SortedLogits(self.logits[self.known], self.targets[self.known])
        self.own = target[self.known]

    def spread(self, parameters: dict[str, float], values: Tensor) -> Prediction:
        """Values of the known tokens as a prediction for all tokens."""
        full = torch.full(self.known.shape, torch.nan, dtype=self.own.dtype)
        full[self.known.cpu()] = values.cpu()
        return Prediction(full, dict(parameters))


# ---- what the numbers mean -----------------------------------------------------------------------------------------


def semantic_battery(context: Context, hidden: Tensor) -> Iterator[Hypothesis]:
    """Hypotheses on the logits of the declared computation."""
    base = KnownLogits(context, hidden)
    scaled = base.rows.at(context.temperature)
    temperature = lambda _: base.spread(*fit_temperature(base.rows, base.own))
    yield Hypothesis("another temperature", "temperature", temperature)
    for name, fit in _FILTERS.items():
        yield from _filtered(base, scaled, name, fit)
    decimals = _decimals(base.own)
    if decimals is not None:
        name = f"log-probabilities rounded to {decimals} decimals"
        digits = lambda c: Prediction(c.predict(hidden).round(decimals=decimals), {"decimals": decimals})
        yield Hypothesis(name, "rounded-records", digits, rounds=True)
    yield Hypothesis("padding entries of the vocabulary in the sum", "padded-vocabulary", lambda _: _padded(base))
    yield Hypothesis("shifted by one token, earlier", "off-by-one", lambda _: _shifted(base, 1))
    yield Hypothesis("shifted by one token, later", "off-by-one", lambda _: _shifted(base, -1))


def _filtered(base: KnownLogits, scaled: Scaled, name: str, fit: Fit) -> Iterator[Hypothesis]:
    """A filter at the declared temperature, and one at a fitted temperature."""

    def declared(_: Context) -> Prediction:
        parameters, _distance = fit(scaled, base.own)
        return base.spread(parameters, _kept(scaled, parameters))

    yield Hypothesis(f"renormalised over {name}", name, declared)
    both = f"another temperature, and renormalised over {name}"
    yield Hypothesis(both, name, lambda _: _with_temperature(base, fit), frozenset({"temperature"}))


def _decimals(values: Tensor) -> int | None:
    """Decimals to which all values are rounded, up to fp32's precision; None without such a number or if all are 0."""
    exact = values.double()
    fits = lambda n: bool(((exact - exact.round(decimals=n)).abs() <= exact.abs() * 2.0**-24).all())
    return next((n for n in range(1, _MOST_DECIMALS + 1) if fits(n)), None) if exact.any() else None


def _kept(rows: Scaled, parameters: dict[str, float]) -> Tensor:
    return rows.processed(**parameters)  # type: ignore[arg-type]


def _with_temperature(base: KnownLogits, fit: Fit) -> Prediction | None:
    """Fits the temperature with an exact fit of the filter at each step, first on a few rows, then on all of them."""
    few = slice(0, _FEW_ROWS)
    rows = SortedLogits(base.logits[base.known][few], base.targets[base.known][few])
    own = base.own[few]
    error = lambda t: fit(rows.at(t), own)[1]
    values = [error(t) for t in _TEMPERATURES]
    order = sorted(range(len(values)), key=values.__getitem__)
    if values[order[0]] > 0.8 * error(base.context.temperature):
        return None
    around = lambda i: (_TEMPERATURES[max(0, i - 1)], _TEMPERATURES[min(len(values) - 1, i + 1)])
    t, _ = min((golden(error, *around(i), 14) for i in order[:_VALLEYS]), key=lambda found: found[1])
    t, _ = golden(lambda t: fit(base.rows.at(t), base.own)[1], t * 0.98, t * 1.02, 12)
    # Near the optimum the kept sets no longer change, so the last steps fit the temperature for fixed sets.
    for width in (2e-3, 1e-4):
        parameters, _ = fit(base.rows.at(t), base.own)
        fixed = lambda x: distance(_kept(base.rows.at(x), parameters), base.own)  # noqa: B023
        t, _ = golden(fixed, t * (1 - width), t * (1 + width), 16)
    scaled = base.rows.at(t)
    parameters, _ = fit(scaled, base.own)
    return base.spread({"temperature": t, **parameters}, _kept(scaled, parameters))


def _padded(base: KnownLogits) -> Prediction:
    """`entries` further vocabulary entries with logit zero, as a head padded with zero rows has."""
    t = base.context.temperature
    lse = (base.rows.sorted / t).logsumexp(-1)
    own = base.rows.own / t
    error = lambda log_count: distance(own - torch.logaddexp(lse, torch.full_like(lse, log_count)), base.own)
    best, _ = scan(error, [i / 2 for i in range(0, 24)], 30)
    count = max(1, round(math.exp(best)))
    log_count = torch.tensor(float(count)).log().to(lse)
    return base.spread({"entries": count}, own - torch.logaddexp(lse, log_count))


def _shifted(base: KnownLogits, lag: int) -> Prediction:
    z = base.logits / base.context.temperature
    as_is = (z.gather(1, base.targets[:, None])[:, 0] - z.logsumexp(-1)).cpu()
    owner = base.context.sequences.owner
    moved = torch.roll(as_is, lag)
    same = owner == torch.roll(owner, lag)
    inside = torch.arange(len(owner)) >= lag if lag > 0 else torch.arange(len(owner)) < len(owner) + lag
    return Prediction(torch.where(same & inside, moved, torch.full_like(moved, torch.nan)), {"tokens": lag})


# ---- precision -----------------------------------------------------------------------------------------------------


def precision_battery(context: Context, hidden: Tensor) -> Iterator[Hypothesis]:
    """Hypotheses about rounding in the head and in the body."""
    fp32 = Head()
    choices = [
        ("logits rounded to bfloat16", "bf16-logits", Head(logits=BF16)),
        ("head and logits in bfloat16", "bf16-logits", Head(inputs=BF16, logits=BF16)),
        ("log-probabilities rounded to bfloat16", "bf16-logits", Head(logits=BF16, logprobs=BF16)),
        ("logits rounded to float16", "bf16-logits", Head(logits=FP16)),
        ("head in bfloat16", "head-dtype", Head(inputs=BF16)),
        ("head in float16", "head-dtype", Head(inputs=FP16)),
        ("head in float32", "head-dtype", fp32),
    ]
    for name, cause, head in choices:
        if head == context.head or (hidden.dtype == head.inputs and head.logits is None):
            continue
        predict = lambda c, head=head: Prediction(c.predict(hidden, head))
        yield Hypothesis(name, cause, predict, rounds=head != fp32)
    for dtype in (torch.float32, BF16, FP16):
        if dtype == context.dtype:
            continue
        name, paths = f"layers in {name_of(dtype)}", _paths(context, hidden, dtype)
        yield _layers(name, paths, dtype, None)
        if dtype != torch.float32:
            yield _layers(f"{name}, logits too", paths, dtype, Head(logits=dtype))


def _layers(name: str, paths: dict[str, Tensor], dtype: torch.dtype, head: Head | None) -> Hypothesis:
    """Layers in another dtype, by the path that leaves least."""

    def nearest(c: Context) -> Prediction:
        known = torch.isfinite(c.target)
        error = lambda values: distance(values[known], c.target[known])
        values = {path: c.predict(hidden, head) for path, hidden in paths.items()}
        best = min(values, key=lambda path: error(values[path]))
        return Prediction(values[best], {"path": best} if best else {})

    implies = frozenset({"bf16-logits"}) if head is not None else frozenset()
    return Hypothesis(name, "body-dtype", nearest, implies, dtype=name_of(dtype))


def _paths(context: Context, hidden: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Hidden states in another dtype, by how they were computed.

    Rounding errors depend on kernels, layout and cache, so that those of one path do not remove those of another. The
    other paths are computed only where the errors of the first correlate with the side's differences.
    """
    found = {"": context.hidden(dtype=dtype)}
    as_is = context.predict(hidden)
    correlated = correlation(context.predict(found[""]) - as_is, context.target - as_is)
    if dtype == torch.float32 or correlated <= _CORRELATED:
        return found
    model = context.model.in_dtype(dtype)
    before = model.config._attn_implementation
    try:
        for kernel in context.model.kernels:
            model.set_attn_implementation(kernel)
            found |= {f"{kernel}, {name}": context.hidden(layout=layout, dtype=dtype) for name, layout in _LAYOUTS}
            found[f"{kernel}, decoded with a cache"] = context.decoded(dtype)
    finally:
        model.set_attn_implementation(before)
    return found


# ---- trials --------------------------------------------------------------------------------------------------------


def run_battery(context: Context, as_is: Tensor, hidden: Tensor, floor: Floor) -> list[Trial]:
    """All trials, in the order of the battery.

    Args:
        as_is: [N] prediction of the declared computation; hidden: [N, C] its hidden states.
    """
    trials = []
    for battery in (semantic_battery(context, hidden), precision_battery(context, hidden), body_battery(context)):
        for hypothesis in battery:
            prediction = hypothesis.predict(context)
            if prediction is not None:
                trials += _trials(context, hypothesis, prediction, as_is, floor)
    if not any(trial.near(floor) for trial in trials):
        trials += _paired(context, trials)
    return trials


def _trials(
    context: Context, hypothesis: Hypothesis, prediction: Prediction, as_is: Tensor, floor: Floor
) -> list[Trial]:
    """The hypothesis for all sequences, and for those that it explains better while the others are as declared."""
    owner, count = context.sequences.owner, len(context.sequences)
    every = Trial(hypothesis, prediction, context.residual(prediction.values))
    if every.near(floor) or count < 2:
        return [every]
    before, after = context.residual(as_is).sequences, every.residual.sequences
    better = (after < before) | (torch.isnan(before) & ~torch.isnan(after))
    affected = better.nonzero()[:, 0].tolist()
    if not 0 < len(affected) < count:
        return [every]
    mixed = torch.where(better[owner], prediction.values, as_is)
    part = Prediction(mixed, {**prediction.parameters, "sequences": len(affected)})
    return [every, Trial(hypothesis, part, context.residual(mixed), affected)]


def _paired(context: Context, trials: list[Trial]) -> list[Trial]:
    """A temperature on top of the bodies that leave least, for two faults at once."""
    bodies = [t for t in trials if t.prediction.hidden is not None and t.affected is None]
    found = []
    for trial in sorted(bodies, key=lambda t: t.residual.mean)[:_PAIRED]:
        assert trial.prediction.hidden is not None
        base = KnownLogits(context, trial.prediction.hidden, trial.prediction.weight)
        prediction = base.spread(*fit_temperature(base.rows, base.own))
        one = trial.hypothesis
        both = Hypothesis(f"{one.name}, and another temperature", one.cause, one.predict, one.causes | {"temperature"})
        parameters = {**trial.prediction.parameters, **prediction.parameters}
        found.append(Trial(both, Prediction(prediction.values, parameters), context.residual(prediction.values)))
    return found
