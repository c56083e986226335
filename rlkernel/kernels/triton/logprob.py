"""logprob on GPUs: statistics of vocabulary tiles, combined per row; the gradient elementwise.

Contract: docs/ops/logprob.md. Every reduction is a maximum or an integer sum, so no layout can change a bit;
`linear_logprob` forms the same statistics behind its matrix product and shares the combination.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract.orders import FIXED_POINT_BITS, ROW_POINT_BITS, VOCAB_TILE
from rlkernel.kernels.triton.aot import Variant
from rlkernel.kernels.triton.common import LN2, exp, log2, next_power_of_2, on_device, options

TILE = tl.constexpr(VOCAB_TILE)
UNIT = tl.constexpr(2.0**-FIXED_POINT_BITS)
ROW_UNITS = tl.constexpr(2.0**ROW_POINT_BITS)
ONE_BITS = tl.constexpr(0x3F800000)

GROUP = 16  # vocabulary tiles a program
SCRATCH = 1 << 27  # bytes of tile statistics at one time; more tokens run in turns

# ---- kernels ------------------------------------------------------------------------------------


@triton.jit
def larger(a, b):
    """Maximum that NaN survives."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def tile_stats(z):
    """(maximum, fixed-point sum of exp, fixed-point sum of exp * -distance) over the last axis of z [A, B, TILE].

    1 + p has 23 fraction bits, so its bits minus those of 1 are p in fixed point. NaN and +inf show in the maximum.
    """
    m = tl.reduce(z, 2, larger)
    base = tl.where(m == float("-inf"), 0.0, m)
    d = z - tl.expand_dims(base, 2)
    p = exp(d)
    q = tl.where(p == 0.0, 0.0, p * -d)
    s = tl.sum((p + 1.0).to(tl.int32, bitcast=True) - ONE_BITS, axis=2)
    e = tl.sum((q + 1.0).to(tl.int32, bitcast=True) - ONE_BITS, axis=2)
    return m, s, e


@triton.jit
def is_kept(kept, row, v, inside, WORDS):
    """Whether bit v of a row of the mask is set; row int64 and v broadcast together."""
    word = tl.load(kept + row * WORDS + (v >> 5), mask=inside, other=0)
    return ((word >> (v & 31)) & 1) != 0


