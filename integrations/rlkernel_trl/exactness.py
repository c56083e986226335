"""The comparison of every sampled token with the training forward, and the certificate that it earns.

Counting stays on the device; the one look at it comes before the optimizer's step, which strict mode can still stop.
"""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlkernel_trl.errors import MismatchError

logger = logging.getLogger("rlkernel_trl")


def _bits(x: Tensor) -> Tensor:
    return x.detach().float().contiguous().view(torch.int32)


@dataclass(frozen=True)
class Verdict:
    """Outcome of the comparisons of one update.

    Attributes:
        tokens: compared; mismatch_tokens: with other bits; drift_max: largest difference in nats; first: the first
            mismatch in words.
        mean: mean difference in nats.
    """

    tokens: int
    mismatch_tokens: int
    drift_max: float
    mean: float
    first: str = ""

    @property
    def exact_frac(self) -> float:
        """Share of compared tokens with equal bits; 0 where none was compared."""
        return 1.0 - self.mismatch_tokens / self.tokens if self.tokens else 0.0


class Comparison:
    """Differences between rollout and training log-probabilities, gathered over micro-batches."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []  # fp64 [tokens, mismatches, largest, sum]
        self._kept: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def add(self, rollout: Tensor, trained: Tensor, mask: Tensor, ids: Tensor) -> None:
        """Compares where the mask is set; all [B, C]. Nothing waits for the device."""
        mask = mask.bool()
        other = (_bits(rollout) != _bits(trained)) & mask
        difference = (rollout.double() - trained.detach().double()).abs()
        difference = torch.where(other, difference.nan_to_num(nan=torch.inf), 0.0)
        self._parts.append(torch.stack([mask.sum().double(), other.sum().double(), difference.max(), difference.sum()]))
        self._kept.append((rollout, trained.detach(), other, ids))

    @property
    def empty(self) -> bool:
        """Whether nothing was added since the last `close`."""
        return not self._parts

    def close(self, accelerator: Any = None) -> Verdict:
        """The verdict over everything added, on all processes; forgets it."""
        parts, kept, self._parts, self._kept = self._parts, self._kept, [], []
        if not parts:
            return Verdict(0, 0, 0.0, 0.0)
        rows = torch.stack(parts)
        if accelerator is not None and accelerator.num_processes > 1:
            rows = accelerator.gather(rows)
        tokens, mismatches, largest, total = (rows[:, i] for i in range(4))
        figures = torch.stack([tokens.sum(), mismatches.sum(), largest.max(), total.sum()]).tolist()
        first = _first(kept) if figures[1] else ""
        return Verdict(int(figures[0]), int(figures[1]), figures[2], figures[3] / max(1.0, figures[0]), first)


def _first(kept: list[tuple[Tensor, Tensor, Tensor, Tensor]]) -> str:
    for number, (rollout, trained, other, ids) in enumerate(kept):
        found = other.nonzero()
        if found.shape[0]:
            row, column = found[0].tolist()
            a, b = float(rollout[row, column]), float(trained[row, column])
            return (
                f"micro-batch {number}, completion {row}, token {column} (id {int(ids[row, column])}): rollout {a!r} "
                f"({_hex(a)}), training {b!r} ({_hex(b)})"
            )
    return "on another process"


def _hex(value: float) -> str:
    return struct.pack(">f", value).hex()


class Certificate:
    """Whether TRL's forward for old log-probabilities may be skipped: what it would compute is what vLLM returned.

    Held after `needed` generations whose tokens were all compared and equal; lost at the first mismatch, and then
    earned anew.

    Args:
        needed: generations to compare first.
        every: generations between forwards that are run all the same; 0: none.
        strict: whether a mismatch raises.

    Attributes:
        rebuilds: the forward also rebuilds the sets of tokens that were sampled from, so it is not skipped.
        skips: TRL runs that forward at all, so there is something to skip.
    """

    def __init__(self, needed: int, every: int, strict: bool):
        self.needed, self.every, self.strict = needed, every, strict
        self.rebuilds = False
        self.skips = True
        self.equal = 0
        self.tokens = 0
        self.since_check = 0

    @property
    def held(self) -> bool:
        """Whether enough generations were equal."""
        return self.equal >= self.needed

    def may_skip(self) -> bool:
        """Whether the next generation may do without the forward; counts towards the next check."""
        if not self.held:
            return False
        self.since_check += 1
        if self.every and self.since_check >= self.every:
            self.since_check = 0
            return False
        return True

    def update(self, verdict: Verdict, step: int) -> None:
        """Takes in the verdict of a generation.

        Raises:
            MismatchError: a token differs, in strict mode.
        """
        if verdict.mismatch_tokens:
            message = (
                f"step {step}: {verdict.mismatch_tokens} of {verdict.tokens} sampled tokens have another "
                f"log-probability in the training forward (largest difference {verdict.drift_max:.3g}); first: "
                f"{verdict.first}"
            )
            if self.strict:
                raise MismatchError(message + ". rl_kernel_strict=False counts and goes on")
            if self.held:
                message += "; old log-probabilities are computed again from the next generation on"
            self.equal = self.tokens = 0
            logger.warning(message)
            return
        if verdict.tokens == 0:
            return
        before = self.held
        self.equal += 1
        self.tokens += verdict.tokens
        if self.held and not before:
            again = f", but for every {self.every} generations" if self.every else ""
            what = f"TRL's forward for old log-probabilities is left out from here on{again}"
            if self.rebuilds:
                what = "TRL's forward for old log-probabilities goes on: it rebuilds the sets of top_p, top_k and min_p"
            if not self.skips:
                what = "TRL computes no old log-probabilities with these settings"
            logger.warning(
                "rlkernel: certified at step %d: %d sampled tokens of %d generations have equal log-probabilities in "
                "rollout and training forward; %s. Every generation stays compared with the training forward",
                step,
                self.tokens,
                self.equal,
                what,
            )
