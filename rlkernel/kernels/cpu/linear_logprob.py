"""linear_logprob on the CPU: launchers of `csrc/cpu/linear_logprob.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels.cpu.library import code, function, pointer, threads
from rlkernel.kernels.cpu.logprob import contiguous, row_results
from rlkernel.kernels.reference.logprob import check_values


def linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_values("linear_logprob", targets, weight.shape[0], inv_temperature)
    hidden, weight, targets = hidden.contiguous(), weight.contiguous(), targets.contiguous()
    inv_temperature, kept = contiguous(inv_temperature, kept)
    out = row_results(hidden.shape[0])
    function("rlk_linear_logprob", "ppppppppplllii")(
        hidden.data_ptr(),
        weight.data_ptr(),
        targets.data_ptr(),
        pointer(inv_temperature),
        pointer(kept),
        *map(pointer, out),
        hidden.shape[0],
        *weight.shape,
        code(hidden.dtype),
        threads(),
    )
    return out


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
    hidden, weight = hidden.contiguous(), weight.contiguous()
    rows = contiguous(targets, inv_temperature, kept, stats, entropy, dlogp, dentropy)
    dhidden = torch.empty_like(hidden) if needs_input else hidden.new_empty((0, hidden.shape[1]))
    function("rlk_linear_logprob_grad", "ppppppppppplllii")(
        pointer(grad),
        hidden.data_ptr(),
        weight.data_ptr(),
        *map(pointer, rows),
        pointer(dhidden) if needs_input else None,
        hidden.shape[0],
        *weight.shape,
        code(hidden.dtype),
        threads(),
    )
    return dhidden
