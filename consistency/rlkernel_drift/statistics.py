"""Statistics of two streams of log-probabilities in fp64: over tokens, over sequences, in ulps, and lattices.

`d` is always train - rollout, so that `exp(d)` is the importance ratio. Values that are not finite are counted and
never averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from rlkernel_drift.capsule.tensor_file import Array, Tensor

Floats = NDArray[np.float64]

BANDS = {"strict": (0.999, 1.002), "1%": (0.99, 1.01), "5%": (0.95, 1.05)}
_SUPPORT = -1e4  # engines write -inf, -9999 or fp32's lowest for a token outside the kept set
_ABOVE = 0.05  # a TF32 head with an fp32 log-sum-exp raises a token of probability one by less

ONE_VALUE = 0.98  # a stream in which one value has a larger share of the tokens is a placeholder
_FEW = 8

# Rounding in bfloat16 has heavy tails, so a single token is evidence only beyond all of these bounds.
_OUTLYING = 1.0  # nats
_SPREAD = 20.0  # times the 90% quantile of |d|, in 1000 tokens
_RELATIVE = 1 / 8  # of the log-probability: 32 roundings of a bfloat16 logit of that size


class TokenStatistics(BaseModel):
    """One comparison of two streams; a field with a title is a metric for profiles.

    Attributes:
        tokens: compared tokens, which count and are finite on both sides.
        masked_out: tokens that do not count on both sides.
        nan_rollout, nan_train, inf_rollout, inf_train: counted tokens that are NaN or +inf.
        support_rollout, support_train: sampled tokens to which a side gives probability zero (-inf, or below -10,000).
        positive: log-probabilities above zero on either side.
        above_rollout, above_train: those above zero by more than rounding can cause.
        commonest_rollout, commonest_train: share of the most common value; commonest: the larger of the two.
        bias: positive if training finds the tokens more likely than the rollout did.
        k1, k3: estimates of KL(rollout || train) from the rollout's samples: -mean d, and mean(exp(d) - 1 - d).
        chi_square: mean(exp(2d)) - 1.
        multiplicative: token_mult_prob_error of NeMo RL.
        probability_mean, probability_max: rollout_probs_diff of verl; pearson_probability: its correlation.
        ess: effective sample size as a share of the tokens.
        retention: share of tokens whose ratio exp(d) lies in a band.
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
    commonest: float = 0.0
    commonest_rollout: float = 0.0
    commonest_train: float = 0.0
    mean: float = Field(default=0.0, title="mean |d| (nats)")
    p50: float = Field(default=0.0, title="median |d|")
    p90: float = Field(default=0.0, title="90% of |d| below")
    p95: float = Field(default=0.0, title="95% of |d| below")
    p99: float = Field(default=0.0, title="99% of |d| below")
    p999: float = Field(default=0.0, title="99.9% of |d| below")
    maximum: float = Field(default=0.0, title="largest |d|")
    std: float = Field(default=0.0, title="standard deviation of d")
    bias: float = Field(default=0.0, title="bias (mean of d)")
    k1: float = Field(default=0.0, title="k1 KL")
    k3: float = Field(default=0.0, title="k3 KL")
    chi_square: float = Field(default=0.0, title="chi-square of the token ratios")
    multiplicative: float = Field(default=1.0, title="mean exp|d|")
    probability_mean: float = Field(default=0.0, title="mean difference of probabilities")
    probability_max: float = Field(default=0.0, title="largest difference of probabilities")
    pearson: float | None = Field(default=None, title="correlation of log-probabilities")
    pearson_probability: float | None = Field(default=None, title="correlation of probabilities")
    ess: float = Field(default=1.0, title="effective sample size, tokens")
    ratio_mean: float = Field(default=1.0, title="mean ratio")
    equal: float = Field(default=0.0, title="share of equal bits")
    outliers: int = Field(default=0, title="tokens too far off for rounding")
    beyond_ln2: float = Field(default=0.0, title="share beyond ln 2")
    retention: dict[str, float] = {}

    @property
    def constant(self) -> bool:
        """Whether nearly all values of a side are equal, as in a placeholder."""
        return self.tokens >= _FEW and self.commonest > ONE_VALUE

    @property
    def invalid(self) -> bool:
        """Whether a side has values that no log-probability of a sampled token can have."""
        names = ("nan", "inf", "support", "above")
        return any(getattr(self, f"{name}_{side}") for name in names for side in ("rollout", "train"))


