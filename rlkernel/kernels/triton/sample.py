"""sample on GPUs: thresholds of the filters by bisection over integer keys, then Gumbel-max tile by tile.

Contract: docs/ops/sample.md. Counts and masses are integers and maxima are exact, so the tiling changes no bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.kernels.triton.common import (
    LN2,
    cdiv,
    exp,
    log2,
    log2_parts,
    log2_split,
    next_power_of_2,
    on_device,
    options,
)
from rlkernel.kernels.triton.launch import direct

LOWEST = tl.constexpr(-(1 << 31))
MASS = tl.constexpr(2.0**31)

WORDS_PER_PROGRAM = 64

# ---- kernels ------------------------------------------------------------------------------------


@triton.jit
def key_of(z):
    """int32 key with the order of fp32 numbers; both zeros have the same key."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def inverse_of(temperature):
    """1/T; 1 for greedy rows."""
    return tl.div_rn(1.0, tl.where(temperature > 0.0, temperature, 1.0))


@triton.jit
def weigh(z, inside, top, floor, BY_MASS: tl.constexpr):
    """int64 weight of each entry: 1, or BY_MASS its fixed-point mass if its key reaches `floor`."""
    if BY_MASS:
        mass = (exp(z - top) * MASS).to(tl.int64)
        weight = tl.where(inside & (key_of(z) >= floor), mass, 0)
    else:
        weight = inside.to(tl.int64)
    return weight


@triton.jit
def weight_from(logits, V, inverse, top, floor, least, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Total weight of the entries whose key is at least `least`."""
    total = tl.zeros((), tl.int64)
    for first in range(0, V, BLOCK):
        v = first + tl.arange(0, BLOCK)
        z = tl.load(logits + v, mask=v < V, other=float("-inf")) * inverse
        total += tl.sum(tl.where(key_of(z) >= least, weigh(z, v < V, top, floor, BY_MASS), 0), axis=0)
    return total


@triton.jit
def largest_key(logits, V, inverse, top, floor, need, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key such that the entries at or above it weigh at least `need`: two bits per pass, from the top."""
    key = tl.full((), LOWEST, tl.int32)
    for step in range(0, 16):
        unit = tl.full((), 1, tl.int32) << (30 - 2 * step)
        n1 = tl.zeros((), tl.int64)
        n2 = tl.zeros((), tl.int64)
        n3 = tl.zeros((), tl.int64)
        for first in range(0, V, BLOCK):
            v = first + tl.arange(0, BLOCK)
            z = tl.load(logits + v, mask=v < V, other=float("-inf")) * inverse
            at = key_of(z)
            weight = weigh(z, v < V, top, floor, BY_MASS)
            n1 += tl.sum(tl.where(at >= key + unit, weight, 0), axis=0)
            n2 += tl.sum(tl.where(at >= key + 2 * unit, weight, 0), axis=0)
            n3 += tl.sum(tl.where(at >= key + 3 * unit, weight, 0), axis=0)
        key += ((n1 >= need).to(tl.int32) + (n2 >= need).to(tl.int32) + (n3 >= need).to(tl.int32)) * unit
    return key


@direct
@triton.jit
def sample_threshold_kernel(
    logits,  # [B, V] fp32
    temperature,  # [B]
    top_k,  # [B] int32
    top_p,  # [B]
    threshold,  # [B] int32: least key of a kept token; the lowest key if nothing is filtered
    maximum,  # [B] fp32
    V,
    logits_row,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_row
    t = tl.load(temperature + row)
    inverse = inverse_of(t)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, V, BLOCK):
        v = first + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(logits + v, mask=v < V, other=float("-inf")) * inverse)
    top = tl.max(best, axis=0)
    key = tl.full((), LOWEST, tl.int32)
    if HAS_TOP_K:
        k = tl.load(top_k + row)
        if (t > 0.0) & (k > 0) & (k < V):
            key = largest_key(logits, V, inverse, top, key, k.to(tl.int64), False, BLOCK)
    if HAS_TOP_P:
        p = tl.load(top_p + row)
        if (t > 0.0) & (p < 1.0):
            total = weight_from(logits, V, inverse, top, key, key, True, BLOCK)
            limit = tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            key = largest_key(logits, V, inverse, top, key, limit, True, BLOCK)
    tl.store(threshold + row, key)
    tl.store(maximum + row, top)


