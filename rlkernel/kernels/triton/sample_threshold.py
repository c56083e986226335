"""Thresholds of top-k and top-p on GPUs without a sort: the tiles' maxima exclude most of the vocabulary.

Contract: docs/ops/sample.md. A key is an int32 with the order of the logits. The threshold is the largest key such
that the entries at or above it reach a count (top-k) or a mass (top-p). Counts and masses are integers, so the search
strategy changes no bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel.contract.orders import VOCAB_TILE
from rlkernel.kernels.triton.common import exp
from rlkernel.kernels.triton.launch import direct

TILE = tl.constexpr(VOCAB_TILE)
LOWEST = tl.constexpr(-(1 << 31))  # below the key of every number
MINUS_INFINITY = tl.constexpr(-0x7F800001)  # the key of -inf
MASS = tl.constexpr(2.0**31)  # fixed-point scale of exp(z - max)
MASSLESS = tl.constexpr(22.0)  # logits this far below the maximum have mass 0: exp(-22) * 2^31 < 1

GROUP = tl.constexpr(32)  # tiles in registers at a time
REGISTER_KEYS = tl.constexpr(4096)  # most entries that the last step searches in registers
FEW_TILES = tl.constexpr(64)  # up to this many candidate tiles are gathered without a narrowing pass


@triton.jit
def key_of(z):
    """int32 key with the order of fp32 numbers; both zeros have the same key."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The fp32 number of an int32 key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def inverse_of(temperature):
    """1/T; 1 for greedy rows."""
    return tl.div_rn(1.0, tl.where(temperature > 0.0, temperature, 1.0))


