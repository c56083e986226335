"""Decides, from comparisons of sampled tokens with the training forward, whether TRL's own may be skipped."""

from __future__ import annotations

import logging

from rlkernel.contract import MismatchError
from rlkernel_transformers.comparison import Verdict

logger = logging.getLogger("rlkernel_trl")


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
