"""What the drift costs a run: tokens clipped and sequences dropped by the corrections that trainers apply.

The ratio of a token is exp(train - rollout).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rlkernel_drift.errors import DriftError
from rlkernel_drift.statistics import Comparable, SequenceSums
from rlkernel_drift.verdict import Consequence


@dataclass(frozen=True)
class Settings:
    """Corrections and clips.

    Attributes:
        tis_cap: cap of the token ratio in truncated importance sampling.
        sequence_cap: sequences whose ratio (a product over tokens) is larger are masked; TRL's default is 3.
        geometric_low, geometric_high: sequences whose geometric mean ratio leaves this band are masked.
        clip_low, clip_high: clip of the token ratio in PPO and GRPO.
        gspo_low, gspo_high: clip of the geometric mean ratio in GSPO.

    Raises:
        DriftError: a cap or a clip is out of range.
    """

    tis_cap: float = 2.0
    sequence_cap: float = 3.0
    geometric_low: float = 0.99
    geometric_high: float = 1.001
    clip_low: float = 0.2
    clip_high: float = 0.2
    gspo_low: float = 3e-4
    gspo_high: float = 4e-4

    def __post_init__(self) -> None:
        for name, option in (("tis_cap", "--tis-cap"), ("sequence_cap", "--sequence-cap")):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise DriftError(f"{option} is {value:g}; a cap is a finite ratio above 0")
        for kind, option in (("clip", "--clip"), ("gspo", "--gspo-clip")):
            low, high = getattr(self, f"{kind}_low"), getattr(self, f"{kind}_high")
            if not (0 <= low <= 1 and math.isfinite(high) and high >= 0):
                raise DriftError(
                    f"{option} is {low:g} {high:g}; both are distances from ratio 1, LOW in [0, 1] and HIGH at least 0"
                )


def consequences(compared: Comparable, sums: SequenceSums, settings: Settings) -> list[Consequence]:
    """Shares of tokens and sequences that each correction would touch."""
    if not len(compared.d):
        return []
    ratio = np.exp(np.clip(compared.d, -80, 80))
    product = np.exp(np.clip(sums.total, -80, 80))
    geometric = np.exp(np.clip(sums.total / sums.count, -80, 80))
    share = lambda condition: float(np.mean(condition))
    outside = lambda values, low, high: share((values < low) | (values > high))
    clip, gspo = (1 - settings.clip_low, 1 + settings.clip_high), (1 - settings.gspo_low, 1 + settings.gspo_high)
    band = (settings.geometric_low, settings.geometric_high)
    cut = share(ratio > settings.tis_cap)
    masked = share(product > settings.sequence_cap)
    lost = float(sums.count[product > settings.sequence_cap].sum() / sums.count.sum())
    dropped, clipped, clipped_sequences = outside(geometric, *band), outside(ratio, *clip), outside(geometric, *gspo)
    return [
        Consequence(
            name="truncated importance sampling",
            setting=f"cap {settings.tis_cap:g}",
            tokens=cut,
            words=f"{cut:.2%} of the tokens have their weight truncated",
        ),
        Consequence(
            name="sequence mask",
            setting=f"product above {settings.sequence_cap:g}",
            tokens=lost,
            sequences=masked,
            words=f"{masked:.2%} of the sequences are dropped, and with them {lost:.2%} of the tokens",
        ),
        Consequence(
            name="geometric mask",
            setting="mean ratio outside [{:g}, {:g}]".format(*band),
            sequences=dropped,
            words=f"{dropped:.2%} of the sequences are dropped",
        ),
        Consequence(
            name="token clip",
            setting="ratio outside [{:g}, {:g}]".format(*clip),
            tokens=clipped,
            words=f"{clipped:.2%} of the tokens are clipped before the first update",
        ),
        Consequence(
            name="GSPO clip",
            setting="mean ratio outside [{:g}, {:g}]".format(*gspo),
            sequences=clipped_sequences,
            words=f"{clipped_sequences:.2%} of the sequences are clipped before the first update",
        ),
    ]
