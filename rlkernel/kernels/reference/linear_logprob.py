"""linear_logprob, spelled out: linear's chain, then logprob; the gradient of the logits through linear's two chains."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels.reference.linear import chain, chunked
from rlkernel.kernels.reference.logprob import active_rows, check_values, logprob, logprob_dgrad


def linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_values("linear_logprob", targets, weight.shape[0], inv_temperature)
    return logprob(chunked(hidden, weight.t(), 1), targets, inv_temperature, kept)


def linear_logprob_grad_(
    grad: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    inv_temperature: Tensor | None,
    kept: Tensor | None,
    stats: Tensor,
    entropy: Tensor,
    dlogp: Tensor | None,
    dentropy: Tensor | None,
    needs_input: bool,
) -> Tensor:
    rows = active_rows(targets, kept, stats, dlogp, dentropy)
    pick = lambda t: None if t is None else t[rows]
    logits = chunked(hidden[rows], weight.t(), 1)
    stats, entropy = stats[rows], entropy[rows]
    scale, mask, dlogp, dentropy = pick(inv_temperature), pick(kept), pick(dlogp), pick(dentropy)
    dz = logprob_dgrad(logits, targets[rows], scale, mask, stats, entropy, dlogp, dentropy).to(weight.dtype)
    if grad is not None:
        grad.copy_(chain(dz.t(), hidden[rows], grad))
    if not needs_input:
        return hidden.new_empty((0, hidden.shape[1]))
    dhidden = torch.zeros_like(hidden)
    dhidden[rows] = chunked(dz, weight, 1).to(hidden.dtype)
    return dhidden