@triton.jit
def mix(x):
    """Bijective hash of 32-bit words."""
    x = x ^ (x >> 16)
    x = x * tl.full((), 0x7FEB352D, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full((), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def gumbel(seed, position, token):
    """Noise -log(-log(u)) of a token, a function of the request's seed, the position and the token id."""
    seed_lo = seed.to(tl.uint32)
    seed_hi = (seed >> 32).to(tl.uint32)
    position_lo = position.to(tl.uint32)
    position_hi = (position >> 32).to(tl.uint32)
    key0 = tl.full((), 0x9E3779B9, tl.uint32)
    key0 = mix(mix(mix(mix(key0 ^ seed_lo) ^ seed_hi) ^ position_lo) ^ position_hi)
    key1 = tl.full((), 0x3C6EF372, tl.uint32)
    key1 = mix(mix(mix(mix(key1 ^ position_hi) ^ position_lo) ^ seed_hi) ^ seed_lo)
    h = mix(mix(token.to(tl.uint32) ^ key0) + key1)
    high = h.to(tl.int32, bitcast=True) < 0
    s = (tl.where(high, h ^ tl.full((), 0xFFFFFFFF, tl.uint32), h).to(tl.float32) + 0.5) * (2.0**-32)
    x = tl.where(high, 1.0 - s, s)
    r, exponent = log2_split(x)
    r = tl.where(high & (exponent == 0), -s, r)
    e = -(log2_parts(r, exponent.to(tl.float32)) * LN2)
    return -(log2(e) * LN2)


@direct
@triton.jit
def sample_tiles_kernel(
    logits,  # [B, V] fp32
    seeds,  # [B] int64
    positions,  # [B] int64
    temperature,  # [B]
    min_p,  # [B]
    threshold,  # [B] int32
    maximum,  # [B] fp32
    kept,  # [B, WORDS] int32
    best_score,  # [B, PROGRAMS] fp32
    best_token,  # [B, PROGRAMS] int32
    V,
    WORDS,
    logits_row,
    HAS_FILTER: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    BLOCK: tl.constexpr,  # words of 32 tokens
):
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 32)
    v = word[:, None] * 32 + bit[None, :]
    keep = v < V
    t = tl.load(temperature + row)
    z = tl.load(logits + row * logits_row + v, mask=keep, other=float("-inf")) * inverse_of(t)
    if HAS_FILTER:
        keep = keep & (key_of(z) >= tl.load(threshold + row))
        if HAS_MIN_P:
            least = tl.where(t > 0.0, tl.load(min_p + row), 0.0)
            keep = keep & (exp(z - tl.load(maximum + row)) >= least)
        packed = tl.sum(keep.to(tl.int32) << bit[None, :], axis=1)
        tl.store(kept + row * WORDS + word, packed, mask=word < WORDS)
    noise = gumbel(tl.load(seeds + row), tl.load(positions + row), v)
    score = tl.where(keep, tl.where(t == 0.0, z, z + noise), float("-inf"))
    best = tl.max(tl.max(score, axis=1), axis=0)
    best = tl.where(best == best, best, float("-inf"))  # for a tile of NaN, so that a valid token is picked
    token = tl.where(score == best, v, V - 1)
    to = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_score + to, best)
    tl.store(best_token + to, tl.min(tl.min(token, axis=1), axis=0))


@direct
@triton.jit
def sample_pick_kernel(best_score, best_token, tokens, PROGRAMS, BLOCK: tl.constexpr):
    """Token of a row with the largest score, the lowest id among equal scores."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    score = tl.load(best_score + row * PROGRAMS + i, mask=i < PROGRAMS, other=float("-inf"))
    token = tl.load(best_token + row * PROGRAMS + i, mask=i < PROGRAMS, other=0x7FFFFFFF)
    best = tl.max(score, axis=0)
    tl.store(tokens + row, tl.min(tl.where(score == best, token, 0x7FFFFFFF), axis=0).to(tl.int64))


# ---- launchers ----------------------------------------------------------------------------------


def sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> tuple[Tensor, Tensor]:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    seeds, positions, temperature = seeds.contiguous(), positions.contiguous(), temperature.contiguous()
    top_k, top_p, min_p = (None if t is None else t.contiguous() for t in (top_k, top_p, min_p))
    batch, vocab = logits.shape
    words = cdiv(vocab, 32)
    filtered = top_k is not None or top_p is not None or min_p is not None
    new = lambda dtype, *shape: torch.empty(shape, dtype=dtype, device=logits.device)
    tokens, kept = new(torch.int64, batch), new(torch.int32, batch if filtered else 0, words)
    if batch == 0:
        return tokens, kept
    programs = cdiv(words, WORDS_PER_PROGRAM)
    best_score, best_token = new(torch.float32, batch, programs), new(torch.int32, batch, programs)
    threshold = new(torch.int32, batch) if filtered else None
    maximum = new(torch.float32, batch) if filtered else None
    with on_device(logits):
        if filtered:
            block = min(8192, next_power_of_2(vocab, 128))
            sample_threshold_kernel[(batch,)](
                logits, temperature, top_k, top_p, threshold, maximum, vocab, logits.stride(0),
                HAS_TOP_K=top_k is not None, HAS_TOP_P=top_p is not None, BLOCK=block,
                num_warps=max(1, min(16, block // 256)), **options(),
            )  # fmt: skip
        sample_tiles_kernel[(batch, programs)](
            logits, seeds, positions, temperature, min_p, threshold, maximum, kept if filtered else None,
            best_score, best_token, vocab, words, logits.stride(0),
            HAS_FILTER=filtered, HAS_MIN_P=min_p is not None, BLOCK=WORDS_PER_PROGRAM, num_warps=4, **options(),
        )  # fmt: skip
        sample_pick_kernel[(batch,)](
            best_score, best_token, tokens, programs, BLOCK=next_power_of_2(programs, 32), num_warps=1, **options()
        )
    return tokens, kept
