"""Compares the rollout's log-probability of every sampled token with the trainer's, while both have the same weights.

That is from a delivery of weights to the next update: verl's forward for old log-probabilities, and the first update
of a generation.
"""

from __future__ import annotations

import logging
from functools import partial

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.workers.utils.padding import response_from_nested

from rlkernel.contract import MismatchError
from rlkernel_transformers.comparison import Comparison
from rlkernel_verl.checks import report_inexact
from rlkernel_verl.weights import SyncedWeights

logger = logging.getLogger("rlkernel_verl")


class Certificate:
    """The comparisons of one policy.

    Args:
        strict: whether a difference raises.

    Attributes:
        synced: the weights that the rollout was sent; None: an update followed.
    """

    def __init__(self, strict: bool):
        self.strict = strict
        self.synced: SyncedWeights | None = None
        self._comparison = Comparison()

    def add(self, batch: TensorDict, log_probs: Tensor) -> None:  # nested [B, P + R]
        """Compares a batch's sampled tokens, without waiting for the device."""
        if self.synced is None:
            return
        found = []
        if not self.synced.confirmed:
            found.append(
                ("actor_rollout_ref.rollout", "it did not confirm the weights; vLLM with rlkernel's plugin does")
            )
        if "rollout_log_probs" not in batch:
            found.append(
                ("rollout_log_probs", "the batch has none; set actor_rollout_ref.rollout.calculate_log_probs=True")
            )
        report_inexact(self.strict, found)
        if "rollout_log_probs" not in batch:
            return
        mask = batch["response_mask"]
        trained = response_from_nested(log_probs, mask)
        padded = [
            torch.nested.to_padded_tensor(part.to(trained.device), 0)
            for part in (batch["rollout_log_probs"], trained, mask, batch["responses"])
        ]
        self._comparison.add(*padded)

    def close(self, group: dist.ProcessGroup) -> dict[str, list[float]]:
        """Metrics of what was added since the last call, on all ranks; empty: nothing was.

        Raises:
            MismatchError: a token differs on any rank, in strict mode.
        """
        if self._comparison.empty:
            return {}
        verdict = self._comparison.close(partial(_gather, group=group))
        if verdict.mismatch_tokens:
            message = (
                f"{verdict.mismatch_tokens} of {verdict.tokens} sampled tokens have another log-probability in the "
                f"trainer than in the rollout (largest difference {verdict.drift_max:.3g}); first: {verdict.first}"
            )
            if self.strict:
                raise MismatchError(message + ". rl_kernel_strict=False counts mismatches and continues")
            logger.warning("rlkernel: %s", message)
        return {
            "rlkernel/exact_frac": [verdict.exact_frac],
            "rlkernel/tokens": [float(verdict.tokens)],
            "rlkernel/mismatch_tokens": [float(verdict.mismatch_tokens)],
            "rlkernel/drift_max": [verdict.drift_max],
        }


def _gather(rows: Tensor, group: dist.ProcessGroup) -> Tensor:  # [n, 4] -> [W * n, 4]
    found = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, rows, group=group)
    return torch.cat(found)
