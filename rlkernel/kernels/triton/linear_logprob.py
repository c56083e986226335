"""linear_logprob on GPUs: the LM head's GEMM with logprob's tile statistics in the epilogue.

Contract: docs/ops/linear_logprob.md. It has the bits of linear followed by logprob, because it uses the same chain and
the same `tile_stats`. Also the anchors of the backward's products: dz from recomputed logits, dhidden, dweight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract.orders import LOGPROB_DGRAD_CHUNK, VOCAB_TILE
from rlkernel.kernels.triton.common import cdiv, exp, on_device, options
from rlkernel.kernels.triton.linear_grad import add_dgrad_, wgrad_
from rlkernel.kernels.triton.linear_logprob_backward import Products, gradients
from rlkernel.kernels.triton.linear_logprob_rows import Active
from rlkernel.kernels.triton.logprob import TILE, TileBuffers, outputs, slice_rows, tile_stats
from rlkernel.kernels.triton.logprob_backward import dz_at, is_kept
from rlkernel.kernels.triton.matrix import (
    Tile,
    can_use_tma,
    chain,
    corner_of,
    descriptor,
    fit,
    shared_limit,
    strided,
    tile_at,
)

# ---- kernels ------------------------------------------------------------------------------------


@triton.jit
def logits_tile(
    hidden, weight, row, column, tile_m, tile_n, T, V, C, hidden_row, hidden_col, weight_row, weight_col,
    EVEN: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """fp32 logits [BLOCK_M, BLOCK_N] of a tile; row and column are relative to the tile's corner."""
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
    logits,  # [T, WIDTH] fp32
    T,
    V,
    C,
    TILES,
    WORDS,
    WIDTH,
    hidden_row,
    hidden_col,
    weight_row,
    weight_col,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    HAS_LOGITS: tl.constexpr,
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
    if HAS_LOGITS:
        tl.store(logits + (row[:, None] * WIDTH + v[None, :]), z, mask=in_batch[:, None] & (v < WIDTH)[None, :])
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
    order,  # [T] int32: `Active.order`, the token of each row of hidden and dz
    dz,  # [T, dz_row]
    T,
    V,
    C,
    first,
    WORDS,
    dz_row,
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
    token = tl.load(order + row, mask=in_batch, other=-1).to(tl.int64)
    active = token >= 0
    out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if tl.max(active.to(tl.int32), axis=0) != 0:  # skips tiles without a gradient, such as those of prompts
        z = logits_tile(
            hidden, weight, local, column, tile_m, tile_n, T, V, C, hidden_row, hidden_col, weight_row, weight_col,
            EVEN, TMA, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if HAS_TEMPERATURE:
            inverse = tl.load(inv_temperature + token, mask=active, other=0.0)[:, None]
            z = z * inverse
        keep = active[:, None]
        if HAS_KEPT:
            keep = keep & is_kept(kept, token[:, None], v[None, :], inside & keep, WORDS)
        g = tl.zeros((BLOCK_M,), tl.float32)
        h = tl.zeros((BLOCK_M,), tl.float32)
        if HAS_DLOGP:
            g = tl.load(dlogp + token, mask=active, other=0.0)
        if HAS_DENTROPY:
            h = tl.load(dentropy + token, mask=active, other=0.0)
        hit = tl.load(targets + token, mask=active, other=-1)[:, None] == v[None, :]
        top = tl.load(stats + 2 * token, mask=active, other=0.0)[:, None]
        log_total = tl.load(stats + 2 * token + 1, mask=active, other=0.0)[:, None]
        entropies = tl.load(entropy + token, mask=active, other=0.0)[:, None]
        out = dz_at(z, hit, top, log_total, g[:, None], h[:, None], entropies, HAS_DENTROPY)
        if HAS_TEMPERATURE:
            out = out * inverse
        out = tl.where(keep, out, 0.0)
    at = local[:, None] * dz_row + column[None, :]
    dz += tl.cast(tile_m, tl.int64) * BLOCK_M * dz_row + tile_n * BLOCK_N
    tl.store(dz + at, out.to(dz.dtype.element_ty), mask=inside)


# ---- launchers ----------------------------------------------------------------------------------


def fused_tile(tokens: int, element_size: int, wide: bool = False) -> Tile:
    """Tile of the GEMMs with a logprob epilogue; n is a multiple of VOCAB_TILE, 256 only if `wide`."""
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
    """The kernels' first two arguments and TMA: descriptors if TMA can load both matrices."""
    if tile.tma and can_use_tma(x, w):
        return descriptor(x, tile.m, tile.k), descriptor(w, tile.n, tile.k), True
    return x, w, False


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def forward(
    hidden: Tensor,  # [T, C]
    weight: Tensor,  # [V, C]
    targets: Tensor,  # [T]
    inv_temperature: Tensor | None,  # [T]
    kept: Tensor | None,  # [T, WORDS]
    keep_probs: bool = False,
    width: int = 0,
    tile: Tile | None = None,
    statistics: Callable[..., None] | None = None,
) -> tuple[Tensor, ...]:  # logp, entropy, lse [T], stats [T, 2], then the saved tensors
    """The forward, in chunks of tokens that fit in the buffers of tile statistics.

    Args:
        keep_probs: also return probs [T, V], exp(z - tile_max) rounded to the weight's dtype, and tile_max [T, TILES].
        width: if not 0, a multiple of the vocabulary tile: also return logits [T, width], the fp32 logits of the first
            entries, scaled, -inf where dropped or beyond V.
        tile: for tests and tuning; default by shape.
        statistics: computes the tile statistics; default the anchor, `tile_statistics`.
    """
    hidden, weight, targets = strided(hidden), strided(weight), targets.contiguous()
    inv_temperature, kept = _contiguous(inv_temperature), _contiguous(kept)
    tokens, vocab = hidden.shape[0], weight.shape[0]
    out: tuple[Tensor, ...] = outputs(tokens, hidden.device)
    saved: tuple[Tensor, ...] = ()
    if width:
        saved = (torch.empty(tokens, width, dtype=torch.float32, device=hidden.device),)
    if keep_probs:
        tiles = cdiv(vocab, VOCAB_TILE)
        saved = (
            torch.empty(tokens, vocab, dtype=weight.dtype, device=hidden.device),
            torch.empty(tokens, tiles, dtype=torch.float32, device=hidden.device),
        )
    if tokens == 0:
        return (*out, *saved)
    fill = statistics or functools.partial(tile_statistics, tile=tile)
    with on_device(hidden):
        buffers = TileBuffers(tokens, vocab, hidden.device)
        for start in range(0, tokens, buffers.tokens):
            stop = min(tokens, start + buffers.tokens)
            probs, logits = None, None
            buffers.target.fill_(float("-inf"))  # no tile writes a target outside the vocabulary
            if width:
                logits = saved[0][start:stop]
            if keep_probs:
                probs = saved[0][start:stop]
                buffers.maximum = saved[1][start:stop]
            fill(
                buffers, hidden[start:stop], weight, targets[start:stop], slice_rows(inv_temperature, start, stop),
                slice_rows(kept, start, stop), probs, logits,
            )  # fmt: skip
            buffers.combine(*(t[start:stop] for t in out))
    return (*out, *saved)


def tile_statistics(
    buffers: TileBuffers,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    inv_temperature: Tensor | None,
    kept: Tensor | None,
    probs: Tensor | None,
    logits: Tensor | None,
    tile: Tile | None = None,
) -> None:
    """Fills `buffers` with the vocabulary tiles' statistics and the targets' logits; probs and logits if given."""
    (n, c), vocab, size = hidden.shape, weight.shape[0], hidden.element_size()
    wide = can_use_tma(hidden, weight)  # without operands in registers, the wider accumulator fits
    shape = fit(tile or fused_tile(n, size, wide), c, size, shared_limit(hidden))
    x, w, tma = operands(hidden, weight, shape)
    linear_logprob_kernel[(cdiv(n, shape.m) * cdiv(vocab, shape.n),)](
        x, w, targets, inv_temperature, kept, buffers.maximum, buffers.sum, buffers.entropy, buffers.target, probs,
        logits, n, vocab, c, buffers.tiles, cdiv(vocab, 32), 0 if logits is None else logits.shape[1],
        hidden.stride(0), hidden.stride(1), weight.stride(0), weight.stride(1),
        HAS_TEMPERATURE=inv_temperature is not None, HAS_KEPT=kept is not None, HAS_PROBS=probs is not None,
        HAS_LOGITS=logits is not None, EVEN=c % shape.k == 0, TMA=tma,
        BLOCK_M=shape.m, BLOCK_N=shape.n, BLOCK_K=shape.k, GROUP=8,
        num_warps=shape.warps, num_stages=shape.stages, **options(matmul=True),
    )  # fmt: skip


def dz_block(
    dz: Tensor,  # [n, v]
    hidden: Tensor,  # [n, C]; rows of hidden and dz are in the order of `active`, the next arguments are by token
    weight: Tensor,  # [v, C]: rows [first, first + v) of the vocabulary
    targets: Tensor,
    inv_temperature: Tensor | None,
    kept: Tensor | None,
    stats: Tensor,
    entropy: Tensor,
    dlogp: Tensor | None,
    dentropy: Tensor | None,
    active: Active,
    first: int,
    vocab_size: int,
) -> None:
    """dz of a block: recomputes the logits from the hidden states and applies `dz_at`."""
    (n, c), columns, size = hidden.shape, weight.shape[0], hidden.element_size()
    shape = fit(fused_tile(n, size), c, size, shared_limit(hidden))
    with on_device(hidden):
        x, w, tma = operands(hidden, weight, shape)
        linear_logprob_dz_kernel[(cdiv(n, shape.m) * cdiv(columns, shape.n),)](
            x, w, targets, inv_temperature, kept, stats, entropy, dlogp, dentropy, active.order, dz,
            n, columns, c, first, cdiv(vocab_size, 32), dz.stride(0),
            hidden.stride(0), hidden.stride(1), weight.stride(0), weight.stride(1),
            HAS_TEMPERATURE=inv_temperature is not None, HAS_KEPT=kept is not None,
            HAS_DLOGP=dlogp is not None, HAS_DENTROPY=dentropy is not None, EVEN=c % shape.k == 0, TMA=tma,
            BLOCK_M=shape.m, BLOCK_N=shape.n, BLOCK_K=shape.k, GROUP=8,
            num_warps=shape.warps, num_stages=shape.stages, **options(matmul=True),
        )  # fmt: skip


def dhidden_block(
    running: Tensor,  # [n, C] fp32
    dz: Tensor,  # [n, v]
    weight: Tensor,  # [v, C]
    fresh: bool,
    active: Active,
) -> None:
    """Adds chunks of the vocabulary to the input gradient; `fresh` overwrites running. `active` is for schedules."""
    add_dgrad_(running, dz, weight, fresh, LOGPROB_DGRAD_CHUNK)


def dweight_block(grad: Tensor, dz: Tensor, hidden: Tensor, fresh: bool, active: Active) -> None:
    """Adds a chunk of tokens to grad [v, C]; `fresh` overwrites it. `active` is for schedules."""
    wgrad_(grad, dz, hidden, fresh)


def linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, ...]:
    return forward(hidden, weight, targets, inv_temperature, kept)


def linear_logprob_logits(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None, width: int
) -> tuple[Tensor, ...]:
    return forward(hidden, weight, targets, inv_temperature, kept, width=width)


def linear_logprob_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, ...]:
    return forward(hidden, weight, targets, inv_temperature, kept, keep_probs=True)


ANCHORS = Products(dz_block, dhidden_block, dweight_block)
linear_logprob_grad_ = functools.partial(gradients, ANCHORS)