class Comparable:
    """The comparable tokens of two streams, and counts of the others.

    Attributes:
        index: [N] packed tokens that count and are finite on both sides.
        r, t: [N] rollout and train log-probabilities in fp64; d: [N] t - r.
    """

    def __init__(
        self,
        rollout: NDArray[np.float32],  # [T]
        train: NDArray[np.float32],  # [T]
        mask: NDArray[np.bool_],  # [T]
    ) -> None:
        self.rollout, self.train, self.mask = rollout, train, mask
        impossible = [mask & (values <= _SUPPORT) for values in (rollout, train)]
        finite = np.isfinite(rollout) & np.isfinite(train) & mask & ~impossible[0] & ~impossible[1]
        self.index = np.flatnonzero(finite)
        self.r = rollout[self.index].astype(np.float64)
        self.t = train[self.index].astype(np.float64)
        self.d: Floats = self.t - self.r
        self.counts: dict[str, Any] = {
            "tokens": len(self.index),
            "masked_out": int((~mask).sum()),
            "positive": int((self.r > 0).sum() + (self.t > 0).sum()),
        }
        sides = (("rollout", rollout, impossible[0], self.r), ("train", train, impossible[1], self.t))
        for side, values, support, known in sides:
            self.counts |= {
                f"nan_{side}": int((np.isnan(values) & mask).sum()),
                f"inf_{side}": int((np.isposinf(values) & mask).sum()),
                f"support_{side}": int(support.sum()),
                f"above_{side}": int((known > _ABOVE).sum()),
            }