@triton.jit
def logprob_tiles_kernel(
    logits,  # [T, V]
    targets,  # [T] int64
    inv_temperature,  # [T] fp32
    kept,  # [T, WORDS] int32
    tile_max,  # [T, TILES] fp32
    tile_sum,  # [T, TILES] int32
    tile_entropy,  # [T, TILES] int32
    target_z,  # [T] fp32
    V,
    TILES,
    WORDS,
    logits_row,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    v = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = v < V
    z = tl.load(logits + row * logits_row + v, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_TEMPERATURE:
        inverse = tl.load(inv_temperature + row)
        z = z * inverse
    if HAS_KEPT:
        z = tl.where(is_kept(kept, row, v, inside, WORDS), z, float("-inf"))
    m, s, e = tile_stats(tl.expand_dims(z, 0))
    at = row * TILES + tile[None, :]
    here = (tile < TILES)[None, :]
    tl.store(tile_max + at, m, mask=here)
    tl.store(tile_sum + at, s, mask=here)
    tl.store(tile_entropy + at, e, mask=here)
    target = tl.load(targets + row)
    if target // (GROUP * TILE) == tl.program_id(1):
        selected = tl.load(logits + row * logits_row + target, mask=target < V, other=float("-inf")).to(tl.float32)
        if HAS_TEMPERATURE:
            selected = selected * inverse
        if HAS_KEPT:
            selected = tl.where(is_kept(kept, row, target, target < V, WORDS), selected, float("-inf"))
        tl.store(target_z + row, selected)


@triton.jit
def whole_units(x):
    """x in [0, 128] in units of 2^-40, rounded to nearest even, int64."""
    x = x * ROW_UNITS
    # Adding 2^23 leaves a number below it no fraction bit; a larger one has none.
    return tl.where(x < 8388608.0, (x + 8388608.0) - 8388608.0, x).to(tl.int64)


@triton.jit
def tile_terms(m, s, e, top):
    """What one tile adds to the sums over its row, int64; `s` and `e` in units of 2^-23."""
    s = s.to(tl.float32) * UNIT
    w = exp(m - top)
    away = w * tl.fma(s, top - m, e.to(tl.float32) * UNIT)
    return whole_units(w * s), whole_units(tl.where(w == 0.0, 0.0, away))  # the distance may be infinite


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
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < T
    at = row.to(tl.int64) * TILES
    highest = tl.full((ROWS, CHUNK), float("-inf"), tl.float32)
    for first in range(0, TILES, CHUNK):
        tile = first + tl.arange(0, CHUNK)
        here = inside[:, None] & (tile < TILES)[None, :]
        highest = larger(highest, tl.load(tile_max + at[:, None] + tile[None, :], mask=here, other=float("-inf")))
    top = tl.reduce(highest, 1, larger) + 0.0
    sums = tl.zeros((ROWS, CHUNK), tl.int64)
    aways = tl.zeros((ROWS, CHUNK), tl.int64)
    for first in range(0, TILES, CHUNK):
        tile = first + tl.arange(0, CHUNK)
        here = inside[:, None] & (tile < TILES)[None, :]
        place = at[:, None] + tile[None, :]
        m = tl.load(tile_max + place, mask=here, other=float("-inf"))
        s = tl.load(tile_sum + place, mask=here, other=0)
        e = tl.load(tile_entropy + place, mask=here, other=0)
        a, b = tile_terms(m, s, e, top[:, None])
        sums += a
        aways += b
    total = tl.sum(sums, axis=1).to(tl.float32) * (1.0 / ROW_UNITS)
    weighted = tl.sum(aways, axis=1).to(tl.float32) * (1.0 / ROW_UNITS)
    bad = (top != top) | (top == float("inf"))
    empty = top == float("-inf")
    total = tl.where(empty, 1.0, total)
    log_total = log2(total) * LN2
    z = tl.load(target_z + row, mask=inside, other=0.0)
    out_logp = tl.where(empty, float("-inf"), (z - top) - log_total)
    out_lse = tl.where(empty, float("-inf"), top + log_total)
    out_entropy = tl.where(empty, 0.0, log_total + tl.div_rn(weighted, total))
    nan = float("nan")
    tl.store(logp + row, tl.where(bad, nan, out_logp), mask=inside)
    tl.store(lse + row, tl.where(bad, nan, out_lse), mask=inside)
    tl.store(entropy + row, tl.where(bad, nan, out_entropy), mask=inside)
    tl.store(stats + 2 * row.to(tl.int64), tl.where(bad, nan, top), mask=inside)
    tl.store(stats + 2 * row.to(tl.int64) + 1, tl.where(bad, nan, log_total), mask=inside)


@triton.jit
def dz_at(z, hit, top, log_total, g, h, entropy):
    """Gradient of z from those of logp (g) and entropy (h), before the temperature; all broadcast together.

    z is -inf where dropped; `hit` says where the target is.
    """
    log_p = (z - top) - log_total
    p = exp(log_p)
    u = g * (tl.where(hit, 1.0, 0.0) - p)
    return tl.fma(-(h * p), tl.where(p == 0.0, 0.0, log_p + entropy), u)


@triton.jit
def row_active(kept, targets, row, inside, g, h, top, V, WORDS, HAS_KEPT: tl.constexpr):
    """Rows that have a gradient: a kept target, something kept at all, and an upstream gradient."""
    active = inside & ((g != 0.0) | (h != 0.0)) & (top != float("-inf"))
    if HAS_KEPT:
        target = tl.load(targets + row, mask=inside, other=0)
        active = active & is_kept(kept, row, target, inside & (target < V), WORDS)
    return active


@triton.jit
def logprob_dgrad_kernel(
    logits,  # [T, V]
    targets,  # [T] int64
    inv_temperature,  # [T] fp32
    kept,  # [T, WORDS] int32
    stats,  # [T, 2] fp32
    entropy,  # [T] fp32
    dlogp,  # [T] fp32
    dentropy,  # [T] fp32
    dlogits,  # [T, V]
    V,
    WORDS,
    logits_row,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    HAS_DLOGP: tl.constexpr,
    HAS_DENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = v < V
    g = 0.0
    h = 0.0
    if HAS_DLOGP:
        g = tl.load(dlogp + row)
    if HAS_DENTROPY:
        h = tl.load(dentropy + row)
    top = tl.load(stats + 2 * row)
    out = tl.zeros((BLOCK,), tl.float32)
    if row_active(kept, targets, row, True, g, h, top, V, WORDS, HAS_KEPT):
        z = tl.load(logits + row * logits_row + v, mask=inside, other=0.0).to(tl.float32)
        if HAS_TEMPERATURE:
            inverse = tl.load(inv_temperature + row)
            z = z * inverse
        if HAS_KEPT:
            keep = is_kept(kept, row, v, inside, WORDS)
            z = tl.where(keep, z, float("-inf"))
        hit = v == tl.load(targets + row)
        out = dz_at(z, hit, top, tl.load(stats + 2 * row + 1), g, h, tl.load(entropy + row))
        if HAS_TEMPERATURE:
            out = out * inverse
        if HAS_KEPT:
            out = tl.where(keep, out, 0.0)
    tl.store(dlogits + row * V + v, out.to(dlogits.dtype.element_ty), mask=inside)


# ---- launchers ----------------------------------------------------------------------------------


class TileBuffers:
    """Statistics of the vocabulary tiles of some tokens, and their targets' logits."""

    def __init__(self, tokens: int, vocab_size: int, device: torch.device) -> None:
        self.tiles = triton.cdiv(vocab_size, VOCAB_TILE)
        self.tokens = max(128, min(tokens, SCRATCH // (12 * self.tiles) // 128 * 128))
        shape = (min(tokens, self.tokens), self.tiles)
        self.maximum = torch.empty(shape, dtype=torch.float32, device=device)
        self.sum = torch.empty(shape, dtype=torch.int32, device=device)
        self.entropy = torch.empty(shape, dtype=torch.int32, device=device)
        self.target = torch.full((shape[0],), float("-inf"), dtype=torch.float32, device=device)

    def combine(self, logp: Tensor, entropy: Tensor, lse: Tensor, stats: Tensor) -> None:
        """logp, entropy, lse [n] and stats [n, 2] of the first n tokens of the buffers."""
        n = logp.shape[0]
        chunk = min(next_power_of_2(self.tiles), 512)
        rows = 512 // chunk
        logprob_combine_kernel[(triton.cdiv(n, rows),)](
            self.maximum, self.sum, self.entropy, self.target, logp, entropy, lse, stats, n, self.tiles,
            ROWS=rows, CHUNK=chunk, num_warps=4, **options(),
        )  # fmt: skip


def outputs(tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty logp, entropy, lse [T] and stats [T, 2], fp32."""
    shapes = ((tokens,), (tokens,), (tokens,), (tokens, 2))
    logp, entropy, lse, stats = (torch.empty(s, dtype=torch.float32, device=device) for s in shapes)
    return logp, entropy, lse, stats


def part(t: Tensor | None, start: int, stop: int) -> Tensor | None:
    """Rows [start, stop) of an optional tensor."""
    return None if t is None else t[start:stop]


def rows_of(t: Tensor) -> Tensor:
    """The matrix with dense rows; a copy only where they are not."""
    return t if t.stride(1) == 1 else t.contiguous()


def logprob(
    logits: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits, targets = rows_of(logits), targets.contiguous()
    inv_temperature = None if inv_temperature is None else inv_temperature.contiguous()
    kept = None if kept is None else kept.contiguous()
    tokens, vocab = logits.shape
    out = outputs(tokens, logits.device)
    if tokens == 0:
        return out
    with on_device(logits):
        buffers = TileBuffers(tokens, vocab, logits.device)
        for start in range(0, tokens, buffers.tokens):
            stop = min(tokens, start + buffers.tokens)
            logprob_tiles_kernel[(stop - start, triton.cdiv(buffers.tiles, GROUP))](
                logits[start:stop], targets[start:stop], part(inv_temperature, start, stop), part(kept, start, stop),
                buffers.maximum, buffers.sum, buffers.entropy, buffers.target,
                vocab, buffers.tiles, triton.cdiv(vocab, 32), logits.stride(0),
                HAS_TEMPERATURE=inv_temperature is not None, HAS_KEPT=kept is not None, GROUP=GROUP,
                num_warps=4, **options(),
            )  # fmt: skip
            buffers.combine(*(t[start:stop] for t in out))
    return out


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
    logits = rows_of(logits)
    tokens, vocab = logits.shape
    dlogits = torch.empty(tokens, vocab, dtype=logits.dtype, device=logits.device)
    if dlogits.numel() == 0:
        return dlogits
    vectors = (targets, inv_temperature, kept, stats, entropy, dlogp, dentropy)
    with on_device(logits):
        logprob_dgrad_kernel[(tokens, triton.cdiv(vocab, 2048))](
            logits, *(None if t is None else t.contiguous() for t in vectors), dlogits,
            vocab, triton.cdiv(vocab, 32), logits.stride(0),
            HAS_TEMPERATURE=inv_temperature is not None, HAS_KEPT=kept is not None,
            HAS_DLOGP=dlogp is not None, HAS_DENTROPY=dentropy is not None, BLOCK=2048, num_warps=4, **options(),
        )  # fmt: skip
    return dlogits


# ---- ahead of time ------------------------------------------------------------------------------

_INPUTS = {"logits": "*bf16:16", "targets": "*i64:16", "inv_temperature": "*fp32:16", "kept": "*i32:16"}
_SIZES = {"V": "i32:16", "WORDS": "i32", "logits_row": "i32:16"}
_TILE_TYPES = {"tile_max": "*fp32:16", "tile_sum": "*i32:16", "tile_entropy": "*i32:16", "target_z": "*fp32:16"}
_VECTORS = ("logp", "entropy", "lse", "stats")
AOT: tuple[Variant, ...] = (
    Variant(
        "logprob tiles", logprob_tiles_kernel, {**_INPUTS, **_TILE_TYPES, **_SIZES, "TILES": "i32"},
        {"HAS_TEMPERATURE": True, "HAS_KEPT": True, "GROUP": GROUP}, main=True,
    ),
    Variant(
        "logprob combine", logprob_combine_kernel,
        {**_TILE_TYPES, **dict.fromkeys(_VECTORS, "*fp32:16"), "T": "i32", "TILES": "i32"}, {"ROWS": 1, "CHUNK": 512},
        main=True,
    ),
    Variant(
        "logprob_dgrad", logprob_dgrad_kernel,
        {**_INPUTS, **dict.fromkeys(("stats", "entropy", "dlogp", "dentropy"), "*fp32:16"), "dlogits": "*bf16:16",
         **_SIZES},
        {"HAS_TEMPERATURE": True, "HAS_KEPT": True, "HAS_DLOGP": True, "HAS_DENTROPY": True, "BLOCK": 2048}, main=True,
    ),
)  # fmt: skip
