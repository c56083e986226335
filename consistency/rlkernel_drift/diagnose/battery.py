"""The battery, run over one side: every hypothesis once, then settings on top of the most promising bodies.

Hypotheses about what the numbers mean are made here (temperature, kept tokens, padded vocabulary, a shift by one,
precision); those about how the body was computed in `diagnose.bodies`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from rlkernel_drift.capsule import Floor
from rlkernel_drift.diagnose.bodies import body_battery
from rlkernel_drift.diagnose.context import LAYOUTS, Context
from rlkernel_drift.diagnose.hypothesis import Hypothesis, Prediction, Trial, best_of, residual, together
from rlkernel_drift.scoring.model import Head, Layout
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
_TOGETHER = 0.2
_LAYOUTS = (("right padding", Layout("right")), *LAYOUTS)


class Fit(Protocol):
    """Fits one filter's setting to a target: the setting, and the distance that it leaves."""

    def __call__(self, rows: Scaled, target: Tensor) -> tuple[dict[str, float], float]: ...


_FILTERS: tuple[tuple[str, str, Fit], ...] = (
    ("top-p", "top-p", fit_top_p),
    ("top-k", "top-k", fit_top_k),
    ("min-p", "min-p", fit_min_p),
)


class Base:
    """Logits of the declared computation, sorted once for all semantic hypotheses."""

    def __init__(self, context: Context, hidden: Tensor, weight: Tensor | None = None) -> None:
        self.context = context
        self.logits = context.model.head(hidden, context.head, weight)
        self.target = context.target.to(self.logits.device)
        self.targets = context.sequences.targets.to(self.logits.device)
        # Tokens that are NaN on this side say nothing about a setting.
        self.known = torch.isfinite(self.target)
        self.rows = SortedLogits(self.logits[self.known], self.targets[self.known])
        self.own = self.target[self.known]

    def spread(self, fitted: tuple[dict[str, float], Tensor]) -> Prediction:
        """Parameters and values of the known tokens as a prediction for all."""
        parameters, values = fitted
        full = torch.full_like(self.target, torch.nan)
        full[self.known] = values
        return Prediction(full.cpu(), dict(parameters))


def semantic_battery(context: Context, hidden: Tensor) -> Iterator[Hypothesis]:
    """Hypotheses on the logits of the declared computation."""
    base = Base(context, hidden)
    declared = context.sampling.temperature or 1.0
    scaled = base.rows.at(declared)

    yield Hypothesis("another temperature", "temperature", lambda _: base.spread(fit_temperature(base.rows, base.own)))
    for name, cause, fit in _FILTERS:

        def filtered(_: Context, fit: Fit = fit) -> Prediction:
            parameters, _distance = fit(scaled, base.own)
            return base.spread((parameters, _kept(scaled, parameters)))

        def tempered(_: Context, fit: Fit = fit) -> Prediction | None:
            return _with_temperature(base, fit)

        yield Hypothesis(f"renormalised over {name}", cause, filtered)
        implied = frozenset({"temperature"})
        yield Hypothesis(f"another temperature, and renormalised over {name}", cause, tempered, implied)
    decimals = _decimals(base.own)
    if decimals is not None:
        name = f"log-probabilities rounded to {decimals} decimals"
        digits = lambda c: Prediction(c.predict(hidden).round(decimals=decimals), {"decimals": decimals})
        yield Hypothesis(name, "rounded-records", digits, rounds=True)
    yield Hypothesis("padding entries of the vocabulary in the sum", "padded-vocabulary", lambda _: _padded(base))
    for lag in (1, -1):
        way = "earlier" if lag > 0 else "later"
        yield Hypothesis(f"shifted by one token, {way}", "off-by-one", lambda _, lag=lag: _shifted(base, lag))  # type: ignore[misc]


def _decimals(values: Tensor) -> int | None:
    """Decimals that all values are rounded to, as fp32 holds such numbers; None where they are not, or zero alone."""
    exact = values.double()
    fits = lambda n: bool(((exact - exact.round(decimals=n)).abs() <= exact.abs() * 2.0**-24).all())
    return next((n for n in range(1, _MOST_DECIMALS + 1) if fits(n)), None) if exact.any() else None


