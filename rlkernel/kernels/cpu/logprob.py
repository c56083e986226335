"""logprob on the CPU: launchers of `csrc/cpu/logprob.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels.cpu.library import FLOATS, code, function, pointer, threads
from rlkernel.kernels.reference.logprob import check_values


def contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors, contiguous; None stays None."""
    return tuple(None if t is None else t.contiguous() for t in tensors)


def row_results(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised logp, entropy, lse [T] and stats [T, 2]."""
    logp, entropy, lse = (torch.empty(rows, **FLOATS) for _ in range(3))
    return logp, entropy, lse, torch.empty(rows, 2, **FLOATS)


def logprob(
    logits: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_values("logprob", targets, logits.shape[1], inv_temperature)
    logits, targets = logits.contiguous(), targets.contiguous()
    inv_temperature, kept = contiguous(inv_temperature, kept)
    out = row_results(logits.shape[0])
    function("rlk_logprob", "ppppppppllii")(
        logits.data_ptr(),
        targets.data_ptr(),
        pointer(inv_temperature),
        pointer(kept),
        *map(pointer, out),
        *logits.shape,
        code(logits.dtype),
        threads(),
    )
    return out


def logprob_dgrad(
    logits: Tensor,
    targets: Tensor,
    inv_temperature: Tensor | None,
    kept: Tensor | None,
    stats: Tensor,
    entropy: Tensor,
    dlogp: Tensor | None,
    dentropy: Tensor | None,
) -> Tensor:
    logits = logits.contiguous()
    rows = contiguous(targets, inv_temperature, kept, stats, entropy, dlogp, dentropy)
    dlogits = torch.empty_like(logits)
    function("rlk_logprob_dgrad", "pppppppppllii")(
        logits.data_ptr(), *map(pointer, rows), dlogits.data_ptr(), *logits.shape, code(logits.dtype), threads()
    )
    return dlogits
