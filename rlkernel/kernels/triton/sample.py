"""sample on GPUs: maxima of vocabulary tiles, thresholds of the filters, then Gumbel-max and the log-probability.

Contract: docs/ops/sample.md. Counts and masses are integers and maxima are exact, so the tiling changes no bit. Without
filters a row is read once; with filters, the tiles that may hold kept tokens are read again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract.orders import VOCAB_TILE
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
from rlkernel.kernels.triton.logprob import (
    combine_tiles,
    fixed_point_sum,
    fixed_point_terms,
    logp_of,
    max_nan,
    store_stats,
)
from rlkernel.kernels.triton.sample_threshold import (
    REGISTER_KEYS,
    TILE,
    inverse_of,
    key_of,
    load_tiles,
    sample_threshold_kernel,
)

GROUP = 32
"""Tiles per program."""

# ---- kernels ------------------------------------------------------------------------------------


@triton.jit
def stats_of(z):
    """`tile_stats` of tiles [G, TILE / 16, 16]: maximum, fixed-point sum of exp, and of exp times the distance."""
    m = tl.reduce(tl.reduce(z, 2, max_nan), 1, max_nan)
    p, q = fixed_point_terms(z, m[:, None, None])
    s = fixed_point_sum(tl.sum(tl.sum(p, axis=2), axis=1), m)
    return m, s, fixed_point_sum(tl.sum(tl.sum(q, axis=2), axis=1), m)


@direct
@triton.jit
def sample_maxima_kernel(
    logits,  # [B, V]
    temperature,  # [B]
    memory,  # [1 or 3, PLANE] int32, a plane holds [B, TILES]: fp32 maxima, and sums if HAS_SUMS
    kept,  # [B, WORDS] int32: cleared
    V,
    TILES,
    WORDS,
    PLANE,
    logits_row,
    HAS_SUMS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Maxima of GROUP tiles of a row and, with HAS_SUMS, their statistics for the log-probability over all tokens."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUP
    tile = first + tl.arange(0, GROUP)
    inverse = inverse_of(tl.load(temperature + row))
    _, z = load_tiles(logits + row * logits_row, tile, V, inverse)
    if HAS_SUMS:
        m, s, e = stats_of(z)
        store_stats(memory + row * TILES, PLANE, first, TILES, m, s, e)
    else:
        m = tl.reduce(tl.reduce(z, 2, max_nan), 1, max_nan)
        tl.store(memory + row * TILES + tile, m.to(tl.int32, bitcast=True), mask=tile < TILES)
    word = first * (TILE // 32) + tl.arange(0, GROUP * (TILE // 32))
    tl.store(kept + row * WORDS + word, tl.zeros_like(word), mask=word < WORDS)


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
def sample_draw_kernel(
    logits,  # [B, V]
    seeds,  # [B] int64
    positions,  # [B] int64
    temperature,  # [B]
    min_p,  # [B]
    threshold,  # [B] int32
    maximum,  # [B] fp32
    tiles,  # [B, TILES] int32: with filters, the tiles that may hold kept tokens
    count,  # [B] int32: how many
    kept,  # [B, WORDS] int32
    memory,  # [3, PLANE] int32 if HAS_LOGP, a plane holds [B, TILES]: statistics of the kept tokens, listed tiles first
    best_score,  # [B, PROGRAMS] fp32
    best_token,  # [B, PROGRAMS] int32
    V,
    TILES,
    WORDS,
    PLANE,
    logits_row,
    HAS_FILTER: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    HAS_LOGP: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Kept set, best score and statistics of GROUP tiles of a row."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUP
    number = TILES
    tile = first + tl.arange(0, GROUP)
    if HAS_FILTER:
        number = tl.load(count + row)
        if first >= number:
            return
        tile = tl.load(tiles + row * TILES + tile, mask=tile < number, other=TILES)
    t = tl.load(temperature + row)
    v, z = load_tiles(logits + row * logits_row, tile, V, inverse_of(t))
    keep = v < V
    if HAS_FILTER:
        keep = keep & (key_of(z) >= tl.load(threshold + row))
        if HAS_MIN_P:
            least = tl.where(t > 0.0, tl.load(min_p + row), 0.0)
            keep = keep & (exp(z - tl.load(maximum + row)) >= least)
        halves = tl.sum(keep.to(tl.int32) << (v & 31), axis=2)  # [GROUP, TILE / 16]; disjoint bits: the sum is an or
        packed = tl.sum(tl.reshape(halves, (GROUP, TILE // 32, 2)), axis=2)
        word = (tile * (TILE // 32))[:, None] + tl.arange(0, TILE // 32)[None, :]
        tl.store(kept + row * WORDS + word, packed, mask=word < WORDS)
        z = tl.where(keep, z, float("-inf"))
    if HAS_LOGP:
        m, s, e = stats_of(z)
        store_stats(memory + row * TILES, PLANE, first, number, m, s, e)
    noise = gumbel(tl.load(seeds + row), tl.load(positions + row), v)
    score = tl.where(keep, tl.where(t == 0.0, z, z + noise), float("-inf"))
    best = tl.max(tl.max(tl.max(score, axis=2), axis=1), axis=0)
    best = tl.where(best == best, best, float("-inf"))  # a tile of NaN must still pick a token inside the vocabulary
    token = tl.where(score == best, v, V - 1)
    to = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_score + to, best)
    tl.store(best_token + to, tl.min(tl.min(tl.min(token, axis=2), axis=1), axis=0))


@triton.jit
def row_logp(memory, PLANE, row, z, number, TILES, CHUNK: tl.constexpr):
    """Log-probability [1] of the logit z from the row's first `number` tile statistics."""
    tile = tl.arange(0, CHUNK)[None, :]
    top, _, log_total, _ = combine_tiles(
        memory.to(tl.pointer_type(tl.float32)), memory + PLANE, memory + 2 * PLANE, row * TILES + tile, tile < number
    )
    return logp_of(z, top, log_total)


