"""logprob on GPUs: statistics of vocabulary tiles, combined per row; the anchor of `cuda/logprob.py`.

Contract: docs/ops/logprob.md. Every reduction is a maximum or an integer sum, so no layout changes a bit.
`linear_logprob` computes the same statistics in its epilogue and shares the combination.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract.orders import FIXED_POINT_BITS, ROW_POINT_BITS, VOCAB_TILE
from rlkernel.kernels.triton.common import (
    LN2,
    LOG2E,
    after_previous,
    cdiv,
    exp2,
    log2,
    next_power_of_2,
    on_device,
    options,
    pdl,
)
from rlkernel.kernels.triton.launch import direct
from rlkernel.kernels.triton.logprob_backward import contiguous_rows, is_kept

TILE = tl.constexpr(VOCAB_TILE)
UNIT = tl.constexpr(2.0**-FIXED_POINT_BITS)
ROW_UNITS = tl.constexpr(2.0**ROW_POINT_BITS)
TILE_OF_ONES = tl.constexpr((VOCAB_TILE * 0x3F800000 + 2**31) % 2**32 - 2**31)  # sum of their bits as int32
SCRATCH = 1 << 27  # bytes of the buffers of tile statistics; more tokens are processed in chunks

# ---- kernels ------------------------------------------------------------------------------------


@triton.jit
def max_nan(a, b):
    """Maximum that propagates NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def fixed_point_terms(z, m):
    """The bits of 1 + exp(z - m) and of 1 + exp(z - m) * (m - z); the excess over the bits of 1 has units of 2^-23."""
    d = m - z
    p = exp2(d * -LOG2E)  # the bits of exp(-d)
    q = p * d
    q = tl.minimum(tl.where(q > 0.0, q, 0.0), 1.0)  # 0 * inf counts as 0; the clamp is free, testing p is not
    return (1.0 + p).to(tl.int32, bitcast=True), (1.0 + q).to(tl.int32, bitcast=True)


@triton.jit
def fixed_point_sum(total, m):
    """Fixed-point sum of a tile: `total` of `fixed_point_terms` minus the ones; 0 for an empty tile."""
    return tl.where(m == float("-inf"), 0, total - TILE_OF_ONES)


@triton.jit
def tile_stats(z):
    """(maximum, fixed-point sum of exp, fixed-point sum of exp * distance) over the last axis of z [A, B, TILE].

    NaN and +inf show in the maximum.
    """
    m = tl.reduce(z, 2, max_nan)
    p, q = fixed_point_terms(z, tl.expand_dims(m, 2))
    return m, fixed_point_sum(tl.sum(p, axis=2), m), fixed_point_sum(tl.sum(q, axis=2), m)


