"""Targets, fp64 truths and settings for the GPU tests of logprob and linear_logprob."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu.gpu_checks import DEVICE
from torch import Tensor

from rlkernel import ops


def scored(tokens: int, v: int) -> tuple[Tensor, Tensor, Tensor]:
    """Targets, temperatures in [0.5, 2], and kept masks that drop the target of the second row only."""
    generator = torch.Generator().manual_seed(11)
    targets = torch.randint(0, v, (tokens,), generator=generator)
    mask = torch.rand(tokens, v, generator=generator) < 0.5
    mask[torch.arange(tokens), targets] = True
    if tokens > 1:
        mask[1, targets[1]] = False
    temperature = 0.5 + 1.5 * torch.rand(tokens, generator=generator)
    return targets.to(DEVICE), temperature.to(DEVICE), ops.pack_kept(mask).to(DEVICE)


def logprob_truth(z: Tensor, targets: Tensor, temperature: Tensor | None, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """logp of kept targets (0 elsewhere) and entropy."""
    if temperature is not None:
        z = z / temperature[:, None]
    if kept is not None:
        z = z.masked_fill(~ops.unpack_kept(kept, z.shape[1]), -torch.inf)
    l = torch.log_softmax(z, -1)
    logp = l.gather(1, targets[:, None])[:, 0]
    return logp.masked_fill(logp == -torch.inf, 0.0), -(l.exp() * l.masked_fill(l == -torch.inf, 0.0)).sum(-1)


def finite(out: ops.LogProb) -> tuple[Tensor, Tensor]:
    """logp and entropy; logp of a dropped target is set to 0 so that it can be compared."""
    return out.logp.masked_fill(out.logp == -torch.inf, 0.0), out.entropy


def settings(filtered: bool, temperature: Tensor, kept: Tensor) -> dict[str, Any]:
    return {"temperature": temperature, "kept": kept} if filtered else {}


by_filter = pytest.mark.parametrize("filtered", (False, True))