def owners(cu_seqlens: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sequence of each packed token."""
    return np.searchsorted(cu_seqlens, tokens, side="right") - 1


def token_statistics(pair: Comparable) -> TokenStatistics:
    """All token statistics of two streams."""
    if not len(pair.d):
        return TokenStatistics(**pair.counts)
    d, size = pair.d, np.abs(pair.d)
    # The square of a ratio beyond e^80 could overflow; such a token is reported anyway.
    ratio = np.exp(np.clip(d, -80, 80))
    same = pair.rollout[pair.index].view(np.int32) == pair.train[pair.index].view(np.int32)
    probability = np.abs(np.exp(np.minimum(pair.t, 0)) - np.exp(np.minimum(pair.r, 0)))
    commonest = [float(np.unique(values, return_counts=True)[1].max() / len(d)) for values in (pair.r, pair.t)]
    quantiles = np.quantile(size, (0.5, 0.9, 0.95, 0.99, 0.999)).tolist()
    return TokenStatistics(
        **pair.counts,
        equal=float(same.mean()),
        commonest=max(commonest),
        commonest_rollout=commonest[0],
        commonest_train=commonest[1],
        outliers=int(outlying(pair).sum()),
        mean=float(size.mean()),
        **dict(zip(("p50", "p90", "p95", "p99", "p999"), quantiles, strict=True)),
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
        retention=_retention(ratio),
    )


def _retention(ratios: Floats) -> dict[str, float]:
    return {name: float(((ratios >= low) & (ratios <= high)).mean()) for name, (low, high) in BANDS.items()}


def outlying(pair: Comparable) -> NDArray[np.bool_]:  # [N]
    """Tokens whose |d| is too large for rounding: above a nat, far above the others' spread and relative to their size.

    The largest of n draws from a tail that decays with the cube grows with the cube root of n, and so does the bound.
    """
    size = np.abs(pair.d)
    if not len(size):
        return np.zeros(0, np.bool_)
    # The lower quantile, because interpolation between a few tokens would include the outlier itself.
    spread = float(np.quantile(size, 0.9, method="lower"))
    least = max(_OUTLYING, _SPREAD * spread * max(1.0, len(size) / 1000) ** (1 / 3))
    return size > np.maximum(least, _RELATIVE * np.maximum(np.abs(pair.r), np.abs(pair.t)))


def k3(d: Floats) -> float:
    """mean(exp(d) - 1 - d), without cancellation for small d."""
    clipped = np.clip(d, -80, 80)
    return float((np.expm1(clipped) - clipped).mean())


def pearson(x: Floats, y: Floats) -> float | None:
    """Correlation; None if a side is constant."""
    a, b = x - x.mean(), y - y.mean()
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale > 0 else None


def effective_sample_size(log_weights: Floats) -> float:
    """(sum w)^2 / (n sum w^2) of weights given by their logarithms."""
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights * weights).sum()))


_FEW_IN_SEQUENCE = 8  # tokens; the standard error of fewer is unreliable
_ERRORS = 3.0


class SequenceStatistics(BaseModel):
    """Statistics over sequences with at least one compared token; a field with a title is a metric for profiles.

    Attributes:
        ess: effective sample size of the sequence ratios, as a share of the sequences.
        retention: share of sequences whose geometric mean ratio lies in a band.
        mean_of_means: differs from the mean over tokens if lengths differ.
        worst_mean: without sequences of a few tokens.
        bias: 0 if chance explains it.
    """

    sequences: int = 0
    sum_bias: float = 0.0
    sum_mean: float = Field(default=0.0, title="mean |sum of d| of a sequence")
    sum_max: float = Field(default=0.0, title="largest |sum of d| of a sequence")
    ess: float = Field(default=1.0, title="effective sample size, sequences")
    mean_of_means: float = Field(default=0.0, title="mean over sequences of their mean |d|")
    worst_mean: float = Field(default=0.0, title="worst sequence's mean |d|, less three standard errors")
    bias: float = Field(default=0.0, title="|bias| less three standard errors")
    retention: dict[str, float] = {}


class SequenceSums:
    """Sums over each sequence.

    Attributes:
        sequence: [B'] numbers of the sequences that have compared tokens.
        count: [B'] compared tokens.
        total: [B'] sum of d; size: [B'] sum of |d|; square: [B'] sum of d^2.
    """

    def __init__(self, pair: Comparable, cu_seqlens: NDArray[np.int64]) -> None:
        owner = owners(cu_seqlens, pair.index)
        count = np.bincount(owner)
        self.sequence = np.flatnonzero(count)
        sums: Callable[[Floats], Floats] = lambda values: np.bincount(owner, values)[self.sequence].astype(np.float64)
        self.count: Floats = count[self.sequence].astype(np.float64)
        self.total: Floats = sums(pair.d)
        self.size: Floats = sums(np.abs(pair.d))
        self.square: Floats = sums(pair.d * pair.d)


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
        retention=_retention(geometric),
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
    # Errors of tokens in one sequence may correlate, so the larger error counts: by tokens or by sequences.
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
        maximum: largest distance; None if a NaN makes it undefined.
    """

    equal: int = 0
    bins: dict[str, int] = {}
    maximum: int | None = 0


def ulp_distance(a: Array, b: Array) -> NDArray[np.int64]:
    """|a - b| in units in the last place; +0 and -0 differ by one, NaN is far from everything except its own bits.

    Args:
        a, b: floating arrays of one dtype, or the bit patterns of bfloat16.
    """
    kind = _SIGNED[a.dtype.itemsize]
    x, y = _ordered(np.ascontiguousarray(a).view(kind)), _ordered(np.ascontiguousarray(b).view(kind))
    # The difference of fp64 values of opposite sign can overflow; half of it cannot.
    far = np.abs(x // 2 - y // 2) > (1 << 61)
    return np.where(far, np.iinfo(np.int64).max, np.abs(x - np.where(far, x, y)))


def _ordered(bits: Array) -> NDArray[np.int64]:
    """Maps sign and magnitude to integers in the order of the floats, -0 just below +0."""
    wide = bits.astype(np.int64)
    return np.where(wide >= 0, wide, -1 - (wide & int(np.iinfo(bits.dtype).max)))


def ulp_histogram(distance: NDArray[np.int64]) -> UlpHistogram:
    """Histogram of distances in bins of growing width."""
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
    """Distances of two tensors; None unless they have one shape and one floating dtype."""
    if a.dtype != b.dtype or a.shape != b.shape or a.dtype not in ("F64", "F32", "F16", "BF16"):
        return None
    return ulp_distance(a.values, b.values)


_STEPS = tuple(2.0**-k for k in range(1, 13))
_MIN_TOKENS = 24
_CONCENTRATION = 0.75
_EXACT = 1e-3
_ONE_MULTIPLE = 0.95


class Lattice(BaseModel):
    """A detected lattice: differences at multiples of a power of two, as coarse rounding makes them.

    bfloat16 logits just below 8 are multiples of 1/32, so that two sides that round them differ by multiples of 1/32,
    and the log-sum-exp moves each difference slightly. The test therefore looks for clusters around the multiples.

    Attributes:
        step: distance between neighbouring values, in nats.
        concentration: 1 if all differences are multiples, 0 if they are spread evenly.
        tokens: number of differences of at least half a step, on which the test rests.
        exact: whether all of them are multiples to a thousandth of a step.
    """

    step: float
    concentration: float
    tokens: int
    exact: bool

    def __str__(self) -> str:
        how = "are" if self.exact else "cluster around"
        return f"differences {how} multiples of 1/{round(1 / self.step)} ({self.tokens} tokens)"


def find_lattice(d: Floats) -> Lattice | None:
    """The coarsest lattice on or around which the differences lie; None without one.

    It needs differences at several multiples, because a distribution narrower than the step clusters around zero.
    """
    for step in _STEPS:
        away = d[np.abs(d) > step / 2]
        if len(away) < max(_MIN_TOKENS, 0.02 * len(d)):
            continue
        phase = np.exp(2j * math.pi * (away / step))
        concentration = float(phase.mean().real)
        # A shift of all tokens by one amount is a multiple of some step, but of only one.
        multiples = np.unique(np.round(away / step), return_counts=True)[1]
        if multiples.max() > _ONE_MULTIPLE * len(away):
            continue
        # A smooth distribution concentrates on no step.
        if concentration >= _CONCENTRATION:
            residue = np.abs(away / step - np.round(away / step))
            return Lattice(
                step=step, concentration=concentration, tokens=len(away), exact=bool((residue < _EXACT).all())
            )
    return None
