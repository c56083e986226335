"""Statistics of two streams of log-probabilities: over tokens, over sequences, in ulps, and lattices. numpy, in fp64.

`d = train - rollout` throughout, so that `exp(d)` is the importance ratio. Values that are not finite are counted,
never averaged in.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from rlkernel_drift.capsule.tensor_file import Array, Tensor

Floats = NDArray[np.float64]

BANDS = {"strict": (0.999, 1.002), "1%": (0.99, 1.01), "5%": (0.95, 1.05)}
_SUPPORT = -1e4  # engines write -inf, -9999 or fp32's lowest for a token outside the kept set
_ABOVE = 0.05  # a head in TF32 beside a sum in fp32 lifts a certain token by less

ONE_VALUE = 0.98  # a stream with one value at more than this share of its tokens is a placeholder
_FEW = 8

# Rounding in bfloat16 has heavy tails, so one token that is far off says something only far beyond all of these.
_OUTLYING = 1.0  # nats
_SPREAD = 20.0  # times the 90% quantile of |d|, in 1000 tokens
_RELATIVE = 1 / 8  # of the log-probability: 32 roundings of a bfloat16 logit of that size


class TokenStatistics(BaseModel):
    """One comparison of two streams.

    Attributes:
        tokens: compared: masked in on both sides and finite on both.
        masked_out: tokens that do not count on either side.
        nan_rollout, nan_train, inf_rollout, inf_train: masked-in values that are not finite (-inf: see the next ones).
        support_rollout, support_train: sampled tokens that a side calls impossible (-inf, or below -10,000).
        positive: log-probabilities above zero, of both sides.
        above_rollout, above_train: those above zero by more than rounding can do.
        equal: share of tokens with the same 32 bits.
        commonest: share of the commonest value, on the side where it is larger; commonest_rollout, commonest_train.
        outliers: tokens whose |d| is too large for rounding, see `outlying`.
        mean, p50, p90, p95, p99, p999, maximum: of |d|, in nats.
        std: of d.
        bias: mean of d; above zero, training finds the tokens more likely than the rollout did.
        k1, k3: estimates of KL(rollout || train) from the rollout's samples: -mean d, and mean(exp(d) - 1 - d).
        chi_square: mean(exp(2d)) - 1.
        multiplicative: mean(exp(|d|)), NeMo-RL's token_mult_prob_error.
        probability_mean, probability_max: of |exp(train) - exp(rollout)|, verl's rollout_probs_diff.
        pearson, pearson_probability: correlation of the log-probabilities, and of the probabilities (as verl has it).
        ess: effective sample size of the token ratios, as a share of the tokens.
        ratio_mean: mean of exp(d).
        beyond_ln2: share of tokens with |d| > ln 2.
        retention: share of tokens whose ratio lies in a band.
    """

    tokens: int = 0
    masked_out: int = 0
    nan_rollout: int = 0
    nan_train: int = 0
    inf_rollout: int = 0
    inf_train: int = 0
    support_rollout: int = 0
    support_train: int = 0
    positive: int = 0
    above_rollout: int = 0
    above_train: int = 0
    equal: float = 0.0
    commonest: float = 0.0
    commonest_rollout: float = 0.0
    commonest_train: float = 0.0
    outliers: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    p999: float = 0.0
    maximum: float = 0.0
    std: float = 0.0
    bias: float = 0.0
    k1: float = 0.0
    k3: float = 0.0
    chi_square: float = 0.0
    multiplicative: float = 1.0
    probability_mean: float = 0.0
    probability_max: float = 0.0
    pearson: float | None = None
    pearson_probability: float | None = None
    ess: float = 1.0
    ratio_mean: float = 1.0
    beyond_ln2: float = 0.0
    retention: dict[str, float] = {}

    @property
    def constant(self) -> bool:
        """Whether nearly all values of a side are one value: a placeholder, no log-probability."""
        return self.tokens >= _FEW and self.commonest > ONE_VALUE

    @property
    def invalid(self) -> bool:
        """Whether a side has values that no log-probability of a sampled token can have; see gate 6."""
        names = ("nan", "inf", "support", "above")
        return any(getattr(self, f"{name}_{side}") for name in names for side in ("rollout", "train"))

    @property
    def mismatched(self) -> int:
        """Compared tokens whose bits differ."""
        return self.tokens - round(self.equal * self.tokens)


class Comparable:
    """The tokens of two streams that can be compared, and counts of the others.

    Attributes:
        index: [N] packed tokens that are finite on both sides and masked in.
        d: [N] fp64.
    """

    def __init__(
        self,
        rollout: NDArray[np.float32],  # [T]
        train: NDArray[np.float32],  # [T]
        mask: NDArray[np.bool_],  # [T]
    ) -> None:
        self.rollout, self.train, self.mask = rollout, train, mask
        impossible = [mask & (values <= _SUPPORT) for values in (rollout, train)]
        self.support = impossible[0] | impossible[1]
        finite = np.isfinite(rollout) & np.isfinite(train) & mask & ~self.support
        self.index = np.flatnonzero(finite)
        self.r = rollout[self.index].astype(np.float64)
        self.t = train[self.index].astype(np.float64)
        self.d: Floats = self.t - self.r
        self.counts: dict[str, Any] = {
            "tokens": len(self.index),
            "masked_out": int((~mask).sum()),
            "nan_rollout": int((np.isnan(rollout) & mask).sum()),
            "nan_train": int((np.isnan(train) & mask).sum()),
            "inf_rollout": int((np.isposinf(rollout) & mask).sum()),
            "inf_train": int((np.isposinf(train) & mask).sum()),
            "support_rollout": int(impossible[0].sum()),
            "support_train": int(impossible[1].sum()),
            "positive": int((self.r > 0).sum() + (self.t > 0).sum()),
            "above_rollout": int((self.r > _ABOVE).sum()),
            "above_train": int((self.t > _ABOVE).sum()),
        }


def token_statistics(pair: Comparable) -> TokenStatistics:
    """All token statistics of two streams."""
    if not len(pair.d):
        return TokenStatistics(**pair.counts)
    d, size = pair.d, np.abs(pair.d)
    # Ratios beyond e^80 would overflow their squares; such a token is a finding long before.
    ratio = np.exp(np.clip(d, -80, 80))
    same = pair.rollout[pair.index].view(np.int32) == pair.train[pair.index].view(np.int32)
    probability = np.abs(np.exp(np.minimum(pair.t, 0)) - np.exp(np.minimum(pair.r, 0)))
    commonest = _commonest(pair.r), _commonest(pair.t)
    p50, p90, p95, p99, p999 = np.quantile(size, (0.5, 0.9, 0.95, 0.99, 0.999))
    return TokenStatistics(
        **pair.counts,
        equal=float(same.mean()),
        commonest=max(commonest),
        commonest_rollout=commonest[0],
        commonest_train=commonest[1],
        outliers=int(outlying(pair).sum()),
        mean=float(size.mean()),
        p50=float(p50),
        p90=float(p90),
        p95=float(p95),
        p99=float(p99),
        p999=float(p999),
        maximum=float(size.max()),
        std=float(d.std()),
        bias=float(d.mean()),
        k1=float(-d.mean()),
        k3=k3(d),
        chi_square=float((ratio * ratio).mean() - 1),
        multiplicative=float(np.exp(np.minimum(size, 80)).mean()),
        probability_mean=float(probability.mean()),
        probability_max=float(probability.max()),
        pearson=pearson(pair.r, pair.t),
        pearson_probability=pearson(np.exp(pair.r), np.exp(pair.t)),
        ess=effective_sample_size(d),
        ratio_mean=float(ratio.mean()),
        beyond_ln2=float((size > math.log(2)).mean()),
        retention={name: float(((ratio >= low) & (ratio <= high)).mean()) for name, (low, high) in BANDS.items()},
    )


def outlying(pair: Comparable) -> NDArray[np.bool_]:  # [N]
    """Tokens that are too far off for rounding: beyond a nat, the spread of the others and their own size.

    The largest of n draws from a tail that falls with the cube grows with the cube root of n, and so does the bound.
    """
    size = np.abs(pair.d)
    if not len(size):
        return np.zeros(0, np.bool_)
    # The lower quantile: in a few tokens the other one would mix in the outlier itself.
    spread = float(np.quantile(size, 0.9, method="lower"))
    least = max(_OUTLYING, _SPREAD * spread * max(1.0, len(size) / 1000) ** (1 / 3))
    return size > np.maximum(least, _RELATIVE * np.maximum(np.abs(pair.r), np.abs(pair.t)))


def _commonest(values: Floats) -> float:
    return float(np.unique(values, return_counts=True)[1].max() / len(values))


def k3(d: Floats) -> float:
    """mean(exp(d) - 1 - d), without cancellation for small d."""
    clipped = np.clip(d, -80, 80)
    return float((np.expm1(clipped) - clipped).mean())


def pearson(x: Floats, y: Floats) -> float | None:
    """Correlation; None where a side is constant."""
    a, b = x - x.mean(), y - y.mean()
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale > 0 else None


def effective_sample_size(log_weights: Floats) -> float:
    """(sum w)^2 / (n sum w^2) of weights given by their logarithms."""
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights * weights).sum()))


_FEW_IN_SEQUENCE = 8  # tokens: a standard error of fewer says little
_ERRORS = 3.0


class SequenceStatistics(BaseModel):
    """Statistics over sequences.

    Attributes:
        sequences: with at least one compared token.
        sum_mean, sum_max: of |sum of d|; sum_bias: mean of the sum.
        ess: effective sample size of the sequence ratios, as a share of the sequences.
        retention: share of sequences whose geometric mean ratio lies in a band.
        mean_of_means: mean over sequences of their mean |d|; differs from the mean over tokens where lengths do.
        worst_mean: the largest mean |d| of a sequence, less three of its standard errors; sequences of a few tokens
            count in no other sum.
        bias: |mean of d| over all tokens less three standard errors, 0 where chance explains it.
    """

    sequences: int = 0
    sum_mean: float = 0.0
    sum_max: float = 0.0
    sum_bias: float = 0.0
    ess: float = 1.0
    retention: dict[str, float] = {}
    mean_of_means: float = 0.0
    worst_mean: float = 0.0
    bias: float = 0.0


class SequenceSums:
    """Sums of each sequence.

    Attributes:
        sequence: [B'] numbers of the sequences that have compared tokens.
        count: [B'] compared tokens.
        total: [B'] sum of d; size: [B'] sum of |d|; square: [B'] sum of d^2.
    """

    def __init__(self, pair: Comparable, cu_seqlens: NDArray[np.int64]) -> None:
        owner = np.searchsorted(cu_seqlens, pair.index, side="right") - 1
        number = len(cu_seqlens) - 1
        count = np.bincount(owner, minlength=number)
        self.sequence = np.flatnonzero(count)
        self.count: Floats = count[self.sequence].astype(np.float64)
        self.total: Floats = np.bincount(owner, pair.d, number).astype(np.float64)[self.sequence]
        self.size: Floats = np.bincount(owner, np.abs(pair.d), number).astype(np.float64)[self.sequence]
        self.square: Floats = np.bincount(owner, pair.d * pair.d, number).astype(np.float64)[self.sequence]


def sequence_statistics(sums: SequenceSums) -> SequenceStatistics:
    """All sequence statistics."""
    if not len(sums.sequence):
        return SequenceStatistics()
    geometric = np.exp(np.clip(sums.total / sums.count, -80, 80))
    return SequenceStatistics(
        sequences=len(sums.sequence),
        sum_mean=float(np.abs(sums.total).mean()),
        sum_max=float(np.abs(sums.total).max()),
        sum_bias=float(sums.total.mean()),
        ess=effective_sample_size(sums.total),
        retention={
            name: float(((geometric >= low) & (geometric <= high)).mean()) for name, (low, high) in BANDS.items()
        },
        mean_of_means=float((sums.size / sums.count).mean()),
        worst_mean=_worst_mean(sums),
        bias=_bias(sums),
    )


def _worst_mean(sums: SequenceSums) -> float:
    long = sums.count >= _FEW_IN_SEQUENCE
    count, mean = sums.count[long], sums.size[long] / sums.count[long]
    error = np.sqrt(np.maximum(sums.square[long] / count - mean * mean, 0) / count)
    return float(np.maximum(mean - _ERRORS * error, 0).max(initial=0.0))


def _bias(sums: SequenceSums) -> float:
    tokens = sums.count.sum()
    mean = sums.total.sum() / tokens
    # Tokens of one sequence may err together: the larger of the two errors, by tokens and by whole sequences.
    by_token = max(float(sums.square.sum() / tokens - mean * mean), 0.0) / tokens
    by_sequence = float(((sums.total - sums.count * mean) ** 2).sum()) / tokens**2
    return float(max(abs(mean) - _ERRORS * np.sqrt(max(by_token, by_sequence)), 0.0))


_SIGNED = {2: np.int16, 4: np.int32, 8: np.int64}
_EDGES = [0, 1, 2, 3, 5, 9, 17, 65, 257, 1025, 65537, 1 << 24, 1 << 62]


class UlpHistogram(BaseModel):
    """Counts of distances.

    Attributes:
        equal: elements with the same bits.
        bins: label ("1", "2", "3-4", ...) -> count, ascending.
        maximum: largest distance; None where a NaN has none.
    """

    equal: int = 0
    bins: dict[str, int] = {}
    maximum: int | None = 0


def ulp_distance(a: Array, b: Array) -> NDArray[np.int64]:
    """|a - b| in units in the last place; +0 and -0 are one apart, NaN is far from everything but its own bits.

    Args:
        a, b: floating arrays of one dtype, or the bit patterns of bfloat16.
    """
    kind = _SIGNED[a.dtype.itemsize]
    x, y = _ordered(np.ascontiguousarray(a).view(kind)), _ordered(np.ascontiguousarray(b).view(kind))
    # Opposite signs of fp64 overflow the difference; halves of it do not.
    far = np.abs(x // 2 - y // 2) > (1 << 61)
    return np.where(far, np.iinfo(np.int64).max, np.abs(x - np.where(far, x, y)))


def _ordered(bits: Array) -> NDArray[np.int64]:
    """Sign and magnitude to integers in the order of the floats, -0 just below +0."""
    wide = bits.astype(np.int64)
    return np.where(wide >= 0, wide, -1 - (wide & int(np.iinfo(bits.dtype).max)))


def ulp_histogram(distance: NDArray[np.int64]) -> UlpHistogram:
    """Histogram with bins that double."""
    if not len(distance):
        return UlpHistogram()
    counts = np.histogram(distance, np.array(_EDGES, np.int64))[0]
    labels = [_label(low, high) for low, high in pairwise(_EDGES)]
    bins = {label: int(count) for label, count in zip(labels[1:], counts[1:], strict=True) if count}
    return UlpHistogram(equal=int(counts[0]), bins=bins, maximum=int(distance.max()))


def _label(low: int, high: int) -> str:
    if high == low + 1:
        return str(low)
    return f"{low}-{high - 1}" if high < 1 << 62 else f">={low}"


def tensor_ulps(a: Tensor, b: Tensor) -> NDArray[np.int64] | None:
    """Distances of two tensors of one shape and floating dtype; None where these differ."""
    if a.dtype != b.dtype or a.shape != b.shape or a.dtype not in ("F64", "F32", "F16", "BF16"):
        return None
    return ulp_distance(a.values, b.values)


_STEPS = tuple(2.0**-k for k in range(1, 13))
_MIN_TOKENS = 24
_CONCENTRATION = 0.75
_EXACT = 1e-3
_ONE_MULTIPLE = 0.95


class Lattice(BaseModel):
    """A detected lattice: differences that are multiples of a power of two say that something was rounded coarsely.

    bfloat16 logits just below 8 are multiples of 1/32: two sides that round them differ by 1/32 or by nothing, and the
    log-sum-exp moves each difference a little. So the test looks for clusters around multiples, not for multiples only.

    Attributes:
        step: distance of neighbouring values, in nats.
        concentration: 1 where all differences are multiples, 0 where they fall anywhere.
        tokens: differences of at least half a step, on which the test rests.
        exact: all of them are multiples to a thousandth of a step.
    """

    step: float
    concentration: float
    tokens: int
    exact: bool

    def __str__(self) -> str:
        how = "are" if self.exact else "cluster around"
        return f"differences {how} multiples of 1/{round(1 / self.step)} ({self.tokens} tokens)"


def find_lattice(d: Floats) -> Lattice | None:
    """The coarsest lattice that the differences lie on or cluster around; None where there is none.

    Needs differences at several multiples: a cloud narrower than the step clusters around zero and shows nothing.
    """
    for step in _STEPS:
        away = d[np.abs(d) > step / 2]
        if len(away) < max(_MIN_TOKENS, 0.02 * len(d)):
            continue
        phase = np.exp(2j * math.pi * (away / step))
        concentration = float(phase.mean().real)
        # A shift of all tokens by one amount lies at one multiple of some step, whatever it is.
        multiples = np.unique(np.round(away / step), return_counts=True)[1]
        if multiples.max() > _ONE_MULTIPLE * len(away):
            continue
        # A smooth cloud concentrates on no step.
        if concentration >= _CONCENTRATION:
            residue = np.abs(away / step - np.round(away / step))
            return Lattice(
                step=step,
                concentration=concentration,
                tokens=len(away),
                exact=bool((residue < _EXACT).all()),
            )
    return None
