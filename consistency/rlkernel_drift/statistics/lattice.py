"""Lattice detection: differences that are multiples of a power of two say that something was rounded coarsely.

bfloat16 logits just below 8 are multiples of 1/32: two sides that round them differ by 1/32 or by nothing, and the
log-sum-exp moves each difference a little. So the test looks for clusters around multiples, not for multiples alone.
"""

from __future__ import annotations

import math

import numpy as np
from pydantic import BaseModel

from rlkernel_drift.statistics.tokens import Floats

_STEPS = tuple(2.0**-k for k in range(1, 13))
_MIN_TOKENS = 24
_CONCENTRATION = 0.75
_EXACT = 1e-3
_ONE_MULTIPLE = 0.95


class Lattice(BaseModel):
    """A detected lattice.

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