@triton.jit
def load_tiles(logits, tile, V, inverse):
    """(entries, scaled logits) of the tiles `tile` [G] as [G, TILE / 16, 16]; -inf past the vocabulary."""
    part = (tl.arange(0, TILE // 16) * 16)[None, :, None] + tl.arange(0, 16)[None, None, :]
    v = (tile * TILE)[:, None, None] + part
    return v, tl.load(logits + v, mask=v < V, other=float("-inf")).to(tl.float32) * inverse


@triton.jit
def list_tiles(tiles, keys, least):
    """Stores the numbers of the tiles with a maximum `keys` of at least `least`, ascending; returns how many."""
    active = keys >= least
    count = active.to(tl.int32)
    tl.debug_barrier()  # the previous list has been read
    tl.store(tiles + tl.cumsum(count, 0) - 1, tl.arange(0, keys.shape[0]), mask=active)
    tl.debug_barrier()
    return tl.sum(count, axis=0)


@triton.jit
def keys_of_tiles(logits, tiles, first, count, V, inverse):
    """Keys [GROUP, TILE / 16, 16] of the listed tiles from `first` on; the lowest key for entries that do not exist."""
    i = first + tl.arange(0, GROUP)
    v, z = load_tiles(logits, tl.load(tiles + i, mask=i < count, other=V // TILE + 1), V, inverse)
    return tl.where(v < V, key_of(z), LOWEST)


@triton.jit
def weigh(keys, least, top, BY_MASS: tl.constexpr):
    """int64 weight of each entry with a key of at least `least`: 1, or BY_MASS its fixed-point mass; else 0."""
    if BY_MASS:
        weight = (exp(value_of(keys) - top) * MASS).to(tl.uint32).to(tl.int64)
        weight = tl.where(keys >= least, weight, 0)
    else:
        weight = (keys >= least).to(tl.int64)
    return weight


@triton.jit
def weight_from(logits, tiles, count, V, inverse, top, least, BY_MASS: tl.constexpr):
    """Total weight of the listed tiles' entries with a key of at least `least`."""
    total = tl.zeros((GROUP, TILE // 16), tl.int64)
    for first in range(0, count, GROUP):
        total += tl.sum(weigh(keys_of_tiles(logits, tiles, first, count, V, inverse), least, top, BY_MASS), axis=2)
    return tl.sum(tl.sum(total, axis=1), axis=0)


@triton.jit
def split_key(low, high, i: tl.constexpr, BY_VALUE):
    """Key i of the 7 that split [low, high) into 8 parts, equal in value if BY_VALUE, else in key."""
    at = low + (high - low) * i // 8
    if BY_VALUE:
        end = value_of((high - 1).to(tl.int32))
        start = value_of(low.to(tl.int32))
        start = tl.where(start >= end - 32.0, start, end - 32.0)
        at = key_of(start + (end - start) * (i / 8)).to(tl.int64)
    return tl.minimum(tl.maximum(at, low + 1), high)


@triton.jit
def narrow(logits, tiles, count, V, inverse, top, need, low, high, above, by_value, BY_MASS: tl.constexpr):
    """One pass over the listed tiles: the eighth of [low, high) that holds the threshold, and the weight above it."""
    splits = ()
    totals = ()
    for i in tl.static_range(1, 8):
        splits = splits + (split_key(low, high, i, by_value),)
        totals = totals + (tl.zeros((GROUP, TILE // 16), tl.int64),)
    for first in range(0, count, GROUP):
        keys = keys_of_tiles(logits, tiles, first, count, V, inverse)
        weight = weigh(keys, low.to(tl.int32), top, BY_MASS)
        more = ()
        for i in tl.static_range(7):
            above_it = keys >= splits[i].to(tl.int32)
            more = more + (totals[i] + tl.sum(tl.where(above_it, weight, 0), axis=2),)
        totals = more
    for i in tl.static_range(7):
        n = tl.sum(tl.sum(totals[6 - i], axis=1), axis=0)
        if n < need:
            high, above = splits[6 - i], n
        elif splits[6 - i] > low:
            low = splits[6 - i]
    return low, high, above


@triton.jit
def gather(logits, tiles, count, V, inverse, low, high, scratch):
    """Stores the keys in [low, high) of the listed tiles, as many as fit; returns how many there are."""
    found = tl.zeros((), tl.int32)
    tl.debug_barrier()  # the previous keys have been read
    for first in range(0, count, GROUP):
        keys = tl.reshape(keys_of_tiles(logits, tiles, first, count, V, inverse), (GROUP * TILE,))
        inside = (keys >= low.to(tl.int32)) & (keys < high.to(tl.int32))
        at = found + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(scratch + at, keys, mask=inside & (at < REGISTER_KEYS))
        found += tl.sum(inside.to(tl.int32), axis=0)
    tl.debug_barrier()
    return found


@triton.jit
def search(keys, top, need, low, high, BY_MASS: tl.constexpr):
    """The largest key in [low, high) such that the entries at or above it weigh at least `need`; two bits per step."""
    weight = weigh(keys, LOWEST + 1, top, BY_MASS)
    while high - low > 1:
        step = (high - low + 3) // 4
        one = tl.where(keys >= (low + step).to(tl.int32), weight, 0)
        two = tl.where(keys >= (low + 2 * step).to(tl.int32), weight, 0)
        three = tl.where(keys >= (low + 3 * step).to(tl.int32), weight, 0)
        totals = tl.sum(tl.join(tl.join(one, two), tl.join(three, tl.zeros_like(one))), axis=0)  # one reduction
        low += tl.sum(tl.sum((totals >= need).to(tl.int64), axis=1), axis=0) * step
        high = tl.minimum(high, low + step)
    return low


@triton.jit
def largest_key(logits, tiles, scratch, maxima, V, inverse, top, need, low, BY_MASS: tl.constexpr):
    """The largest key such that the row's entries at or above it weigh at least `need`; it is at least `low`.

    `maxima` are the keys of the tiles' maxima. Passes over the tiles that may hold the threshold narrow the range of
    keys until the entries inside fit in registers.
    """
    low = low.to(tl.int64)
    high = key_of(top).to(tl.int64) + 1
    above = tl.zeros((), tl.int64)
    count = list_tiles(tiles, maxima, low.to(tl.int32))
    found = tl.full((), REGISTER_KEYS + 1, tl.int32)
    turn = tl.zeros((), tl.int32)
    while (found > REGISTER_KEYS) & (high - low > 1):
        if (turn > 0) | (count > FEW_TILES):
            low, high, above = narrow(
                logits, tiles, count, V, inverse, top, need, low, high, above, turn < 3, BY_MASS
            )  # fmt: skip
            count = list_tiles(tiles, maxima, low.to(tl.int32))
        turn += 1
        if (count <= FEW_TILES) | (turn >= 3):
            found = gather(logits, tiles, count, V, inverse, low, high, scratch)
    if high - low > 1:
        i = tl.arange(0, REGISTER_KEYS)
        low = search(tl.load(scratch + i, mask=i < found, other=LOWEST), top, need - above, low, high, BY_MASS)
    return low.to(tl.int32)


@triton.jit
def bound_of_top_k(maxima, top, k, TILES):
    """A lower bound of the top-k threshold: the k-th largest tile maximum, or the key of -inf with fewer tiles."""
    low = tl.full((), MINUS_INFINITY, tl.int64)
    if k <= TILES:
        low = search(maxima, top, k.to(tl.int64), low, key_of(top).to(tl.int64) + 1, False)
    return low.to(tl.int32)


@direct
@triton.jit
def sample_threshold_kernel(
    logits,  # [B, V]
    temperature,  # [B]
    top_k,  # [B] int32
    top_p,  # [B]
    min_p,  # [B]
    tile_max,  # [B, TILES] fp32
    scratch,  # [B, SCRATCH] int32, SCRATCH = min(REGISTER_KEYS, V)
    threshold,  # [B] int32: least key of a kept token; LOWEST if nothing is filtered
    maximum,  # [B] fp32
    tiles,  # [B, TILES] int32: tiles that may hold kept tokens, ascending
    count,  # [B] int32: how many
    V,
    TILES,
    SCRATCH,
    logits_row,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_row
    tiles += row * TILES
    scratch += row * SCRATCH
    t = tl.load(temperature + row)
    inverse = inverse_of(t)
    tile = tl.arange(0, CHUNK)
    m = tl.load(tile_max + row * TILES + tile, mask=tile < TILES, other=float("-inf"))
    top = tl.max(m, axis=0)
    maxima = tl.where(tile < TILES, key_of(m), LOWEST)
    key = tl.full((), LOWEST, tl.int32)
    if HAS_TOP_K:
        k = tl.load(top_k + row)
        if (t > 0.0) & (k > 0) & (k < V):
            low = bound_of_top_k(maxima, top, k, TILES)
            key = largest_key(logits, tiles, scratch, maxima, V, inverse, top, k.to(tl.int64), low, False)
    if HAS_TOP_P:
        p = tl.load(top_p + row)
        if (t > 0.0) & (p < 1.0):
            low = tl.maximum(key, key_of(top - MASSLESS))
            listed = list_tiles(tiles, maxima, low)
            total = weight_from(logits, tiles, listed, V, inverse, top, low, True)
            limit = tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            key = largest_key(logits, tiles, scratch, maxima, V, inverse, top, limit, low, True)
    if HAS_MIN_P:
        least = tl.where(t > 0.0, tl.load(min_p + row), 0.0) * 0.999  # for tiles; sample_draw_kernel tests entries
        maxima = tl.where(exp(m - top) >= least, maxima, LOWEST)
    tl.store(count + row, list_tiles(tiles, maxima, tl.maximum(key, LOWEST + 1)))
    tl.store(threshold + row, key)
    tl.store(maximum + row, top)
