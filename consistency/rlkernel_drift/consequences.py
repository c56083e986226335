"""What the drift costs this run: tokens clipped and sequences dropped by the corrections that trainers apply.

The ratio of a token is exp(train - rollout). Settings are the user's; defaults are those of the named trainers.
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
        tis_cap: token ratios are truncated here (truncated importance sampling).
        sequence_cap: sequence ratios (products) are masked beyond it; TRL's default is 3.
        geometric_low, geometric_high: sequences are masked whose geometric mean ratio leaves the band.
        clip_low, clip_high: PPO's and GRPO's clip of the token ratio.
        gspo_low, gspo_high: GSPO's clip of the geometric mean ratio.

    Raises:
        DriftError: a cap or a clip that no trainer could have.
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
    tis = share(ratio > settings.tis_cap)
    masked = share(product > settings.sequence_cap)
    band = share((geometric < settings.geometric_low) | (geometric > settings.geometric_high))
    clip = share((ratio < 1 - settings.clip_low) | (ratio > 1 + settings.clip_high))
    gspo = share((geometric < 1 - settings.gspo_low) | (geometric > 1 + settings.gspo_high))
    lost = sums.count[product > settings.sequence_cap].sum() / sums.count.sum()
    return [
        Consequence(
            name="truncated importance sampling",
            setting=f"cap {settings.tis_cap:g}",
            tokens=tis,
            words=f"{tis:.2%} of the tokens have their weight cut",
        ),
        Consequence(
            name="sequence mask",
            setting=f"product above {settings.sequence_cap:g}",
            tokens=float(lost),
            sequences=masked,
            words=f"{masked:.2%} of the sequences are dropped, {lost:.2%} of the tokens with them",
        ),
        Consequence(
            name="geometric mask",
            setting=f"mean ratio outside [{settings.geometric_low:g}, {settings.geometric_high:g}]",
            sequences=band,
            words=f"{band:.2%} of the sequences are dropped",
        ),
        Consequence(
            name="token clip",
            setting=f"ratio outside [{1 - settings.clip_low:g}, {1 + settings.clip_high:g}]",
            tokens=clip,
            words=f"{clip:.2%} of the tokens are clipped before the first update",
        ),
        Consequence(
            name="GSPO clip",
            setting=f"mean ratio outside [{1 - settings.gspo_low:g}, {1 + settings.gspo_high:g}]",
            sequences=gspo,
            words=f"{gspo:.2%} of the sequences are clipped before the first update",
        ),
    ]
