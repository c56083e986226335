"""The check that gives the run its name: the rollout's log-probabilities against the training forward's, by bytes.

Both sides are computed independently; nothing is copied from one to the other. In strict mode one differing token
stops the run with the token, both values and their distance.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlkernel.contract import compare_bitwise
from rlkernel.training.batch import Sample


class MismatchError(RuntimeError):
    """A sampled token's log-probability differs between rollout and training forward, in strict mode."""


@dataclass
class Exactness:
    """Tally of compared tokens.

    Attributes:
        tokens: compared so far.
        mismatch_tokens: those whose bytes differ.
        max_abs_diff: largest absolute difference, in fp64 (nats).
        max_ulps: largest distance in units in the last place.
        first: the first mismatch in words.
    """

    tokens: int = 0
    mismatch_tokens: int = 0
    max_abs_diff: float = 0.0
    max_ulps: int = 0
    first: str = ""

    @property
    def exact_frac(self) -> float:
        """Share of compared tokens with equal bytes; 1 where none was compared."""
        return 1.0 - self.mismatch_tokens / self.tokens if self.tokens else 1.0

    def add(self, samples: Sequence[Sample], trained: Tensor) -> None:
        """Compares the rollout's log-probabilities of the samples with `trained`.

        Args:
            samples: with `logp`; trained: [L] fp32, their completion tokens in order, from the training forward.
        """
        rollout = torch.cat([s.logp for s in samples if s.logp is not None])
        report = compare_bitwise(trained.detach().cpu(), rollout.cpu())
        self.tokens += report.elements
        self.mismatch_tokens += report.mismatches
        if report.mismatches:
            self.max_abs_diff = _worse(self.max_abs_diff, report.max_abs_diff)
            self.max_ulps = max(self.max_ulps, report.max_ulps or 0)
        if report.mismatches and not self.first and report.first is not None:
            self.first = _describe(samples, report.first[0], report.expected, report.actual, report.ulps)

    def merge(self, other: Exactness) -> None:
        """Adds another tally."""
        self.tokens += other.tokens
        self.mismatch_tokens += other.mismatch_tokens
        self.max_abs_diff = _worse(self.max_abs_diff, other.max_abs_diff)
        self.max_ulps = max(self.max_ulps, other.max_ulps)
        self.first = self.first or other.first

    def require(self, step: int) -> None:
        """Raises unless every compared token was equal.

        Raises:
            MismatchError: naming the first token, both values and the ulps.
        """
        if self.mismatch_tokens:
            raise MismatchError(
                f"step {step}: {self.mismatch_tokens} of {self.tokens} sampled tokens have another log-probability in "
                f"the training forward (largest difference {self.max_abs_diff:.3g}, {self.max_ulps} ulps); first: "
                f"{self.first}. `rlkernel doctor` shows what computes each op; run.strict=false counts and goes on"
            )

    def row(self) -> dict[str, float | int]:
        """The three figures of `metrics.jsonl`."""
        return {
            "exact_frac": self.exact_frac,
            "mismatch_tokens": self.mismatch_tokens,
            "max_abs_diff": self.max_abs_diff,
        }


def hex_bits(value: float) -> str:
    """The eight hexadecimal digits of an fp32 number."""
    return struct.pack(">f", value).hex()


def _worse(a: float, b: float) -> float:
    """The larger difference; NaN, where a side was NaN, is the worst and stays."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def _describe(samples: Sequence[Sample], index: int, rollout: object, trained: object, ulps: int | None) -> str:
    for number, sample in enumerate(samples):
        if index < len(sample.completion):
            token = sample.completion[index]
            return (
                f"completion {number}, token {index} of {len(sample.completion)} (id {token}, position "
                f"{len(sample.prompt) + index}): rollout {rollout!r}, training {trained!r}, {ulps} ulps apart"
            )
        index -= len(sample.completion)
    raise IndexError(f"token {index} lies beyond the samples")