@direct
@triton.jit
def sample_finish_kernel(
    logits,  # [B, V]
    temperature,  # [B]
    best_score,  # [B, PROGRAMS]
    best_token,  # [B, PROGRAMS]
    count,  # [B] int32, with filters
    memory,  # [3, PLANE] int32, statistics of the kept tokens
    memory_of_all,  # [3, PLANE] int32, statistics of all tokens, if HAS_FULL
    tokens,  # [B] int64
    logp,  # [B]
    full_logp,  # [B]
    V,
    TILES,
    PROGRAMS,
    PLANE,
    logits_row,
    HAS_FILTER: tl.constexpr,
    HAS_LOGP: tl.constexpr,
    HAS_FULL: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The token with the largest score (the lowest id among equal scores) and its log-probabilities."""
    row = tl.program_id(0).to(tl.int64)
    number = TILES
    if HAS_FILTER:
        number = tl.load(count + row)
    i = tl.arange(0, BLOCK)
    used = i * GROUP < number
    score = tl.load(best_score + row * PROGRAMS + i, mask=used, other=float("-inf"))
    token = tl.load(best_token + row * PROGRAMS + i, mask=used, other=0x7FFFFFFF)
    best = tl.max(score, axis=0)
    token = tl.min(tl.where(score == best, token, 0x7FFFFFFF), axis=0)
    token = tl.minimum(token, V - 1)  # a row of NaN may have no tiles left
    tl.store(tokens + row, token.to(tl.int64))
    if HAS_LOGP:
        one = tl.arange(0, 1)
        z = tl.load(logits + row * logits_row + token + one).to(tl.float32) * inverse_of(tl.load(temperature + row))
        tl.store(logp + row + one, row_logp(memory, PLANE, row, z, number, TILES, CHUNK))
        if HAS_FULL:
            tl.store(full_logp + row + one, row_logp(memory_of_all, PLANE, row, z, TILES, TILES, CHUNK))


@direct
@triton.jit
def filter_logits_kernel(
    logits,  # [B, V] fp32, in place
    temperature,  # [B]
    min_p,  # [B]
    threshold,  # [B] int32
    maximum,  # [B] fp32
    V,
    logits_row,
    HAS_FILTER: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiplies by 1/T and writes -inf where a token is not kept."""
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + row * logits_row + v
    t = tl.load(temperature + row)
    z = tl.load(at, mask=v < V, other=float("-inf")) * inverse_of(t)
    if HAS_FILTER:
        keep = key_of(z) >= tl.load(threshold + row)
        if HAS_MIN_P:
            keep = keep & (exp(z - tl.load(maximum + row)) >= tl.where(t > 0.0, tl.load(min_p + row), 0.0))
        z = tl.where(keep, z, float("-inf"))
    tl.store(at, z, mask=v < V)


# ---- launchers ----------------------------------------------------------------------------------

NOTHING, KEPT, FULL = 0, 1, 2
"""Log-probabilities that `sample` computes: none, over the kept set, or over the kept set and over all tokens."""


class Filtered:
    """Thresholds of a batch, the tiles above them, and the cleared bit masks.

    Args:
        logits: [B, V], rows contiguous.
        temperature, top_k, top_p, min_p: [B], contiguous; at least one filter is not None.
        sums: whether to compute the statistics of the log-probability over all tokens.
    """

    def __init__(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor | None,
        top_p: Tensor | None,
        min_p: Tensor | None,
        sums: bool,
    ) -> None:
        (batch, vocab), row = logits.shape, logits.stride(0)
        number, words = cdiv(vocab, VOCAB_TILE), cdiv(vocab, 32)
        new = lambda dtype, *shape: torch.empty(shape, dtype=dtype, device=logits.device)
        self.kept, self.memory = new(torch.int32, batch, words), new(torch.int32, 3 if sums else 1, batch * number)
        self.threshold, self.maximum = new(torch.int32, batch), new(torch.float32, batch)
        self.tiles, self.count = new(torch.int32, batch, number), new(torch.int32, batch)
        scratch = new(torch.int32, batch, min(REGISTER_KEYS.value, vocab))
        sample_maxima_kernel[(batch, cdiv(number, GROUP))](
            logits, temperature, self.memory, self.kept, vocab, number, words, batch * number, row,
            HAS_SUMS=sums, GROUP=GROUP, num_warps=4, **options(),
        )  # fmt: skip
        sample_threshold_kernel[(batch,)](
            logits, temperature, top_k, top_p, min_p, self.memory.view(torch.float32), scratch, self.threshold,
            self.maximum, self.tiles, self.count, vocab, number, scratch.shape[1], row, HAS_TOP_K=top_k is not None,
            HAS_TOP_P=top_p is not None, HAS_MIN_P=min_p is not None, CHUNK=next_power_of_2(number, 32),
            num_warps=8, **options(),
        )  # fmt: skip


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
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    seeds, positions, temperature = seeds.contiguous(), positions.contiguous(), temperature.contiguous()
    top_k, top_p, min_p = (None if t is None else t.contiguous() for t in (top_k, top_p, min_p))
    (batch, vocab), row = logits.shape, logits.stride(0)
    words, number = cdiv(vocab, 32), cdiv(vocab, VOCAB_TILE)
    filtered = (top_k, top_p, min_p) != (None, None, None)
    new = lambda dtype, *shape: torch.empty(shape, dtype=dtype, device=logits.device)
    tokens, kept = new(torch.int64, batch), new(torch.int32, batch if filtered else 0, words)
    logp = new(torch.float32, batch if scores else 0)
    full = new(torch.float32, batch if scores == FULL else 0)
    if batch == 0:
        return tokens, kept, logp, full
    programs = cdiv(number, GROUP)
    best_score, best_token = new(torch.float32, batch, programs), new(torch.int32, batch, programs)
    memory = new(torch.int32, 3, batch * number) if scores else None
    with on_device(logits):
        f = Filtered(logits, temperature, top_k, top_p, min_p, scores == FULL) if filtered else None
        kept = kept if f is None else f.kept
        threshold, maximum, tiles, count = (None,) * 4 if f is None else (f.threshold, f.maximum, f.tiles, f.count)
        sample_draw_kernel[(batch, programs)](
            logits, seeds, positions, temperature, min_p, threshold, maximum, tiles, count,
            None if f is None else kept, memory, best_score, best_token, vocab, number, words, batch * number, row,
            HAS_FILTER=filtered, HAS_MIN_P=min_p is not None, HAS_LOGP=scores > NOTHING, GROUP=GROUP,
            num_warps=4, **options(),
        )  # fmt: skip
        sample_finish_kernel[(batch,)](
            logits, temperature, best_score, best_token, count, memory, memory if f is None else f.memory, tokens,
            logp, full, vocab, number, programs, batch * number, row,
            HAS_FILTER=filtered, HAS_LOGP=scores > NOTHING, HAS_FULL=scores == FULL, GROUP=GROUP,
            BLOCK=next_power_of_2(programs, 32), CHUNK=next_power_of_2(number, 32), num_warps=4, **options(),
        )  # fmt: skip
    return tokens, kept, logp, full


def filter_logits_(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> None:
    """Multiplies fp32 logits [B, V] with contiguous rows by 1/T and writes -inf where a token is not kept."""
    batch, vocab = logits.shape
    temperature = temperature.contiguous()
    top_k, top_p, min_p = (None if t is None else t.contiguous() for t in (top_k, top_p, min_p))
    if batch == 0:
        return
    with on_device(logits):
        f = None
        if (top_k, top_p, min_p) != (None, None, None):
            f = Filtered(logits, temperature, top_k, top_p, min_p, False)
        block = min(4096, next_power_of_2(vocab, 128))
        filter_logits_kernel[(batch, cdiv(vocab, block))](
            logits, temperature, min_p, None if f is None else f.threshold, None if f is None else f.maximum,
            vocab, logits.stride(0), HAS_FILTER=f is not None, HAS_MIN_P=min_p is not None, BLOCK=block,
            num_warps=4, **options(),
        )  # fmt: skip
