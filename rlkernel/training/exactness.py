"""Compares the rollout's log-probabilities with the training forward's, byte by byte.

The two sides are computed independently. In strict mode one differing token stops the run.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlkernel.contract import MismatchError, compare_bitwise
from rlkernel.training.batch import Trajectory


@dataclass
class Exactness:
    """Counts of compared tokens.

    Attributes:
        tokens: tokens compared so far.
        mismatch_tokens: tokens whose bytes differ.
        max_abs_diff: largest absolute difference, in fp64 (nats).
        max_ulps: largest difference in units in the last place.
        first: description of the first mismatch.
    """

    tokens: int = 0
    mismatch_tokens: int = 0
    max_abs_diff: float = 0.0
    max_ulps: int = 0
    first: str = ""

    @property
    def exact_frac(self) -> float:
        """Share of compared tokens with equal bytes; 1 if none was compared."""
        return 1.0 - self.mismatch_tokens / self.tokens if self.tokens else 1.0

    def add(self, trajectories: Sequence[Trajectory], trained: Tensor, ranks: Sequence[int] = ()) -> None:
        """Compares the rollout's log-probabilities with those of the training forward.

        Args:
            trajectories: with `logp`.
            trained: [L] fp32, log-probabilities of their sampled tokens in order, from the training forward.
            ranks: rank that sampled and scored each trajectory, for the description; empty in a run on one.
        """
        rollout = torch.cat([one.logp for one in trajectories if one.logp is not None])
        report = compare_bitwise(trained.detach().cpu(), rollout.cpu())
        self.tokens += report.elements
        self.mismatch_tokens += report.mismatches
        if report.mismatches:
            self.max_abs_diff = _worse(self.max_abs_diff, report.max_abs_diff)
            self.max_ulps = max(self.max_ulps, report.max_ulps or 0)
        if report.mismatches and not self.first and report.first is not None:
            self.first = _describe(trajectories, ranks, report.first[0], report.expected, report.actual, report.ulps)

    def merge(self, other: Exactness) -> None:
        """Adds the counts of another comparison."""
        self.tokens += other.tokens
        self.mismatch_tokens += other.mismatch_tokens
        self.max_abs_diff = _worse(self.max_abs_diff, other.max_abs_diff)
        self.max_ulps = max(self.max_ulps, other.max_ulps)
        self.first = self.first or other.first

    def require(self, step: int) -> None:
        """Raises unless every compared token was equal.

        Raises:
            MismatchError: names the first differing token, both values and their distance in ulps.
        """
        if self.mismatch_tokens:
            raise MismatchError(
                f"step {step}: {self.mismatch_tokens} of {self.tokens} sampled tokens have a different log-probability "
                f"in the training forward (largest difference {self.max_abs_diff:.3g}, {self.max_ulps} ulps); first: "
                f"{self.first}. `rlkernel doctor` shows which kernel computes each op; with run.strict=false the run "
                "counts mismatches and continues"
            )

    def row(self) -> dict[str, float | int]:
        """The fields of a row of `metrics.jsonl`."""
        return {
            "exact_frac": self.exact_frac,
            "mismatch_tokens": self.mismatch_tokens,
            "max_abs_diff": self.max_abs_diff,
        }


def hex_bits(value: float) -> str:
    """The eight hexadecimal digits of an fp32 number."""
    return struct.pack(">f", value).hex()


def _worse(a: float, b: float) -> float:
    """The larger difference; NaN (one side was NaN) counts as the largest."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def _describe(
    trajectories: Sequence[Trajectory],
    ranks: Sequence[int],
    index: int,
    rollout: object,
    trained: object,
    ulps: int | None,
) -> str:
    number = 0
    while index >= len(trajectories[number].positions):
        index -= len(trajectories[number].positions)
        number += 1
    one, place = trajectories[number], f"rank {ranks[number]}, " if ranks else ""
    index = one.positions[index]
    return (
        f"{place}completion {number}, token {index} of {len(one.completion)} (id {one.completion[index]}, position "
        f"{len(one.prompt) + index}): rollout {rollout!r}, training {trained!r}, {ulps} ulps apart"
    )
