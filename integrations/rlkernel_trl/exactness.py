"""Compares every sampled token with the training forward, and decides whether TRL's own comparison may be skipped.

Counts stay on the device and are read once, before the optimizer's step, so that strict mode can stop the update.
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
        tokens: number of tokens compared.
        mismatch_tokens: number of tokens whose bits differ.
        drift_max, mean: largest and mean difference in nats.
        first: description of the first mismatch.
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
    """Differences between rollout and training log-probabilities, accumulated over micro-batches."""

    def __init__(self) -> None:
        self._counts: list[Tensor] = []  # fp64 [tokens, mismatches, largest, sum]
        self._batches: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def add(self, rollout: Tensor, trained: Tensor, mask: Tensor, ids: Tensor) -> None:
        """Compares log-probabilities [B, C] where the mask is set, without waiting for the device."""
        mask = mask.bool()
        differs = (_bits(rollout) != _bits(trained)) & mask
        difference = (rollout.double() - trained.detach().double()).abs()
        difference = torch.where(differs, difference.nan_to_num(nan=torch.inf), 0.0)
        counts = (mask.sum().double(), differs.sum().double(), difference.max(), difference.sum())
        self._counts.append(torch.stack(counts))
        self._batches.append((rollout, trained.detach(), differs, ids))

    @property
    def empty(self) -> bool:
        """Whether nothing was added since the last `close`."""
        return not self._counts

    def close(self, accelerator: Any = None) -> Verdict:
        """The verdict on everything added since the last call, over all processes."""
        counts, batches, self._counts, self._batches = self._counts, self._batches, [], []
        if not counts:
            return Verdict(0, 0, 0.0, 0.0)
        rows = torch.stack(counts)
        if accelerator is not None and accelerator.num_processes > 1:
            rows = accelerator.gather(rows)
        tokens, mismatches, largest, total = (rows[:, i] for i in range(4))
        figures = torch.stack([tokens.sum(), mismatches.sum(), largest.max(), total.sum()]).tolist()
        first = _first(batches) if figures[1] else ""
        return Verdict(int(figures[0]), int(figures[1]), figures[2], figures[3] / max(1.0, figures[0]), first)


def _first(batches: list[tuple[Tensor, Tensor, Tensor, Tensor]]) -> str:
    for number, (rollout, trained, differs, ids) in enumerate(batches):
        indices = differs.nonzero()
        if indices.shape[0]:
            row, column = indices[0].tolist()
            a, b = float(rollout[row, column]), float(trained[row, column])
            return (
                f"micro-batch {number}, completion {row}, token {column} (id {int(ids[row, column])}): rollout {a!r} "
                f"({_hex(a)}), training {b!r} ({_hex(b)})"
            )
    return "on another process"


def _hex(value: float) -> str:
    return struct.pack(">f", value).hex()


class Certificate:
    """Whether TRL's forward for old log-probabilities may be skipped, because its results equal the rollout's.

    It is held after `needed` generations whose tokens were all compared and equal, and lost at the first mismatch.

    Args:
        needed: generations to compare first.
        every: generations between forwards that run nevertheless, as a check; 0: none.
        strict: whether a mismatch raises.

    Attributes:
        rebuilds: whether the forward also recomputes kept sets; then it is never skipped.
        skips: whether TRL runs that forward at all.
        reports: whether this process logs that the certificate is held.
    """

    def __init__(self, needed: int, every: int, strict: bool):
        self.needed, self.every, self.strict = needed, every, strict
        self.rebuilds = False
        self.skips = True
        self.reports = True
        self.equal = 0
        self.tokens = 0
        self.since_check = 0

    @property
    def held(self) -> bool:
        """Whether enough generations were equal."""
        return self.equal >= self.needed

    def may_skip(self) -> bool:
        """Whether the next generation may skip the forward; counts towards the next check."""
        if not self.held:
            return False
        self.since_check += 1
        if self.every and self.since_check >= self.every:
            self.since_check = 0
            return False
        return True

    def update(self, verdict: Verdict, step: int) -> None:
        """Records the verdict of a generation.

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
                raise MismatchError(message + ". rl_kernel_strict=False counts mismatches and continues")
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
        if self.held and not before and self.reports:
            again = f", except every {self.every} generations" if self.every else ""
            what = f"TRL's forward for old log-probabilities is skipped from now on{again}"
            if self.rebuilds:
                what = "TRL's forward for old log-probabilities stays, because it recomputes the sets of top_p, top_k "
                what += "and min_p"
            if not self.skips:
                what = "TRL does not compute old log-probabilities with these settings"
            logger.warning(
                "rlkernel: certified at step %d: %d sampled tokens of %d generations have equal log-probabilities in "
                "rollout and training forward; %s. Every generation is still compared with the training forward",
                step,
                self.tokens,
                self.equal,
                what,
            )
