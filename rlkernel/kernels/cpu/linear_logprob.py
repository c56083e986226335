"""linear_logprob on the CPU: launchers of `csrc/cpu/linear_logprob.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.contract.orders import VOCAB_TILE
from rlkernel.kernels.cpu.library import CPU, FLOATS, code, function, pointer, threads
from rlkernel.kernels.cpu.linear import linear
from rlkernel.kernels.cpu.logprob import contiguous, logprob, row_results
from rlkernel.kernels.reference.linear_logprob import first_entries
from rlkernel.kernels.reference.logprob import check_values, scaled


def linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _forward(hidden, weight, targets, inv_temperature, kept, None, None)


def linear_logprob_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, ...]:
    tokens, vocab = hidden.shape[0], weight.shape[0]
    probs = torch.empty((tokens, vocab), dtype=weight.dtype, device=CPU)
    tile_max = torch.empty((tokens, -(-vocab // VOCAB_TILE)), **FLOATS)
    return *_forward(hidden, weight, targets, inv_temperature, kept, probs, tile_max), probs, tile_max


def _forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    inv_temperature: Tensor | None,
    kept: Tensor | None,
    probs: Tensor | None,
    tile_max: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_values("linear_logprob", targets, weight.shape[0], inv_temperature)
    hidden, weight, targets = hidden.contiguous(), weight.contiguous(), targets.contiguous()
    inv_temperature, kept = contiguous(inv_temperature, kept)
    out = row_results(hidden.shape[0])
    function("rlk_linear_logprob", "p" * 11 + "lllii")(
        hidden.data_ptr(),
        weight.data_ptr(),
        targets.data_ptr(),
        pointer(inv_temperature),
        pointer(kept),
        *map(pointer, (*out, probs, tile_max)),
        hidden.shape[0],
        *weight.shape,
        code(hidden.dtype),
        threads(),
    )
    return out


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
    dense: bool,  # a hint for GPUs
    needs_input: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    if dlogp is None or dentropy is not None:  # a gradient of the entropy needs the logits
        probs = tile_max = None
    hidden, weight = hidden.contiguous(), weight.contiguous()
    rows = contiguous(targets, inv_temperature, kept, stats, entropy, dlogp, dentropy, probs, tile_max)
    dhidden = hidden.new_empty((hidden.shape[0] if needs_input else 0, hidden.shape[1]))
    to = grad
    if needs_weight and grad is None:
        to = torch.zeros(weight.shape, dtype=torch.float32, device=CPU)
    function("rlk_linear_logprob_grad", "p" * 13 + "lllii")(
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