def _kept(rows: Scaled, parameters: dict[str, float]) -> Tensor:
    return rows.processed(**parameters)  # type: ignore[arg-type]


_MOST_DECIMALS = 5
_TEMPERATURES = [0.3 * 1.1**i for i in range(24)]
_FEW_ROWS, _VALLEYS = 160, 2


def _with_temperature(base: Base, fit: Fit) -> Prediction | None:
    """The temperature outside, the filter's exact fit inside: few rows find the valley, all rows its bottom."""
    few = slice(0, _FEW_ROWS)
    rows = SortedLogits(base.logits[base.known][few], base.targets[base.known][few])
    own = base.own[few]
    error = lambda t: fit(rows.at(t), own)[1]
    values = [error(t) for t in _TEMPERATURES]
    order = sorted(range(len(values)), key=values.__getitem__)
    if values[order[0]] > 0.8 * error(base.context.sampling.temperature or 1.0):
        return None
    around = lambda i: (_TEMPERATURES[max(0, i - 1)], _TEMPERATURES[min(len(values) - 1, i + 1)])
    t, _ = min((golden(error, *around(i), 14) for i in order[:_VALLEYS]), key=lambda found: found[1])
    whole = lambda t: fit(base.rows.at(t), base.own)[1]
    t, _ = golden(whole, t * 0.98, t * 1.02, 12)
    # Near the optimum the kept sets no longer change; with them fixed, the temperature alone is fitted to the end.
    for width in (2e-3, 1e-4):
        parameters, _ = fit(base.rows.at(t), base.own)
        fixed = lambda x: distance(_kept(base.rows.at(x), parameters), base.own)  # noqa: B023
        t, _ = golden(fixed, t * (1 - width), t * (1 + width), 16)
    scaled = base.rows.at(t)
    parameters, _ = fit(scaled, base.own)
    return base.spread(({"temperature": t, **parameters}, _kept(scaled, parameters)))


def _padded(base: Base) -> Prediction:
    """`count` further entries whose logits are zero, as a head with zero rows has them."""
    t = base.context.sampling.temperature or 1.0
    lse = (base.rows.sorted / t).logsumexp(-1)
    own = base.rows.own / t
    error = lambda log_count: distance(own - torch.logaddexp(lse, torch.full_like(lse, log_count)), base.own)
    best, _ = scan(error, [i / 2 for i in range(0, 24)], 30)
    count = max(1, round(2.718281828459045**best))
    log_count = torch.tensor(float(count)).log().to(lse)
    return base.spread(({"entries": count}, own - torch.logaddexp(lse, log_count)))


def _shifted(base: Base, lag: int) -> Prediction:
    context = base.context
    t = context.sampling.temperature or 1.0
    z = base.logits / t
    as_is = (z.gather(1, base.targets[:, None])[:, 0] - z.logsumexp(-1)).cpu()
    owner = context.sequences.owner
    moved = torch.roll(as_is, lag)
    same = owner == torch.roll(owner, lag)
    inside = torch.arange(len(owner)) >= lag if lag > 0 else torch.arange(len(owner)) < len(owner) + lag
    return Prediction(torch.where(same & inside, moved, torch.full_like(moved, torch.nan)), {"tokens": lag})


# ---- precision -----------------------------------------------------------------------------------------------------


def precision_battery(context: Context, hidden: Tensor) -> Iterator[Hypothesis]:
    """Hypotheses about rounding in the head and in the body."""
    head = context.head
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
    for name, cause, wanted in choices:
        if wanted == head or (hidden.dtype == wanted.inputs and wanted.logits is None):
            continue
        predict = lambda c, wanted=wanted: Prediction(c.predict(hidden, wanted))
        yield Hypothesis(name, cause, predict, rounds=wanted != fp32)
    for dtype in (torch.float32, BF16, FP16):
        if dtype == context.dtype:
            continue
        short = str(dtype).removeprefix("torch.")
        name = f"layers in {short}"
        rounded = _paths(context, hidden, dtype)
        yield Hypothesis(name, "body-dtype", lambda c, x=rounded: _nearest(c, x, None), dtype=short)  # type: ignore[misc]
        if dtype != torch.float32:
            native = lambda c, x=rounded, head=Head(logits=dtype): _nearest(c, x, head)
            implied = frozenset({"bf16-logits"})
            yield Hypothesis(f"{name}, logits too", "body-dtype", native, implied, dtype=short)


