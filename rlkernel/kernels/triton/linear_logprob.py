"""linear_logprob on GPUs: the head's matrix product with the tile statistics of logprob behind it, no [T, V] tensor.

Contract: docs/ops/linear_logprob.md. Logits come from linear's chain and statistics from logprob's `tile_stats`, so
the bits are those of the two ops in sequence. The backward forms dz a block of tokens and vocabulary at a time and
hands it to linear's gradient kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract.orders import LOGPROB_DGRAD_CHUNK, VOCAB_TILE, WGRAD_TOKENS
from rlkernel.kernels.triton.aot import Variant
from rlkernel.kernels.triton.common import exp, on_device, options
from rlkernel.kernels.triton.linear_grad import add_dgrad_, wgrad_
from rlkernel.kernels.triton.logprob import (
    TILE,
    TileBuffers,
    dz_at,
    is_kept,
    outputs,
    part,
    row_active,
    tile_stats,
)
from rlkernel.kernels.triton.matrix import (
    Tile,
    can_fetch,
    chain,
    corner_of,
    descriptor,
    fit,
    shared_limit,
    strided,
    tile_at,
)

DZ_BYTES = 1 << 27  # largest block of dz, unless one chunk of 8192 tokens is larger
BLOCK_TOKENS = 64  # tokens that are left out of the backward's products together
PROBS_BLOCK = 2048  # entries a program when dz comes from kept probabilities

# ---- kernels ------------------------------------------------------------------------------------


@triton.jit
def logits_tile(
    hidden, weight, row, column, tile_m, tile_n, T, V, C, hidden_row, hidden_col, weight_row, weight_col,
    EVEN: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """fp32 logits [BLOCK_M, BLOCK_N] of one tile; row and column count from the tile's corner."""
    k = tl.arange(0, BLOCK_K)
    return chain(
        tl.zeros((BLOCK_M, BLOCK_N), tl.float32), corner_of(hidden, tile_m, hidden_row, BLOCK_M, TMA),
        corner_of(weight, tile_n, weight_row, BLOCK_N, TMA), 0, C, tile_m * BLOCK_M, tile_n * BLOCK_N,
        row[:, None] * hidden_row + k[None, :] * hidden_col, k[:, None] * weight_col + column[None, :] * weight_row,
        hidden_col, weight_col, (row < T - tile_m * BLOCK_M)[:, None], (column < V - tile_n * BLOCK_N)[None, :],
        EVEN, TMA, False, False, BLOCK_K,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def linear_logprob_kernel(
    hidden,  # [T, C]
    weight,  # [V, C]
    targets,  # [T] int64
    inv_temperature,  # [T] fp32
    kept,  # [T, WORDS] int32
    tile_max,  # [T, TILES] fp32
    tile_sum,  # [T, TILES] int32
    tile_entropy,  # [T, TILES] int32
    target_z,  # [T] fp32
    probs,  # [T, V]
    T,
    V,
    C,
    TILES,
    WORDS,
    hidden_row,
    hidden_col,
    weight_row,
    weight_col,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile_m, tile_n = tile_at(tl.program_id(0), T, V, BLOCK_M, BLOCK_N, GROUP)
    local = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    z = logits_tile(
        hidden, weight, local, column, tile_m, tile_n, T, V, C, hidden_row, hidden_col, weight_row, weight_col,
        EVEN, TMA, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    row = tl.cast(tile_m, tl.int64) * BLOCK_M + local
    v = tile_n * BLOCK_N + column
    in_batch = row < T
    if HAS_TEMPERATURE:
        z = z * tl.load(inv_temperature + row, mask=in_batch, other=0.0)[:, None]
    inside = in_batch[:, None] & (v < V)[None, :]
    keep = inside
    if HAS_KEPT:
        keep = is_kept(kept, row[:, None], v[None, :], inside, WORDS)
    z = tl.where(keep, z, float("-inf"))
    target = tl.load(targets + row, mask=in_batch, other=-1)
    to = tl.broadcast_to((target_z + row)[:, None], (BLOCK_M, BLOCK_N))
    tl.store(to, z, mask=(target[:, None] == v[None, :]) & inside)
    tiled = tl.reshape(z, (BLOCK_M, BLOCK_N // TILE, TILE))
    m, s, e = tile_stats(tiled)
    if HAS_PROBS:
        p = exp(tiled - tl.expand_dims(tl.where(m == float("-inf"), 0.0, m), 2))
        to = row[:, None] * V + v[None, :]
        tl.store(probs + to, tl.reshape(p, (BLOCK_M, BLOCK_N)).to(probs.dtype.element_ty), mask=inside)
    tile = tile_n * (BLOCK_N // TILE) + tl.arange(0, BLOCK_N // TILE)
    at = row[:, None] * TILES + tile[None, :]
    here = in_batch[:, None] & (tile < TILES)[None, :]
    tl.store(tile_max + at, m, mask=here)
    tl.store(tile_sum + at, s, mask=here)
    tl.store(tile_entropy + at, e, mask=here)


@triton.jit(do_not_specialize=["T"])
def linear_logprob_dz_kernel(
    hidden,  # [T, C]
    weight,  # [V, C]: rows [first, first + V) of the vocabulary
    targets,  # [T] int64
    inv_temperature,  # [T] fp32
    kept,  # [T, WORDS] int32
    stats,  # [T, 2] fp32
    entropy,  # [T] fp32
    dlogp,  # [T] fp32
    dentropy,  # [T] fp32
    dz,  # [T, V]
    T,
    V,
    C,
    first,
    vocab_size,
    WORDS,
    hidden_row,
    hidden_col,
    weight_row,
    weight_col,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    HAS_DLOGP: tl.constexpr,
    HAS_DENTROPY: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile_m, tile_n = tile_at(tl.program_id(0), T, V, BLOCK_M, BLOCK_N, GROUP)
    local = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    row = tl.cast(tile_m, tl.int64) * BLOCK_M + local
    in_batch = row < T
    inside = in_batch[:, None] & (column < V - tile_n * BLOCK_N)[None, :]
    v = first + tile_n * BLOCK_N + column
    g = tl.zeros((BLOCK_M,), tl.float32)
    h = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_DLOGP:
        g = tl.load(dlogp + row, mask=in_batch, other=0.0)
    if HAS_DENTROPY:
        h = tl.load(dentropy + row, mask=in_batch, other=0.0)
    top = tl.load(stats + 2 * row, mask=in_batch, other=0.0)
    active = row_active(kept, targets, row, in_batch, g, h, top, vocab_size, WORDS, HAS_KEPT)
    out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if tl.max(active.to(tl.int32), axis=0) != 0:  # prompts cost no product
        z = logits_tile(
            hidden, weight, local, column, tile_m, tile_n, T, V, C, hidden_row, hidden_col, weight_row, weight_col,
            EVEN, TMA, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if HAS_TEMPERATURE:
            inverse = tl.load(inv_temperature + row, mask=in_batch, other=0.0)[:, None]
            z = z * inverse
        keep = active[:, None]
        if HAS_KEPT:
            keep = keep & is_kept(kept, row[:, None], v[None, :], inside, WORDS)
        hit = tl.load(targets + row, mask=in_batch, other=-1)[:, None] == v[None, :]
        log_total = tl.load(stats + 2 * row + 1, mask=in_batch, other=0.0)[:, None]
        entropies = tl.load(entropy + row, mask=in_batch, other=0.0)[:, None]
        out = dz_at(z, hit, top[:, None], log_total, g[:, None], h[:, None], entropies, HAS_DENTROPY)
        if HAS_TEMPERATURE:
            out = out * inverse
        out = tl.where(keep, out, 0.0)
    at = local[:, None] * V + column[None, :]
    dz += tl.cast(tile_m, tl.int64) * BLOCK_M * V + tile_n * BLOCK_N
    tl.store(dz + at, out.to(dz.dtype.element_ty), mask=inside)


@triton.jit
def linear_logprob_probs_kernel(
    probs,  # [T, V]
    tile_max,  # [T, TILES] fp32
    targets,  # [T] int64
    inv_temperature,  # [T] fp32
    kept,  # [T, WORDS] int32
    stats,  # [T, 2] fp32
    dlogp,  # [T] fp32
    dz,  # [T, SPAN]: entries [first, first + SPAN)
    V,
    SPAN,
    first,
    TILES,
    WORDS,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dz = g * ([v = y] - p * exp((tile_max - M) - log S)), as `dz_at` but from the tile's kept probability."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SPAN
    v = first + column
    g = tl.load(dlogp + row)
    top = tl.load(stats + 2 * row)
    log_total = tl.load(stats + 2 * row + 1)
    out = tl.zeros((BLOCK,), tl.float32)
    if row_active(kept, targets, row, True, g, 0.0, top, V, WORDS, HAS_KEPT):
        tile = (first + tl.program_id(1) * BLOCK) // TILE + tl.arange(0, BLOCK // TILE)
        m = tl.load(tile_max + row * TILES + tile, mask=tile < TILES, other=float("-inf"))
        scale = exp((m - top) - log_total)
        p = tl.load(probs + row * V + v, mask=inside, other=0.0).to(tl.float32)
        p = tl.reshape(tl.reshape(p, (BLOCK // TILE, TILE)) * scale[:, None], (BLOCK,))
        out = g * (tl.where(v == tl.load(targets + row), 1.0, 0.0) - p)
        if HAS_TEMPERATURE:
            out = out * tl.load(inv_temperature + row)
        if HAS_KEPT:
            out = tl.where(is_kept(kept, row, v, inside, WORDS), out, 0.0)
    tl.store(dz + row * SPAN + column, out.to(dz.dtype.element_ty), mask=inside)


# ---- launchers ----------------------------------------------------------------------------------


def logits_schedule(tokens: int, element_size: int, wide: bool = False) -> Tile:
    """Schedule of the fused products; n is a multiple of the vocabulary tile. `wide`: there are registers for 256."""
    if element_size == 4:
        return Tile(32, VOCAB_TILE, 16, 8, 3)
    if tokens <= 16:
        return Tile(16, VOCAB_TILE, 128, 4, 3)
    if tokens <= 64:
        return Tile(64, VOCAB_TILE, 64, 4, 4)
    if wide and tokens >= 512:
        return Tile(128, 2 * VOCAB_TILE, 64, 8, 3)
    return Tile(128, VOCAB_TILE, 64, 8, 4)


def operands(x: Tensor, w: Tensor, tile: Tile) -> tuple[Any, Any, bool]:
    """The kernels' first two arguments and TMA: descriptors where the copy engine can fetch both."""
    if tile.tma and can_fetch(x, w):
        return descriptor(x, tile.m, tile.k), descriptor(w, tile.n, tile.k), True
    return x, w, False


def _checked(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def forward(
    hidden: Tensor,  # [T, C]
    weight: Tensor,  # [V, C]
    targets: Tensor,  # [T]
    inv_temperature: Tensor | None,  # [T]
    kept: Tensor | None,  # [T, WORDS]
    keep_probs: bool = False,
    tile: Tile | None = None,
    statistics: Callable[..., None] | None = None,
) -> tuple[Tensor, ...]:  # logp, entropy, lse [T], stats [T, 2]; with keep_probs: probs [T, V], tile_max [T, TILES]
    """The forward in turns of as many tokens as the tile statistics have room for.

    Args:
        keep_probs: also return exp(z - tile_max), rounded to the weight's dtype.
        tile: a schedule for tests and tuning; default by shape.
        statistics: what fills the tile statistics; default the anchor, `tile_statistics`.
    """
    hidden, weight, targets = strided(hidden), strided(weight), targets.contiguous()
    inv_temperature, kept = _checked(inv_temperature), _checked(kept)
    tokens, vocab = hidden.shape[0], weight.shape[0]
    out: tuple[Tensor, ...] = outputs(tokens, hidden.device)
    kept_outputs: tuple[Tensor, ...] = ()
    if keep_probs:
        tiles = triton.cdiv(vocab, VOCAB_TILE)
        kept_outputs = (
            torch.empty(tokens, vocab, dtype=weight.dtype, device=hidden.device),
            torch.empty(tokens, tiles, dtype=torch.float32, device=hidden.device),
        )
    if tokens == 0:
        return (*out, *kept_outputs)
    fill = statistics or functools.partial(tile_statistics, tile=tile)
    with on_device(hidden):
        buffers = TileBuffers(tokens, vocab, hidden.device)
        for start in range(0, tokens, buffers.tokens):
            stop = min(tokens, start + buffers.tokens)
            probs = None
            if keep_probs:
                probs = kept_outputs[0][start:stop]
                buffers.maximum = kept_outputs[1][start:stop]
            fill(
                buffers, hidden[start:stop], weight, targets[start:stop], part(inv_temperature, start, stop),
                part(kept, start, stop), probs,
            )  # fmt: skip
            buffers.combine(*(t[start:stop] for t in out))
    return (*out, *kept_outputs)


def tile_statistics(
    buffers: TileBuffers,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    inv_temperature: Tensor | None,
    kept: Tensor | None,
    probs: Tensor | None,
    tile: Tile | None = None,
) -> None:
    """Statistics of every vocabulary tile of the tokens, their targets' logits and, where wanted, `probs`."""
    (n, c), vocab, size = hidden.shape, weight.shape[0], hidden.element_size()
    wide = can_fetch(hidden, weight)  # operands that pass no register leave them to the wider tile
    shape = fit(tile or logits_schedule(n, size, wide), c, size, shared_limit(hidden))
    x, w, tma = operands(hidden, weight, shape)
    linear_logprob_kernel[(triton.cdiv(n, shape.m) * triton.cdiv(vocab, shape.n),)](
        x, w, targets, inv_temperature, kept, buffers.maximum, buffers.sum, buffers.entropy, buffers.target, probs,
        n, vocab, c, buffers.tiles, triton.cdiv(vocab, 32),
        hidden.stride(0), hidden.stride(1), weight.stride(0), weight.stride(1),
        HAS_TEMPERATURE=inv_temperature is not None, HAS_KEPT=kept is not None, HAS_PROBS=probs is not None,
        EVEN=c % shape.k == 0, TMA=tma, BLOCK_M=shape.m, BLOCK_N=shape.n, BLOCK_K=shape.k, GROUP=8,
        num_warps=shape.warps, num_stages=shape.stages, **options(matmul=True),
    )  # fmt: skip


def dz_block(
    hidden: Tensor,  # [n, C]
    weight: Tensor,  # [v, C]: rows [first, first + v) of the vocabulary
    targets: Tensor,
    inv_temperature: Tensor | None,
    kept: Tensor | None,
    stats: Tensor,
    entropy: Tensor,
    dlogp: Tensor | None,
    dentropy: Tensor | None,
    active: Active | None,
    first: int,
    vocab_size: int,
) -> Tensor:  # [n, v]
    """Gradient of a block of logits, computed from the hidden states again."""
    (n, c), columns, size = hidden.shape, weight.shape[0], hidden.element_size()
    dz = torch.empty(n, columns, dtype=weight.dtype, device=hidden.device)
    shape = fit(logits_schedule(n, size), c, size, shared_limit(hidden))
    with on_device(hidden):
        x, w, tma = operands(hidden, weight, shape)
        linear_logprob_dz_kernel[(triton.cdiv(n, shape.m) * triton.cdiv(columns, shape.n),)](
            x, w, targets, inv_temperature, kept, stats, entropy, dlogp, dentropy, dz,
            n, columns, c, first, vocab_size, triton.cdiv(vocab_size, 32),
            hidden.stride(0), hidden.stride(1), weight.stride(0), weight.stride(1),
            HAS_TEMPERATURE=inv_temperature is not None, HAS_KEPT=kept is not None,
            HAS_DLOGP=dlogp is not None, HAS_DENTROPY=dentropy is not None, EVEN=c % shape.k == 0, TMA=tma,
            BLOCK_M=shape.m, BLOCK_N=shape.n, BLOCK_K=shape.k, GROUP=8,
            num_warps=shape.warps, num_stages=shape.stages, **options(matmul=True),
        )  # fmt: skip
    return dz


def probs_block(
    probs: Tensor,  # [T, V]
    tile_max: Tensor,  # [T, TILES]
    targets: Tensor,
    inv_temperature: Tensor | None,
    kept: Tensor | None,
    stats: Tensor,
    dlogp: Tensor,
    first: int,
    last: int,
) -> Tensor:  # [n, last - first]
    """Gradient of a block of logits from kept probabilities, where the entropy has none."""
    n, vocab = probs.shape
    dz = torch.empty(n, last - first, dtype=probs.dtype, device=probs.device)
    with on_device(probs):
        linear_logprob_probs_kernel[(n, triton.cdiv(last - first, PROBS_BLOCK))](
            probs, tile_max, targets, inv_temperature, kept, stats, dlogp, dz,
            vocab, last - first, first, tile_max.shape[1], triton.cdiv(vocab, 32),
            HAS_TEMPERATURE=inv_temperature is not None, HAS_KEPT=kept is not None, BLOCK=PROBS_BLOCK,
            num_warps=4, **options(),
        )  # fmt: skip
    return dz


def dhidden_block(
    running: Tensor,  # [n, C] fp32
    rounded: Tensor | None,  # [n, C]
    dz: Tensor,  # [n, v]
    weight: Tensor,  # [v, C]
    fresh: bool,
    active: Active | None,
) -> None:
    """Adds a chunk of the vocabulary to the input gradient; the last one leaves the sum in `rounded`."""
    add_dgrad_(running, dz, weight, fresh)
    if rounded is not None:
        rounded.copy_(running)


def dweight_block(grad: Tensor, dz: Tensor, hidden: Tensor, fresh: bool, active: Active | None) -> None:
    """Adds a chunk of tokens to the weight gradient of some entries; `fresh` ignores what grad [v, C] holds."""
    wgrad_(grad, dz, hidden, fresh)


class Products(NamedTuple):
    """What the products of the backward run through: the anchors, or certified schedules that equal them."""

    dz: Callable[..., Tensor]
    dhidden: Callable[[Tensor, Tensor | None, Tensor, Tensor, bool, Active | None], None]
    dweight: Callable[[Tensor, Tensor, Tensor, bool, Active | None], None]


ANCHORS = Products(dz_block, dhidden_block, dweight_block)


class Active(NamedTuple):
    """Blocks of BLOCK_TOKENS tokens that have a gradient; the host never learns how many.

    A schedule may leave the others out: whole groups of products with zeros change no chain.
    """

    flags: Tensor  # [blocks] int32
    blocks: Tensor  # [blocks] int32: the numbers of those that have, ascending, then of the others
    number: Tensor  # [1] int32: how many have


def active_blocks(
    targets: Tensor, kept: Tensor | None, stats: Tensor, dlogp: Tensor | None, dentropy: Tensor | None
) -> Active:
    """The blocks in which some token has an upstream gradient, a kept target and a distribution."""
    wanted = [g != 0 for g in (dlogp, dentropy) if g is not None]
    active = functools.reduce(torch.logical_or, wanted) & (stats[:, 0] != float("-inf"))
    if kept is not None:
        word = kept.gather(1, (targets >> 5).clamp(0, kept.shape[1] - 1).unsqueeze(1))[:, 0]
        active &= ((word >> (targets & 31)) & 1) != 0
    whole = torch.nn.functional.pad(active, (0, -len(active) % BLOCK_TOKENS)).view(-1, BLOCK_TOKENS)
    flags = whole.any(1)
    blocks = torch.argsort(flags, stable=True, descending=True)
    return Active(flags.to(torch.int32), blocks.to(torch.int32), flags.sum(dtype=torch.int32).view(1))


def gradients(
    products: Products,
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
    needs_input: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """dhidden [T, C] and dweight [V, C], each empty where it is not wanted; `grad` takes dweight's place.

    Blocks of WGRAD_TOKENS tokens and as many whole chunks of the input gradient's order as DZ_BYTES hold, one at least:
    with `grad` a block of tokens runs through the whole vocabulary, else a block of the vocabulary through all tokens,
    so that its fp32 sum is the only one that is held.
    """
    hidden, weight = strided(hidden), strided(weight)
    (tokens, c), vocab = hidden.shape, weight.shape[0]
    direct = needs_weight and grad is None
    dweight = torch.empty(vocab if direct else 0, c, dtype=weight.dtype, device=hidden.device)
    dhidden = torch.empty(tokens if needs_input else 0, c, dtype=hidden.dtype, device=hidden.device)
    if tokens == 0 or c == 0:
        return dhidden, dweight.zero_()
    targets, stats, entropy = targets.contiguous(), stats.contiguous(), entropy.contiguous()
    inv_temperature, kept, dlogp, dentropy = (_checked(t) for t in (inv_temperature, kept, dlogp, dentropy))
    blocks = [(s, min(tokens, s + WGRAD_TOKENS)) for s in range(0, tokens, WGRAD_TOKENS)]
    most = DZ_BYTES // (weight.element_size() * min(tokens, WGRAD_TOKENS) * LOGPROB_DGRAD_CHUNK)
    width = min(vocab, max(1, most) * LOGPROB_DGRAD_CHUNK)

    def some_of(start: int, stop: int) -> Active:
        g, h, mask = (part(t, start, stop) for t in (dlogp, dentropy, kept))
        return active_blocks(targets[start:stop], mask, stats[start:stop], g, h)

    def dz_of(start: int, stop: int, first: int, last: int) -> Tensor:
        inverse, mask, g, h = (part(t, start, stop) for t in (inv_temperature, kept, dlogp, dentropy))
        y, s = targets[start:stop], stats[start:stop]
        if probs is None or tile_max is None or g is None or h is not None:
            x, w, some = hidden[start:stop], weight[first:last], active[start]
            return products.dz(x, w, y, inverse, mask, s, entropy[start:stop], g, h, some, first, vocab)
        return probs_block(probs[start:stop], tile_max[start:stop], y, inverse, mask, s, g, first, last)

    active = {start: some_of(start, stop) for start, stop in blocks}
    scratch = None
    if direct and len(blocks) > 1:
        scratch = torch.empty(width, c, dtype=torch.float32, device=hidden.device)
    for group in [blocks] if direct else [[b] for b in blocks]:
        origin, end = group[0][0], group[-1][1]
        running = torch.empty(end - origin, c, dtype=torch.float32, device=hidden.device) if needs_input else None
        for first in range(0, vocab, width):
            last = min(vocab, first + width)
            for start, stop in group:
                dz, some = dz_of(start, stop, first, last), active[start]
                if running is not None:
                    sums = running[start - origin : stop - origin]
                    for low in range(first, last, LOGPROB_DGRAD_CHUNK):
                        high = min(last, low + LOGPROB_DGRAD_CHUNK)
                        rounded = dhidden[start:stop] if high == vocab else None
                        # No name for the view of dz: it would keep the block's memory into the next turn.
                        products.dhidden(
                            sums, rounded, dz[:, low - first : high - first], weight[low:high], low == 0, some
                        )
                if scratch is not None:
                    products.dweight(scratch[: last - first], dz, hidden[start:stop], start == 0, some)
                elif needs_weight:
                    to = (dweight if grad is None else grad)[first:last]
                    products.dweight(to, dz, hidden[start:stop], grad is None, some)
                del dz
            if scratch is not None:
                dweight[first:last].copy_(scratch[: last - first])
    return dhidden, dweight


def linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, ...]:
    return forward(hidden, weight, targets, inv_temperature, kept)


def linear_logprob_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, ...]:
    return forward(hidden, weight, targets, inv_temperature, kept, keep_probs=True)


linear_logprob_grad_ = functools.partial(gradients, ANCHORS)


# ---- ahead of time ------------------------------------------------------------------------------


def _types(kind: str, *more: str) -> dict[str, str]:
    floats = ("inv_temperature", "tile_max", "target_z", "stats", "entropy", "dlogp", "dentropy")
    known = {n: "*fp32:16" for n in floats} | {n: f"*{kind}:16" for n in ("hidden", "weight", "dz")}
    known |= {"targets": "*i64:16", "kept": "*i32:16", "tile_sum": "*i32:16", "tile_entropy": "*i32:16"}
    known |= {"T": "i32", "V": "i32:16", "C": "i32:16", "WORDS": "i32", "hidden_row": "i32:16", "weight_row": "i32:16"}
    known |= {"TILES": "i32", "first": "i32:16", "vocab_size": "i32:16"}
    names = ("hidden", "weight", "targets", "inv_temperature", "T", "V", "C", "WORDS", "hidden_row", "weight_row")
    return {n: known[n] for n in (*names, *more)}


def _constants(tile: Tile, **flags: bool) -> dict[str, object]:
    sizes = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP": 8, "hidden_col": 1, "weight_col": 1}
    return {**sizes, "HAS_TEMPERATURE": True, "EVEN": True, "TMA": False, **flags}


def _forward_variant(name: str, kind: str, tile: Tile, kept: bool, main: bool = True) -> Variant:
    types = _types(kind, "tile_max", "tile_sum", "tile_entropy", "target_z", "TILES", *(["kept"] if kept else []))
    constants = _constants(tile, HAS_KEPT=kept, HAS_PROBS=False) | {"probs": None} | ({} if kept else {"kept": None})
    return Variant(name, linear_logprob_kernel, types, constants, tile.warps, tile.stages, matmul=True, main=main)


def _with_tma(plain: Variant) -> Variant:
    size = plain.constants
    boxes = {
        "hidden": f"tensordesc<bf16[{size['BLOCK_M']},{size['BLOCK_K']}]>",
        "weight": f"tensordesc<bf16[{size['BLOCK_N']},{size['BLOCK_K']}]>",
    }
    return replace(
        plain, name=f"{plain.name} tma", types={**plain.types, **boxes}, constants={**size, "TMA": True},
        targets=("sm_90", "sm_100"),
    )  # fmt: skip


_LARGE = logits_schedule(1 << 20, 2)
_DZ = Variant(
    "linear_logprob dz", linear_logprob_dz_kernel,
    _types("bf16", "stats", "entropy", "dlogp", "dentropy", "dz", "first", "vocab_size"),
    _constants(_LARGE, HAS_KEPT=False, HAS_DLOGP=True, HAS_DENTROPY=True) | {"kept": None},
    _LARGE.warps, _LARGE.stages, matmul=True, main=True,
)  # fmt: skip
AOT: tuple[Variant, ...] = (
    _forward_variant("linear_logprob m128", "bf16", _LARGE, kept=False),
    _with_tma(_forward_variant("linear_logprob m128", "bf16", _LARGE, kept=False)),
    _with_tma(_forward_variant("linear_logprob n256", "bf16", logits_schedule(1 << 20, 2, True), False, main=False)),
    _forward_variant("linear_logprob m16 kept", "bf16", logits_schedule(16, 2), kept=True),
    _forward_variant("linear_logprob fp32", "fp32", logits_schedule(16, 4), kept=False, main=False),
    _DZ,
    _with_tma(_DZ),
    Variant(
        "linear_logprob probs", linear_logprob_probs_kernel,
        {
            **dict.fromkeys(("probs", "dz"), "*bf16:16"), **dict.fromkeys(("tile_max", "stats", "dlogp"), "*fp32:16"),
            "targets": "*i64:16", "inv_temperature": "*fp32:16", "kept": "*i32:16",
            "V": "i32:16", "SPAN": "i32:16", "first": "i32:16", "TILES": "i32", "WORDS": "i32",
        },
        {"HAS_TEMPERATURE": True, "HAS_KEPT": True, "BLOCK": PROBS_BLOCK}, main=True,
    ),
)  # fmt: skip
