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
    IS_HIP,
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
TWO_MINUS_INF = tl.constexpr(-0x007F0080)  # bf16, in both halves of an int32

ROWS_FROM, TILES_FROM = 256, 128  # least tokens and vocabulary tiles for one program per row
SHARED_PART, SHARED_ROWS = 8, 256  # n // SHARED_PART rows, at most SHARED_ROWS, are split over programs (shares)
SHARE_GROUPS = 3  # loop iterations of a share
SCRATCH = 1 << 27  # bytes of the buffers of tile statistics; more tokens are processed in chunks

# ---- kernels ------------------------------------------------------------------------------------


@triton.jit
def max_nan(a, b):
    """Maximum that propagates NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def max_nan_bf16x2(a, b):
    """`max_nan` of two bf16 numbers in each int32; NVIDIA only."""
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def low_half(pair):
    """The first of two packed bf16 numbers, as fp32."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_half(pair):
    """The second of two packed bf16 numbers, as fp32."""
    return (pair & -65536).to(tl.float32, bitcast=True)


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
    logits, kept, inverse, tile, V,
    HAS_TEMPERATURE: tl.constexpr, HAS_KEPT: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """`tile_stats` of the tiles `tile` [G]; logits and kept point at the rows of the tiles, inverse is [G].

    A tile is loaded as [TILE / WIDTH, WIDTH], so that a few threads hold all of it and exchange little. PACKED loads
    bf16 in pairs and takes the maximum of pairs; scaling the maximum by 1/T is exact because rounding is monotone.
    """
    c = (tl.arange(0, TILE // WIDTH) * WIDTH)[None, :, None]
    if PACKED:
        at = (tile * (TILE // 2))[:, None, None] + c // 2 + tl.arange(0, WIDTH // 2)[None, None, :]
        logits = logits.to(tl.pointer_type(tl.int32))
        if MASKED:
            pair = tl.load(logits + at, mask=at < V // 2, other=TWO_MINUS_INF)
        else:
            pair = tl.load(logits + at)
        top = tl.reduce(tl.reduce(pair, 1, max_nan_bf16x2), 1, max_nan_bf16x2)
        m = max_nan(low_half(top), high_half(top))
        z = tl.reshape(tl.join(low_half(pair), high_half(pair)), (tile.shape[0], TILE // WIDTH, WIDTH))
        if HAS_TEMPERATURE:
            m = m * inverse
            z = z * inverse[:, None, None]
    else:
        first = (tile * TILE)[:, None, None] + c
        lane = tl.arange(0, WIDTH)[None, None, :]
        if MASKED:
            z = tl.load(logits + (first + lane), mask=first + lane < V, other=float("-inf")).to(tl.float32)
        else:
            z = tl.load(logits + (first + lane)).to(tl.float32)
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


@triton.jit(do_not_specialize=["whole_rows"])
def logprob_rows_kernel(
    logits,  # [T, V]
    targets,  # [T] int64
    inv_temperature,  # [T] fp32
    kept,  # [T, WORDS] int32
    memory,  # [3, PLANE] int32, a plane holds [T, TILES]
    target_z,  # [T] fp32: written for rows that are cut into shares
    logp,  # [T]
    entropy,  # [T]
    lse,  # [T]
    stats,  # [T, 2]
    whole_rows,
    V,
    TILES,
    WORDS,
    PLANE,
    logits_row,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARE: tl.constexpr,
):
    """One row per program, from logits to results: for many rows of a large vocabulary.

    Rows from `whole_rows` on are split into shares of SHARE tiles, one program each, whose statistics
    logprob_combine_kernel combines. They are scheduled last and fill the tail of the last wave.
    """
    program = tl.program_id(0)
    shares = tl.cdiv(TILES, SHARE)
    number = program
    begin = 0
    end = TILES
    if program >= whole_rows:
        number = whole_rows + (program - whole_rows) // shares
        begin = (program - whole_rows) % shares * SHARE
        end = tl.minimum(begin + SHARE, TILES)
    row = number.to(tl.int64) + tl.arange(0, 1)
    inside = row >= 0
    z = target_logit(
        logits, tl.load(targets + row), inv_temperature, kept, row, inside, V, WORDS, logits_row,
        HAS_TEMPERATURE, HAS_KEPT,
    )  # fmt: skip
    inverse = tl.full((GROUP,), 1.0, tl.float32)
    if HAS_TEMPERATURE:
        inverse = inverse * tl.load(inv_temperature + number)
    own_logits = logits + number.to(tl.int64) * logits_row
    own_kept = kept
    if HAS_KEPT:
        own_kept += number.to(tl.int64) * WORDS
    own_memory = memory + number.to(tl.int64) * TILES
    group = tl.arange(0, GROUP)
    whole = tl.minimum(V // (GROUP * TILE) * GROUP, end)
    for first in range(begin, whole, GROUP):
        m, s, e = group_stats(
            own_logits, own_kept, inverse, first + group, V, HAS_TEMPERATURE, HAS_KEPT, PACKED, False, WIDTH
        )
        store_stats(own_memory, PLANE, first, TILES, m, s, e)
    for first in range(tl.maximum(whole, begin), end, GROUP):
        m, s, e = group_stats(
            own_logits, own_kept, inverse, first + group, V, HAS_TEMPERATURE, HAS_KEPT, PACKED, True, WIDTH
        )
        store_stats(own_memory, PLANE, first, TILES, m, s, e)
    if program < whole_rows:
        tl.debug_barrier()  # finish_rows reads statistics that other threads stored
        finish_rows(
            memory.to(tl.pointer_type(tl.float32)), memory + PLANE, memory + 2 * PLANE, z, logp, entropy, lse, stats,
            row, inside, TILES, CHUNK,
        )  # fmt: skip
    elif begin == 0:
        tl.store(target_z + row, z)


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
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """GROUP tiles per program, of one or several rows: for few rows or a small vocabulary."""
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
        logits + (row * logits_row)[:, None, None], own_kept, inverse, tile, V,
        HAS_TEMPERATURE, HAS_KEPT, PACKED, True, WIDTH,
    )  # fmt: skip
    store_stats(memory, PLANE, first, T * TILES, m, s, e)
    target = tl.load(targets + row, mask=inside, other=0)
    own = inside & (tl.where((target >= 0) & (target < V), target // TILE, 0) == tile)
    z = target_logit(logits, target, inv_temperature, kept, row, own, V, WORDS, logits_row, HAS_TEMPERATURE, HAS_KEPT)
    tl.store(target_z + row, z, mask=own)


@direct
@triton.jit(do_not_specialize=["first", "T"])
def logprob_combine_kernel(
    tile_max,  # [T, TILES] fp32
    tile_sum,  # [T, TILES] int32
    tile_entropy,  # [T, TILES] int32
    target_z,  # [T] fp32
    logp,  # [T]
    entropy,  # [T]
    lse,  # [T]
    stats,  # [T, 2]
    first,
    T,
    TILES,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """`finish_rows` of the rows from `first` on."""
    after_previous(PDL)
    row = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
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

    def combine(self, logp: Tensor, entropy: Tensor, lse: Tensor, stats: Tensor, first: int = 0) -> None:
        """Fills logp, entropy, lse [n] and stats [n, 2] of the tokens [first, n) of the buffers."""
        n = logp.shape[0]
        chunk = next_power_of_2(self.tiles)
        rows = max(1, 1024 // chunk)
        if first < n:
            logprob_combine_kernel[(cdiv(n - first, rows),)](
                self.maximum, self.sum, self.entropy, self.target, logp, entropy, lse, stats, first, n, self.tiles,
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
    packed = whole_vectors and logits.dtype == torch.bfloat16 and kept is None and logits.is_cuda and not IS_HIP
    # four threads per tile if they load 16 bytes each
    width = 32 if whole_vectors and logits.element_size() == 2 else 16
    flags = {"HAS_TEMPERATURE": inv_temperature is not None, "HAS_KEPT": kept is not None, "PACKED": packed}
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
            if n >= ROWS_FROM and tiles >= TILES_FROM:
                group = 64 if tiles >= 512 else 32
                share = SHARE_GROUPS * group
                whole = n - min(SHARED_ROWS, n // SHARED_PART)
                logprob_rows_kernel[(whole + (n - whole) * cdiv(tiles, share),)](
                    *inputs, buffers.target, *results, whole, vocab, tiles, words, plane, row, **flags,
                    GROUP=group, WIDTH=width, CHUNK=next_power_of_2(tiles), SHARE=share, num_warps=group // 8,
                    **({"maxnreg": 48} if packed else {}), **options(),  # for five programs of 8 warps per SM
                )  # fmt: skip
                buffers.combine(*results, first=whole)
            else:
                logprob_tiles_kernel[(cdiv(n * tiles, 32),)](
                    *inputs, buffers.target, n, vocab, tiles, words, plane, row, **flags,
                    GROUP=32, WIDTH=width, num_warps=4, **options(),
                )  # fmt: skip
                buffers.combine(*results)
    return out