def _paths(context: Context, hidden: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Hidden states in another dtype, by how they were computed.

    Rounding depends on kernels, layout and cache: one path's errors do not remove another's. Paths behind the first are
    computed only where that one's errors go with the side's differences.
    """
    found = {"": context.hidden(dtype=dtype)}
    as_is = context.predict(hidden)
    alike = together(context.predict(found[""]) - as_is, context.target - as_is)
    if dtype == torch.float32 or alike <= _TOGETHER:
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


def _nearest(context: Context, paths: dict[str, Tensor], head: Head | None) -> Prediction:
    """The path that leaves least."""
    known = torch.isfinite(context.target)
    error = lambda values: distance(values[known], context.target[known])
    values = {path: context.predict(hidden, head) for path, hidden in paths.items()}
    best = min(values, key=lambda path: error(values[path]))
    return Prediction(values[best], {"path": best} if best else {})


_PAIRED = 3


def run_battery(context: Context, as_is: torch.Tensor, hidden: torch.Tensor, floor: Floor) -> list[Trial]:
    """All trials, in the order of the battery.

    Args:
        as_is: [N] prediction of the declared computation; hidden: [N, C] its hidden states.
    """
    trials = []
    for hypothesis in _hypotheses(context, hidden):
        prediction = hypothesis.predict(context)
        if prediction is not None:
            trials += _trials(context, hypothesis, prediction, as_is, floor)
    if not any(trial.near(floor) for trial in trials):
        trials += _paired(context, trials)
    return trials


def _hypotheses(context: Context, hidden: torch.Tensor) -> Iterator[Hypothesis]:
    yield from semantic_battery(context, hidden)
    yield from precision_battery(context, hidden)
    yield from body_battery(context)


def trial_of(context: Context, hypothesis: Hypothesis, prediction: Prediction) -> Trial:
    """A hypothesis with what it leaves, for all sequences."""
    left = residual(prediction.values, context.target, context.sequences.owner, len(context.sequences))
    return Trial(hypothesis, prediction, left)


def _trials(
    context: Context, hypothesis: Hypothesis, prediction: Prediction, as_is: torch.Tensor, floor: Floor
) -> list[Trial]:
    """The hypothesis for all sequences, and for some of them where the others are as declared."""
    owner, count = context.sequences.owner, len(context.sequences)
    whole = trial_of(context, hypothesis, prediction)
    if whole.near(floor) or count < 2:
        return [whole]
    mixed, affected = best_of(as_is, prediction.values, context.target, owner, count)
    if not 0 < len(affected) < count:
        return [whole]
    part = Prediction(mixed, {**prediction.parameters, "sequences": len(affected)})
    return [whole, Trial(hypothesis, part, residual(mixed, context.target, owner, count), affected)]


def _paired(context: Context, trials: list[Trial]) -> list[Trial]:
    """A temperature on top of the bodies that leave least: two faults at once."""
    bodies = [t for t in trials if t.prediction.hidden is not None and t.affected is None]
    bodies.sort(key=lambda t: t.residual.mean)
    found = []
    for trial in bodies[:_PAIRED]:
        assert trial.prediction.hidden is not None
        base = Base(context, trial.prediction.hidden, trial.prediction.weight)
        prediction = base.spread(fit_temperature(base.rows, base.own))
        name = f"{trial.hypothesis.name}, and another temperature"
        both = Hypothesis(
            name, trial.hypothesis.cause, trial.hypothesis.predict, trial.hypothesis.causes | {"temperature"}
        )
        parameters = {**trial.prediction.parameters, **prediction.parameters}
        left = residual(prediction.values, context.target, context.sequences.owner, len(context.sequences))
        found.append(Trial(both, Prediction(prediction.values, parameters), left))
    return found