@triton.jit
def group_stats(
    logits, kept, inverse, tile, V, HAS_TEMPERATURE: tl.constexpr, HAS_KEPT: tl.constexpr, WIDTH: tl.constexpr
):
    """`tile_stats` of the tiles `tile` [G]; logits and kept point at the rows of the tiles, inverse is [G].

    A tile is loaded as [TILE / WIDTH, WIDTH], so that a few threads hold all of it and exchange little.
    """
    c = (tl.arange(0, TILE // WIDTH) * WIDTH)[None, :, None]
    first = (tile * TILE)[:, None, None] + c
    lane = tl.arange(0, WIDTH)[None, None, :]
    z = tl.load(logits + (first + lane), mask=first + lane < V, other=float("-inf")).to(tl.float32)
    if HAS_TEMPERATURE:
        z = z * inverse[:, None, None]
    if HAS_KEPT:
        # one load per word of the mask, because a load of all words would impose its layout on z
        at = (tile * (TILE // 32))[:, None, None]
        word = tl.load(kept + at, mask=at * 32 < V, other=0)
        for i in tl.static_range(1, TILE // 32):
            word = tl.where(c >> 5 == i, tl.load(kept + at + i, mask=(at + i) * 32 < V, other=0), word)
        z = tl.where(((word >> ((c & 31) + lane)) & 1) != 0, z, float("-inf"))
    m = tl.reduce(tl.reduce(z, 1, max_nan), 1, max_nan)
    p, q = fixed_point_terms(z, m[:, None, None])
    s = fixed_point_sum(tl.sum(tl.sum(p, axis=1), axis=1), m)
    e = fixed_point_sum(tl.sum(tl.sum(q, axis=1), axis=1), m)
    return m, s, e


@triton.jit
def store_stats(memory, PLANE, first, end, m, s, e):
    """Stores statistics [G] of tiles [first, first + G), those below `end`, in the three planes of `memory`."""
    i = tl.arange(0, 4 * m.shape[0])
    tile, plane = first + (i >> 2), i & 3
    # one store, because each of three would need a layout change with two barriers
    packed = tl.reshape(tl.join(tl.join(m.to(tl.int32, bitcast=True), e), tl.join(s, s)), (4 * m.shape[0],))
    tl.store(memory + plane * PLANE + tile, packed, mask=(tile < end) & (plane < 3))


@triton.jit
def row_fixed_point(x):
    """x in [0, 128] as int64 in units of 2^-40, rounded to nearest even."""
    x = x * ROW_UNITS
    # adding 2^23 rounds a smaller number to an integer; larger numbers are integers already
    return tl.where(x < 8388608.0, (x + 8388608.0) - 8388608.0, x).to(tl.int64)


@triton.jit
def combine_tiles(tile_max, tile_sum, tile_entropy, at, here):
    """(maximum, sum, log of the sum, sum weighted by distance) of rows from their tiles at `at` [ROWS, CHUNK].

    The sum of an empty row counts as 1.
    """
    m = tl.load(tile_max + at, mask=here, other=float("-inf"))
    s = tl.load(tile_sum + at, mask=here, other=0).to(tl.float32) * UNIT
    e = tl.load(tile_entropy + at, mask=here, other=0).to(tl.float32) * UNIT
    top = tl.reduce(m, 1, max_nan) + 0.0
    distance = top[:, None] - m
    w = exp2(distance * -LOG2E)
    away = tl.where(w == 0.0, 0.0, w * tl.fma(s, distance, e))  # because the distance may be infinite
    total = tl.sum(row_fixed_point(w * s), axis=1).to(tl.float32) * (1.0 / ROW_UNITS)
    weighted = tl.sum(row_fixed_point(away), axis=1).to(tl.float32) * (1.0 / ROW_UNITS)
    total = tl.where(top == float("-inf"), 1.0, total)
    return top, total, log2(total) * LN2, weighted


@triton.jit
def logp_of(z, top, log_total):
    """Log-probability of a logit; NaN in a row with NaN or +inf."""
    out = tl.where(top == float("-inf"), float("-inf"), (z - top) - log_total)
    return tl.where((top != top) | (top == float("inf")), float("nan"), out)


@triton.jit
def finish_rows(
    tile_max, tile_sum, tile_entropy, z, logp, entropy, lse, stats, row, inside, TILES, CHUNK: tl.constexpr
):
    """Combines the tiles of the rows `row` and stores the op's results; z is the target's logit. CHUNK >= TILES."""
    row = row.to(tl.int64)
    tile = tl.arange(0, CHUNK)
    here = inside[:, None] & (tile < TILES)[None, :]
    at = (row * TILES)[:, None] + tile[None, :]
    top, total, log_total, weighted = combine_tiles(tile_max, tile_sum, tile_entropy, at, here)
    bad = (top != top) | (top == float("inf"))
    empty = top == float("-inf")
    out_lse = tl.where(empty, float("-inf"), top + log_total)
    out_entropy = tl.where(empty, 0.0, log_total + tl.div_rn(weighted, total))
    nan = float("nan")
    tl.store(logp + row, logp_of(z, top, log_total), mask=inside)
    tl.store(lse + row, tl.where(bad, nan, out_lse), mask=inside)
    tl.store(entropy + row, tl.where(bad, nan, out_entropy), mask=inside)
    tl.store(stats + 2 * row, tl.where(bad, nan, top), mask=inside)
    tl.store(stats + 2 * row + 1, tl.where(bad, nan, log_total), mask=inside)


@triton.jit
def target_logit(
    logits, target, inv_temperature, kept, row, inside, V, WORDS, logits_row,
    HAS_TEMPERATURE: tl.constexpr, HAS_KEPT: tl.constexpr,
):  # fmt: skip
    """The scaled logit of each row's target; -inf if it was dropped or lies outside the vocabulary."""
    inside = inside & (target >= 0) & (target < V)
    z = tl.load(logits + row * logits_row + target, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_TEMPERATURE:
        z = z * tl.load(inv_temperature + row, mask=inside, other=1.0)
    if HAS_KEPT:
        z = tl.where(is_kept(kept, row, target, inside, WORDS), z, float("-inf"))
    return z


@direct
@triton.jit(do_not_specialize=["T"])
def logprob_tiles_kernel(
    logits,  # [T, V]
    targets,  # [T] int64
    inv_temperature,  # [T] fp32
    kept,  # [T, WORDS] int32
    memory,  # [3, PLANE] int32, a plane holds [T, TILES]
    target_z,  # [T] fp32
    T,
    V,
    TILES,
    WORDS,
    PLANE,
    logits_row,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Statistics of GROUP tiles per program, of one or several rows, and the logits of targets in them."""
    first = tl.program_id(0) * GROUP
    at = first + tl.arange(0, GROUP)
    inside = at < T * TILES
    row = (at // TILES).to(tl.int64)
    tile = tl.where(inside, at % TILES, TILES)
    inverse = tl.full((GROUP,), 1.0, tl.float32)
    if HAS_TEMPERATURE:
        inverse = tl.load(inv_temperature + row, mask=inside, other=1.0)
    own_kept = kept
    if HAS_KEPT:
        own_kept += (row * WORDS)[:, None, None]
    m, s, e = group_stats(
        logits + (row * logits_row)[:, None, None], own_kept, inverse, tile, V, HAS_TEMPERATURE, HAS_KEPT, WIDTH
    )
    store_stats(memory, PLANE, first, T * TILES, m, s, e)
    target = tl.load(targets + row, mask=inside, other=0)
    own = inside & (tl.where((target >= 0) & (target < V), target // TILE, 0) == tile)
    z = target_logit(logits, target, inv_temperature, kept, row, own, V, WORDS, logits_row, HAS_TEMPERATURE, HAS_KEPT)
    tl.store(target_z + row, z, mask=own)


@direct
@triton.jit(do_not_specialize=["T"])
def logprob_combine_kernel(
    tile_max,  # [T, TILES] fp32
    tile_sum,  # [T, TILES] int32
    tile_entropy,  # [T, TILES] int32
    target_z,  # [T] fp32
    logp,  # [T]
    entropy,  # [T]
    lse,  # [T]
    stats,  # [T, 2]
    T,
    TILES,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """`finish_rows` of ROWS rows per program."""
    after_previous(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < T
    z = tl.load(target_z + row, mask=inside, other=0.0)
    finish_rows(tile_max, tile_sum, tile_entropy, z, logp, entropy, lse, stats, row, inside, TILES, CHUNK)


# ---- launchers ----------------------------------------------------------------------------------


class TileBuffers:
    """Device buffers for a chunk of tokens: the statistics of their vocabulary tiles, and their targets' logits."""

    def __init__(self, tokens: int, vocab_size: int, device: torch.device) -> None:
        self.tiles = cdiv(vocab_size, VOCAB_TILE)
        self.tokens = max(128, min(tokens, SCRATCH // (12 * self.tiles) // 128 * 128))
        shape = (min(tokens, self.tokens), self.tiles)
        self.plane = cdiv(shape[0] * shape[1], 16) * 16  # 64-byte aligned planes
        self.memory = torch.empty(3, self.plane, dtype=torch.int32, device=device)
        planes = self.memory[:, : shape[0] * shape[1]].unflatten(1, shape)
        self.maximum, self.sum, self.entropy = planes[0].view(torch.float32), planes[1], planes[2]
        self.target = torch.empty(shape[0], dtype=torch.float32, device=device)

    def combine(self, logp: Tensor, entropy: Tensor, lse: Tensor, stats: Tensor) -> None:
        """Fills logp, entropy, lse [n] and stats [n, 2] of the first n tokens of the buffers."""
        n = logp.shape[0]
        chunk = next_power_of_2(self.tiles)
        rows = max(1, 1024 // chunk)
        logprob_combine_kernel[(cdiv(n, rows),)](
            self.maximum, self.sum, self.entropy, self.target, logp, entropy, lse, stats, n, self.tiles,
            ROWS=rows, CHUNK=chunk, num_warps=8, **pdl(logp), **options(),
        )  # fmt: skip


def outputs(tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty logp, entropy, lse [T] and stats [T, 2], fp32."""
    shapes = ((tokens,), (tokens,), (tokens,), (tokens, 2))
    logp, entropy, lse, stats = (torch.empty(s, dtype=torch.float32, device=device) for s in shapes)
    return logp, entropy, lse, stats


def slice_rows(t: Tensor | None, start: int, stop: int) -> Tensor | None:
    """t[start:stop], or None."""
    return None if t is None else t[start:stop]


def logprob(
    logits: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits, targets = contiguous_rows(logits), targets.contiguous()
    inv_temperature = None if inv_temperature is None else inv_temperature.contiguous()
    kept = None if kept is None else kept.contiguous()
    tokens, vocab = logits.shape
    out = outputs(tokens, logits.device)
    if tokens == 0:
        return out
    row = logits.stride(0)
    whole_vectors = vocab % 16 == 0 and row % 16 == 0 and logits.data_ptr() % 16 == 0
    # four threads per tile if they load 16 bytes each
    width = 32 if whole_vectors and logits.element_size() == 2 else 16
    flags = {"HAS_TEMPERATURE": inv_temperature is not None, "HAS_KEPT": kept is not None}
    words = cdiv(vocab, 32)
    with on_device(logits):
        buffers = TileBuffers(tokens, vocab, logits.device)
        tiles, plane = buffers.tiles, buffers.plane
        for start in range(0, tokens, buffers.tokens):
            stop = min(tokens, start + buffers.tokens)
            n = stop - start
            inputs = (
                logits[start:stop], targets[start:stop], slice_rows(inv_temperature, start, stop),
                slice_rows(kept, start, stop), buffers.memory,
            )  # fmt: skip
            results = tuple(t[start:stop] for t in out)
            logprob_tiles_kernel[(cdiv(n * tiles, 32),)](
                *inputs, buffers.target, n, vocab, tiles, words, plane, row, **flags,
                GROUP=32, WIDTH=width, num_warps=4, **options(),
            )  # fmt: skip
            buffers.combine(*results)
    return out
