"""Reference of linear_logprob: linear, then logprob; backward: logprob's gradient, then linear's two gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlkernel.contract.orders import VOCAB_TILE
from rlkernel.kernels.reference.arith import exp
from rlkernel.kernels.reference.linear import chunked, linear_dgrad, linear_wgrad_
from rlkernel.kernels.reference.logprob import (
    active_rows,
    check_values,
    kept_mask,
    logprob,
    logprob_dgrad,
    scaled,
)


def linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_values("linear_logprob", targets, weight.shape[0], inv_temperature)
    return logprob(chunked(hidden, weight.t(), 1), targets, inv_temperature, kept)


def linear_logprob_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, ...]:
    check_values("linear_logprob", targets, weight.shape[0], inv_temperature)
    logits = chunked(hidden, weight.t(), 1)
    saved = probabilities(scaled(logits, inv_temperature, kept), weight.dtype)
    return (*logprob(logits, targets, inv_temperature, kept), *saved)


def linear_logprob_logits(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None, width: int
) -> tuple[Tensor, ...]:
    check_values("linear_logprob", targets, weight.shape[0], inv_temperature)
    logits = chunked(hidden, weight.t(), 1)
    first = first_entries(scaled(logits, inv_temperature, kept), width)
    return (*logprob(logits, targets, inv_temperature, kept), first)


def first_entries(z: Tensor, width: int) -> Tensor:
    """The first `width` columns of z [T, V], -inf beyond V."""
    return torch.nn.functional.pad(z[:, :width], (0, max(0, width - z.shape[1])), value=-math.inf).contiguous()


def probabilities(z: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """exp(z - maximum of the tile) [T, V], rounded once, and the maxima [T, tiles]."""
    tiles = torch.nn.functional.pad(z, (0, -z.shape[1] % VOCAB_TILE), value=-math.inf).unflatten(1, (-1, VOCAB_TILE))
    m = tiles.amax(-1)
    p = exp(tiles - torch.where(m == -math.inf, 0.0, m)[..., None])
    return p.flatten(1)[:, : z.shape[1]].to(dtype).contiguous(), m


def dz_of_probs(
    probs: Tensor,
    tile_max: Tensor,
    targets: Tensor,
    inv_temperature: Tensor | None,
    kept: Tensor | None,
    stats: Tensor,
    dlogp: Tensor,
) -> Tensor:
    """Gradient of the logits [T, V] from saved probabilities, in their dtype, for rows that have a gradient."""
    scale = exp((tile_max - stats[:, :1]) - stats[:, 1:])
    vocab = probs.shape[1]
    p = probs.float() * scale.repeat_interleave(VOCAB_TILE, 1)[:, :vocab]
    dz = dlogp[:, None] * (torch.nn.functional.one_hot(targets, vocab).float() - p)
    if inv_temperature is not None:
        dz = dz * inv_temperature[:, None]
    return (dz if kept is None else torch.where(kept_mask(kept, vocab), dz, 0.0)).to(probs.dtype)


def gradients(
    dz_of: Callable[[Tensor], Tensor],
    dgrad: Callable[[Tensor, Tensor, int], Tensor],
    wgrad_: Callable[[Tensor, Tensor, Tensor], None],
    rows: Tensor,
    grad: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    needs_input: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """dhidden [T, C] and dweight [V, C], each empty unless needed, from dz of the tokens in `rows` [T] bool."""
    dz = dz_of(rows)
    dhidden, dweight = (hidden.new_empty((0, hidden.shape[1])) for _ in range(2))
    if needs_weight:
        to = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if grad is None else grad
        wgrad_(to, dz, hidden[rows])
        dweight = dweight if to is grad else to.to(weight.dtype)
    if needs_input:
        dhidden = torch.zeros_like(hidden)
        dhidden[rows] = dgrad(dz, weight, 1).to(hidden.dtype)
    return dhidden, dweight


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
    dense: bool,  # a hint for GPU schedules; `logits` are recomputed here
    needs_input: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    def dz_of(rows: Tensor) -> Tensor:
        pick = lambda t: None if t is None else t[rows]
        scale, mask = pick(inv_temperature), pick(kept)
        if probs is not None and tile_max is not None and dlogp is not None and dentropy is None:
            return dz_of_probs(probs[rows], tile_max[rows], targets[rows], scale, mask, stats[rows], dlogp[rows])
        z, up = chunked(hidden[rows], weight.t(), 1), (pick(dlogp), pick(dentropy))  # recomputes the logits
        return logprob_dgrad(z, targets[rows], scale, mask, stats[rows], entropy[rows], *up).to(weight.dtype)

    rows = active_rows(targets, kept, stats, dlogp, dentropy)
    return gradients(dz_of, linear_dgrad, linear_wgrad_, rows, grad, hidden, weight, needs_input, needs_weight)
