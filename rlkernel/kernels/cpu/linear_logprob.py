"""linear_logprob on the CPU: launchers of `csrc/cpu/linear_logprob.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels.cpu.library import CPU, code, function, pointer, threads
from rlkernel.kernels.cpu.linear import linear, linear_dgrad, linear_wgrad_
from rlkernel.kernels.cpu.logprob import contiguous, logprob, row_results
from rlkernel.kernels.reference.linear_logprob import dz_of_probs, first_entries, gradients, probabilities
from rlkernel.kernels.reference.logprob import active_rows, check_values, scaled


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


def linear_logprob_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, ...]:
    check_values("linear_logprob", targets, weight.shape[0], inv_temperature)
    logits = linear(hidden, weight, None, 1, 1, torch.float32)
    kept_outputs = probabilities(scaled(logits, inv_temperature, kept), weight.dtype)
    return (*logprob(logits, targets, inv_temperature, kept), *kept_outputs)


def linear_logprob_logits(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None, width: int
) -> tuple[Tensor, ...]:
    check_values("linear_logprob", targets, weight.shape[0], inv_temperature)
    logits = linear(hidden, weight, None, 1, 1, torch.float32)
    first = first_entries(scaled(logits, inv_temperature, kept), width)
    return (*logprob(logits, targets, inv_temperature, kept), first)


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
    probs: Tensor | None,
    tile_max: Tensor | None,
    logits: Tensor | None,
    needs_input: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    if probs is not None and tile_max is not None and dlogp is not None and dentropy is None:

        def dz_of(rows: Tensor) -> Tensor:
            scale, mask = (None if t is None else t[rows] for t in (inv_temperature, kept))
            return dz_of_probs(probs[rows], tile_max[rows], targets[rows], scale, mask, stats[rows], dlogp[rows])

        active = active_rows(targets, kept, stats, dlogp, dentropy)
        return gradients(dz_of, linear_dgrad, linear_wgrad_, active, grad, hidden, weight, needs_input, needs_weight)
    hidden, weight = hidden.contiguous(), weight.contiguous()
    rows = contiguous(targets, inv_temperature, kept, stats, entropy, dlogp, dentropy)
    dhidden = hidden.new_empty((hidden.shape[0] if needs_input else 0, hidden.shape[1]))
    to = grad
    if needs_weight and grad is None:
        to = torch.zeros(weight.shape, dtype=torch.float32, device=CPU)
    function("rlk_linear_logprob_grad", "ppppppppppplllii")(
        pointer(to),
        hidden.data_ptr(),
        weight.data_ptr(),
        *map(pointer, rows),
        pointer(dhidden) if needs_input else None,
        hidden.shape[0],
        *weight.shape,
        code(hidden.dtype),
        threads(),
    )
    return dhidden, hidden.new_empty((0, hidden.shape[1])) if to is None or to is grad else to.to(weight.dtype)
