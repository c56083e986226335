"""Reference of sample: the kept set by sorting, noise in 32-bit words, Gumbel-max; docs/ops/sample.md."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlkernel.kernels.reference.arith import LN2, exp, log, log2_exponent, log2_parts
from rlkernel.kernels.reference.logprob import logprob

_WORD = 0xFFFFFFFF


def check_values(temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> None:
    """Raises ValueError that names argument and row of a value out of range; CPU tensors only."""
    _check_range("temperature", temperature, temperature >= 0, ">= 0 (0 is greedy)")
    if top_k is not None:
        _check_range("top_k", top_k, top_k >= 0, ">= 0 (0 is off)")
    if top_p is not None:
        _check_range("top_p", top_p, (top_p > 0) & (top_p <= 1), "in (0, 1] (1 is off)")
    if min_p is not None:
        _check_range("min_p", min_p, (min_p >= 0) & (min_p <= 1), "in [0, 1] (0 is off)")


def _check_range(name: str, values: Tensor, good: Tensor, expected: str) -> None:
    if values.device.type == "cpu" and not bool(good.all()):
        row = int((~good).nonzero()[0])
        raise ValueError(f"sample: {name}[{row}] is {values[row].item()}; expected {expected}")


def check_rows(bad: Tensor) -> None:
    """Raises ValueError that names the first row for which bad [B] is not 0; CPU tensors only."""
    if bad.device.type == "cpu" and bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(
            f"sample: row {row} of logits, divided by its temperature, has a NaN, a +inf or nothing but -inf; "
            "no token can be drawn from it"
        )


def mix(x: Tensor) -> Tensor:
    """Bijective hash of 32-bit words in int64: xor-shifts and multiplications modulo 2^32."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _WORD
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def hashes(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """32-bit hash of (seed, position, token) for every token: [B, V] int64."""
    words = [seeds & _WORD, (seeds >> 32) & _WORD, positions & _WORD, (positions >> 32) & _WORD]
    a, b = torch.full_like(seeds, 0x9E3779B9), torch.full_like(seeds, 0x3C6EF372)
    for i in range(4):
        a, b = mix(a ^ words[i]), mix(b ^ words[3 - i])
    token = torch.arange(vocab_size, device=seeds.device)
    return mix((mix(token ^ a[:, None]) + b[:, None]) & _WORD)


def gumbel(h: Tensor) -> Tensor:
    """-log(-log(u)) in fp32 with u = (h + 0.5) / 2^32; u > 1/2 uses 1 - u, which fp32 represents accurately."""
    high = h >= 2**31
    s = (torch.where(high, _WORD - h, h).float() + 0.5) * 2.0**-32
    x = torch.where(high, 1.0 - s, s)
    exponent = log2_exponent(x)
    r = (x.view(torch.int32) - (exponent << 23)).view(torch.float32) - 1.0
    r = torch.where(high & (exponent == 0), -s, r)
    e = -(log2_parts(r, exponent.float()) * torch.tensor(LN2, dtype=torch.float32))
    return -log(e)


def kept_set(z: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor:
    """Tokens that pass the filters, [B, V] bool; z [B, V] are logits times 1/T."""
    b, v = z.shape
    off = lambda t, value: torch.full((b,), value) if t is None else t
    k = off(top_k, 0)
    k = torch.where((k == 0) | (k > v), v, k).long()
    ranked, order = z.sort(dim=-1, descending=True)
    keep = z >= ranked.gather(1, k[:, None] - 1)
    share = exp(z - ranked[:, :1])
    mass = torch.where(keep, (share * 2.0**31).to(torch.int64), 0)
    p = off(top_p, 1.0)
    limit = torch.ceil(p.double() * mass.sum(-1).double()).to(torch.int64)
    # mass of strictly larger values: the sum over the ranks before the first of the equal values
    sums = mass.gather(1, order).cumsum(-1)
    first = torch.searchsorted(-ranked, -ranked, right=False)
    above = torch.where(first > 0, sums.gather(1, (first - 1).clamp(min=0)), 0)
    inside = torch.zeros_like(keep).scatter(1, order, above < limit[:, None])
    keep = keep & (inside | (p >= 1)[:, None])
    return keep & (share >= off(min_p, 0.0)[:, None])


def pack_bits(mask: Tensor) -> Tensor:
    """Bit mask [B, ceil(V/32)] int32 of a boolean mask [B, V]."""
    bits = torch.nn.functional.pad(mask, (0, -mask.shape[1] % 32)).unflatten(1, (-1, 32)).long()
    words = (bits << torch.arange(32, device=mask.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    scores: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_values(temperature, top_k, top_p, min_p)
    logits, v = logits.float(), logits.shape[1]
    greedy = (temperature == 0)[:, None]
    z = logits * inverse_of(temperature)[:, None]
    check_rows(~(z < math.inf).all(-1) | (z == -math.inf).all(-1))
    keep = kept_set(z, top_k, top_p, min_p) | greedy
    score = torch.where(greedy, z, z + gumbel(hashes(seeds, positions, v))).masked_fill(~keep, -math.inf)
    # the lowest id among equal scores, which argmax does not guarantee
    tokens = torch.where(score == score.amax(-1, keepdim=True), torch.arange(v), v).amin(-1)
    if top_k is None and top_p is None and min_p is None:
        kept = torch.empty(0, (v + 31) // 32, dtype=torch.int32)
    else:
        kept = pack_bits(keep)
    return tokens, kept, *score_tokens(logprob, logits, tokens, temperature, kept, scores)


def inverse_of(temperature: Tensor) -> Tensor:
    """1/T [B]; 1 for greedy rows."""
    return torch.ones_like(temperature) / torch.where(temperature > 0, temperature, 1.0)


def score_tokens(
    logprob: Callable[..., tuple[Tensor, ...]],
    logits: Tensor,
    tokens: Tensor,
    temperature: Tensor,
    kept: Tensor,
    scores: int,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens over the kept set and over all tokens; empty unless `scores` asks for them.

    `scores` is 0 for none, 1 for the kept set and 2 for both; `kept` has no rows if nothing was filtered.
    """
    none, inverse = temperature.new_empty(0), inverse_of(temperature)
    logp = logprob(logits, tokens, inverse, kept if kept.shape[0] else None)[0] if scores else none
    return logp, logprob(logits, tokens, inverse, None)[0] if scores == 2 else none
