"""Reference of logprob: integer sums inside vocabulary tiles and over the tiles; docs/ops/logprob.md."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlkernel.contract.orders import FIXED_POINT_BITS, ROW_POINT_BITS, VOCAB_TILE
from rlkernel.kernels.reference.arith import exp, fma, log
from rlkernel.kernels.reference.embedding import check_range


def check_values(op: str, targets: Tensor, vocab_size: int, inv_temperature: Tensor | None) -> None:
    """Raises IndexError for a target outside the vocabulary, ValueError unless 1/T is positive and finite; CPU only."""
    check_range(op, "targets", targets, vocab_size, "V")
    if inv_temperature is None or inv_temperature.device.type != "cpu" or inv_temperature.numel() == 0:
        return
    good = (inv_temperature > 0) & (inv_temperature < math.inf)
    if not bool(good.all()):
        bad = int((~good).nonzero()[0])
        value: object = float(1 / inv_temperature[bad])
        if value == 0.0:  # T = 0 and the smallest T have the same 1/T
            value = "0, or so small that 1/T is not finite in fp32"
        raise ValueError(f"{op}: temperature[{bad}] is {value}; it must be positive and finite, at least 1.18e-38")


def scaled(logits: Tensor, inv_temperature: Tensor | None, kept: Tensor | None) -> Tensor:
    """fp32 logits [T, V] times 1/T, dropped entries -inf."""
    z = logits.float()
    if inv_temperature is not None:
        z = z * inv_temperature[:, None]
    return z if kept is None else z.masked_fill(~kept_mask(kept, z.shape[1]), -math.inf)


def kept_mask(kept: Tensor, vocab_size: int) -> Tensor:
    """Boolean mask [T, V] of a bit mask."""
    bits = (kept[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return bits.flatten(1)[:, :vocab_size].bool()


def target_kept(targets: Tensor, kept: Tensor | None) -> Tensor:
    """Whether each row's target was kept, [T] bool."""
    if kept is None:
        return torch.ones_like(targets, dtype=torch.bool)
    return (kept.gather(1, targets[:, None] >> 5)[:, 0].long() >> (targets & 31)) & 1 == 1


def fixed_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension of numbers in [0, 1], each rounded to 23 fraction bits, as integers in any order."""
    one = torch.ones((), dtype=torch.float32)
    whole = ((x + one).view(torch.int32) - one.view(torch.int32)).sum(-1, dtype=torch.int32)
    return whole.float() * 2.0**-FIXED_POINT_BITS


def tile_stats(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, sum of p and sum of p * -d of every tile of z [T, V], each [T, tiles]."""
    z = torch.nn.functional.pad(z, (0, -z.shape[1] % VOCAB_TILE), value=-math.inf).unflatten(1, (-1, VOCAB_TILE))
    m = z.amax(-1)
    safe = torch.where(torch.isfinite(m), m, 0.0)[..., None]
    d = torch.where(torch.isfinite(m)[..., None], z - safe, -math.inf)
    p = exp(d)
    q = torch.where(p == 0, 0.0, p * -d)
    bad = ~(z < math.inf).all(-1)
    return torch.where(bad, math.nan, m), fixed_sum(p), fixed_sum(q)


def row_total(x: Tensor) -> Tensor:
    """Sum over the last dimension of numbers in [0, 128], each rounded to 40 fraction bits."""
    return torch.round(x * 2.0**ROW_POINT_BITS).long().sum(-1).float() * 2.0**-ROW_POINT_BITS


def fold(m: Tensor, s: Tensor, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """M, log S and entropy [T] from the statistics of the tiles."""
    top = m.amax(-1) + 0.0
    w = torch.nan_to_num(exp(m - top[:, None]), nan=0.0)
    distance = torch.where(w == 0, 0.0, top[:, None] - m)
    sums, distance_sum = row_total(w * s), row_total(w * fma(s, distance, e))
    log_s = log(sums)
    entropy = log_s + distance_sum / sums
    empty, bad = top == -math.inf, torch.isnan(top)
    log_s = torch.where(empty, 0.0, torch.where(bad, math.nan, log_s))
    return top, log_s, torch.where(empty, 0.0, torch.where(bad, math.nan, entropy))


def logprob(
    logits: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_values("logprob", targets, logits.shape[1], inv_temperature)
    z = scaled(logits, inv_temperature, kept)
    top, log_s, entropy = fold(*tile_stats(z))
    logp = (z.gather(1, targets[:, None])[:, 0] - top) - log_s
    dropped = (top == -math.inf) | (~target_kept(targets, kept) & ~torch.isnan(top))
    return torch.where(dropped, -math.inf, logp), entropy, top + log_s, torch.stack((top, log_s), -1)


def active_rows(
    targets: Tensor, kept: Tensor | None, stats: Tensor, dlogp: Tensor | None, dentropy: Tensor | None
) -> Tensor:
    """Rows with a gradient, [T] bool: an upstream gradient that is not 0, a kept target and a kept entry."""
    zero = torch.zeros_like(targets, dtype=torch.bool)
    upstream = (zero if dlogp is None else dlogp != 0) | (zero if dentropy is None else dentropy != 0)
    return upstream & target_kept(targets, kept) & (stats[:, 0] != -math.inf)


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
    z = scaled(logits, inv_temperature, None)
    g = (torch.zeros_like(entropy) if dlogp is None else dlogp)[:, None]
    l = (z - stats[:, :1]) - stats[:, 1:]
    p = exp(l)
    # under vocabulary parallelism a target may belong to another rank
    hit = (targets[:, None] == torch.arange(z.shape[1])).float()
    dz = g * (hit - p)
    if dentropy is not None:
        dz = fma(-(dentropy[:, None] * p), torch.where(p == 0, 0.0, l + entropy[:, None]), dz)
    if inv_temperature is not None:
        dz = dz * inv_temperature[:, None]
    has_gradient = active_rows(targets, kept, stats, dlogp, dentropy)[:, None]
    if kept is not None:
        has_gradient = has_gradient & kept_mask(kept, z.shape[1])
    return torch.where(has_gradient, dz, 0.0).to(logits.dtype)
