"""Log-probabilities, temperature and filters of both of vLLM's runners, computed by rlkernel's ops.

Logits are multiplied by 1/T in fp32, the kept set of top-k, top-p and min-p is that of `ops.sample`, and a
log-probability is that of `ops.logprob`, so a trainer with the same logits has the same numbers.
"""

from __future__ import annotations

from torch import Tensor

from rlkernel import ops
from rlkernel.ops.logprob import logprob_stats


def log_probabilities(logits: Tensor) -> Tensor:  # [T, V] fp32 -> [T, V] fp32
    """`ops.logprob` of every token: (z - M) - log S."""
    stats = logprob_stats(logits)
    return logits.float().sub(stats[:, :1]).sub_(stats[:, 1:])


def token_log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:  # [T, V], [T, K] -> [T, K] fp32
    """`ops.logprob` of K tokens per row."""
    if ids.shape[1] == 1:
        return ops.logprob(logits, ids[:, 0].long()).logp.unsqueeze(1)
    stats = logprob_stats(logits)
    return logits.gather(1, ids.long()).float().sub_(stats[:, :1]).sub_(stats[:, 1:])
