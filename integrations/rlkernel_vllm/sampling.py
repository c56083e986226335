"""Log-probabilities, temperature and filters of both of vLLM's runners, computed by rlkernel's ops.

Logits are multiplied by 1/T in fp32, the kept set of top-k, top-p and min-p is that of `ops.sample`, and a
log-probability is that of `ops.logprob`, so a trainer with the same logits has the same numbers. vLLM draws the tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel import ops
from rlkernel.ops.logprob import logprob_stats
from rlkernel.ops.sample import kept_set


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


def scale_and_filter_(
    logits: Tensor,  # [T, V] fp32
    temperature: Tensor,  # [T] fp32, 0: greedy
    top_k: Tensor | None,  # [T] int32, 0: off
    top_p: Tensor | None,  # [T] fp32
    min_p: Tensor | None,  # [T] fp32
) -> Tensor:  # [T, V] fp32
    """Multiplies by 1/T, in place, and writes -inf where a token is not in the kept set of `ops.sample`."""
    dropped = None
    if (top_k, top_p, min_p) != (None, None, None):
        kept = kept_set(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        dropped = ~ops.unpack_kept(kept, logits.shape[1])
    scale = 1.0 / torch.where(temperature > 0, temperature, 1.0)
    logits = logits.mul_(scale.unsqueeze(1))
    return logits if dropped is None else logits.masked_fill_(dropped, float("-inf"))
