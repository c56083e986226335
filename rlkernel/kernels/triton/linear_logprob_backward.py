"""The backward of linear_logprob on GPUs: per block of tokens and vocabulary, dz (gradient of logits) and two GEMMs.

Contract: docs/ops/linear_logprob.md. dz comes from recomputed logits, from fp32 logits that the forward saved (the same
bits), or from saved probabilities. Saved tensors are unrelated to `kept`, the mask of the sampler's filters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract.orders import LOGPROB_DGRAD_CHUNK, VOCAB_TILE, WGRAD_TOKENS
from rlkernel.kernels.triton.common import cdiv, exp, next_power_of_2, on_device, options
from rlkernel.kernels.triton.linear_logprob_rows import Active, gather, row_order, scatter
from rlkernel.kernels.triton.logprob import TILE, slice_rows
from rlkernel.kernels.triton.logprob_backward import dz_at, is_kept
from rlkernel.kernels.triton.matrix import strided

DZ_ENTRIES = 1 << 24  # entries of a block of dz; fewer would leave SMs idle
PROBS_ENTRIES = 1 << 27  # the same with saved probabilities, which need more memory anyway: fewer, longer launches
FILLED = 1 << 22  # entries of dhidden that occupy every SM of a large GPU
FEWEST_TOKENS, FEWEST_CHANNELS = 256, 512  # smaller sizes count as these, because they take as long
MAX_PARALLEL_CHUNKS = 16  # chunks of the vocabulary that are computed in parallel
COLUMNS = 2048  # entries per program of the kernels that read saved logits or probabilities

# ---- kernels ------------------------------------------------------------------------------------


@triton.jit
def linear_logprob_logits_kernel(
    logits,  # [T, logits_row] fp32, entry `first` of the vocabulary at column 0
    targets,  # [T] int64
    inv_temperature,  # [T] fp32
    kept,  # [T, WORDS] int32
    stats,  # [T, 2] fp32
    entropy,  # [T] fp32
    dlogp,  # [T] fp32
    dentropy,  # [T] fp32
    order,  # [T] int32
    dz,  # [T, dz_row]
    SPAN,
    first,
    WORDS,
    logits_row,
    dz_row,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    HAS_DLOGP: tl.constexpr,
    HAS_DENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dz of SPAN entries by `dz_at` from saved logits (scaled, -inf where dropped). The rows of dz are in `order`."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(order + row).to(tl.int64)
    # [words of the mask, entries of a word]
    column = tl.program_id(1) * BLOCK + (tl.arange(0, BLOCK // 32) * 32)[:, None]
    bit = tl.arange(0, 32)[None, :]
    inside = column + bit < SPAN
    out = tl.zeros((BLOCK // 32, 32), tl.float32)
    if token >= 0:
        g = 0.0
        h = 0.0
        if HAS_DLOGP:
            g = tl.load(dlogp + token)
        if HAS_DENTROPY:
            h = tl.load(dentropy + token)
        top = tl.load(stats + 2 * token)
        z = tl.load(logits + token * logits_row + column + bit, mask=inside, other=0.0)
        hit = tl.load(targets + token) - first == column + bit
        out = dz_at(z, hit, top, tl.load(stats + 2 * token + 1), g, h, tl.load(entropy + token), HAS_DENTROPY)
        if HAS_TEMPERATURE:
            out = out * tl.load(inv_temperature + token)
        if HAS_KEPT:
            at = (first + column) >> 5
            word = tl.load(kept + token * WORDS + at, mask=at < WORDS, other=0)
            out = tl.where(((word >> bit) & 1) != 0, out, 0.0)
    tl.store(dz + row * dz_row + column + bit, out.to(dz.dtype.element_ty), mask=inside)


@triton.jit
def linear_logprob_probs_kernel(
    probs,  # [T, V]
    tile_max,  # [T, TILES] fp32
    targets,  # [T] int64
    inv_temperature,  # [T] fp32
    kept,  # [T, WORDS] int32
    stats,  # [T, 2] fp32
    dlogp,  # [T] fp32
    order,  # [T] int32
    dz,  # [T, dz_row]: entries [first, first + SPAN)
    V,
    SPAN,
    first,
    TILES,
    WORDS,
    dz_row,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dz = g * ([v = y] - p * exp((tile_max - M) - log S)): `dz_at` with the saved probability p of the tile.

    The rows of dz are in `order`.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(order + row).to(tl.int64)
    # [tiles, entries of a tile], because there is one factor per tile
    column = tl.program_id(1) * BLOCK + (tl.arange(0, BLOCK // TILE) * TILE)[:, None] + tl.arange(0, TILE)[None, :]
    inside = column < SPAN
    v = first + column
    out = tl.zeros((BLOCK // TILE, TILE), tl.float32)
    if token >= 0:
        g = tl.load(dlogp + token)
        top = tl.load(stats + 2 * token)
        log_total = tl.load(stats + 2 * token + 1)
        p = tl.load(probs + token * V + v, mask=inside, other=0.0).to(tl.float32)
        tile = (first + tl.program_id(1) * BLOCK) // TILE + tl.arange(0, BLOCK // TILE)
        m = tl.load(tile_max + token * TILES + tile, mask=tile < TILES, other=float("-inf"))
        out = g * (tl.where(v == tl.load(targets + token), 1.0, 0.0) - p * exp((m - top) - log_total)[:, None])
        if HAS_TEMPERATURE:
            out = out * tl.load(inv_temperature + token)
        if HAS_KEPT:
            out = tl.where(is_kept(kept, token, v, inside, WORDS), out, 0.0)
    tl.store(dz + row * dz_row + column, out.to(dz.dtype.element_ty), mask=inside)


# ---- launchers ----------------------------------------------------------------------------------


def logits_block(
    dz: Tensor,  # [n, v]
    logits: Tensor,  # [n, v] fp32
    targets: Tensor,
    inv_temperature: Tensor | None,
    kept: Tensor | None,
    stats: Tensor,
    entropy: Tensor,
    dlogp: Tensor | None,
    dentropy: Tensor | None,
    order: Tensor,
    first: int,
) -> None:
    """dz of a block from logits that the forward saved."""
    n, span = dz.shape
    words = 0 if kept is None else kept.shape[1]
    with on_device(dz):
        linear_logprob_logits_kernel[(n, cdiv(span, COLUMNS))](
            logits, targets, inv_temperature, kept, stats, entropy, dlogp, dentropy, order, dz,
            span, first, words, logits.stride(0), dz.stride(0),
            HAS_TEMPERATURE=inv_temperature is not None, HAS_KEPT=kept is not None,
            HAS_DLOGP=dlogp is not None, HAS_DENTROPY=dentropy is not None, BLOCK=COLUMNS, num_warps=4, **options(),
        )  # fmt: skip


def probs_block(
    dz: Tensor,  # [n, v]
    probs: Tensor,  # [n, V]
    tile_max: Tensor,  # [n, TILES]
    targets: Tensor,
    inv_temperature: Tensor | None,
    kept: Tensor | None,
    stats: Tensor,
    dlogp: Tensor,
    order: Tensor,
    first: int,
) -> None:
    """dz of a block from saved probabilities; only if the entropy has no gradient."""
    (n, span), vocab = dz.shape, probs.shape[1]
    with on_device(probs):
        linear_logprob_probs_kernel[(n, cdiv(span, COLUMNS))](
            probs, tile_max, targets, inv_temperature, kept, stats, dlogp, order, dz,
            vocab, span, first, tile_max.shape[1], cdiv(vocab, 32), dz.stride(0),
            HAS_TEMPERATURE=inv_temperature is not None, HAS_KEPT=kept is not None, BLOCK=COLUMNS,
            num_warps=4, **options(),
        )  # fmt: skip


# ---- the loop -----------------------------------------------------------------------------------


class Products(NamedTuple):
    """The three products of the backward: the anchors of `linear_logprob.py`, or certified schedules."""

    dz: Callable[..., None]
    dhidden: Callable[[Tensor, Tensor, Tensor, bool, Active], None]
    dweight: Callable[[Tensor, Tensor, Tensor, bool, Active], None]


def chunks_of_dz(tokens: int, entries: int) -> int:
    """Chunks of the input gradient's order per block of dz: the power of two for which dz has about `entries`."""
    return next_power_of_2(cdiv(entries, max(1, tokens) * LOGPROB_DGRAD_CHUNK))


def parallel_chunks(tokens: int, c: int) -> int:
    """Chunks of the input gradient's order that are computed in parallel and then added, a power of two.

    As many products [tokens, c] as occupy a GPU; one if a single product occupies at least half of it.
    """
    entries = max(FEWEST_TOKENS, tokens) * max(FEWEST_CHANNELS, c)
    return min(MAX_PARALLEL_CHUNKS, 1 << max(FILLED // entries, 1).bit_length() - 1)


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
    logits: Tensor | None,
    dense: bool,
    needs_input: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """dhidden [T, C] and dweight [V, C], each empty unless needed; dweight is added to `grad` [V, C] fp32 if given.

    A block has WGRAD_TOKENS tokens and `chunks_of_dz` chunks of the vocabulary (or `parallel_chunks`, if larger). With
    `grad` the outer loop is over tokens, otherwise over the vocabulary, so that only one fp32 sum is in memory.
    `dense` hints that nearly all tokens have a gradient: schedules that cannot skip tokens may then run. It changes no
    bit.
    """
    weight = strided(weight)
    (tokens, c), vocab, device = hidden.shape, weight.shape[0], hidden.device
    over_vocab = needs_weight and grad is None
    dweight = torch.empty(vocab if over_vocab else 0, c, dtype=weight.dtype, device=device)
    dhidden = torch.empty(tokens if needs_input else 0, c, dtype=hidden.dtype, device=device)
    if tokens == 0 or c == 0:
        return dhidden, dweight.zero_()
    targets, stats, entropy = targets.contiguous(), stats.contiguous(), entropy.contiguous()
    inv_temperature, kept, dlogp, dentropy = (
        None if t is None else t.contiguous() for t in (inv_temperature, kept, dlogp, dentropy)
    )
    blocks = [(s, min(tokens, s + WGRAD_TOKENS)) for s in range(0, tokens, WGRAD_TOKENS)]
    most_tokens = min(tokens, WGRAD_TOKENS)
    from_probs = probs is not None and tile_max is not None and dlogp is not None and dentropy is None
    chunks = chunks_of_dz(most_tokens, PROBS_ENTRIES if from_probs else DZ_ENTRIES)
    chunks = max(chunks, parallel_chunks(most_tokens, c))
    width = min(-(-vocab // VOCAB_TILE) * VOCAB_TILE, chunks * LOGPROB_DGRAD_CHUNK)
    saved_entries = 0 if logits is None else min(vocab, logits.shape[1])
    rows = row_order(targets, kept, stats, dlogp, dentropy, vocab, WGRAD_TOKENS)
    dense_row = width if dense else 0
    # All memory is allocated before the first launch. The reordered hidden states share the memory of dhidden.
    ordered = dhidden if needs_input else torch.empty(tokens, c, dtype=hidden.dtype, device=device)
    # `width` is a multiple of the tile, so every slice is 16-byte aligned; schedules rely on it.
    dz_buffer = torch.empty(most_tokens, width, dtype=weight.dtype, device=device)
    scratch = torch.empty(width, c, dtype=torch.float32, device=device) if over_vocab and len(blocks) > 1 else None
    totals = None
    if needs_input:
        totals = torch.empty(tokens if over_vocab else most_tokens, c, dtype=torch.float32, device=device)

    def fill(dz: Tensor, start: int, stop: int, first: int, last: int) -> None:
        """dz of tokens [start, stop) and entries [first, last)."""
        inverse, mask, g, h = (slice_rows(t, start, stop) for t in (inv_temperature, kept, dlogp, dentropy))
        y, s, entropies = targets[start:stop], stats[start:stop], entropy[start:stop]
        active = rows.active(start, stop, dense_row)
        if from_probs:
            assert probs is not None and tile_max is not None and g is not None
            probs_block(dz, probs[start:stop], tile_max[start:stop], y, inverse, mask, s, g, active.order, first)
            return
        ready = min(max(saved_entries, first), last)
        if logits is not None and ready > first:
            saved = logits[start:stop, first:ready]
            logits_block(dz[:, : ready - first], saved, y, inverse, mask, s, entropies, g, h, active.order, first)
        if ready < last:
            products.dz(
                dz[:, ready - first :], ordered[start:stop], weight[ready:last], y, inverse, mask, s, entropies, g, h,
                active, ready, vocab,
            )  # fmt: skip

    def add_to_dhidden(sums: Tensor, dz: Tensor, start: int, stop: int, first: int, last: int) -> None:
        active, step = rows.active(start, stop, dense_row), parallel_chunks(stop - start, c) * LOGPROB_DGRAD_CHUNK
        for low in range(first, last, step):
            high = min(last, low + step)
            products.dhidden(sums, dz[:, low - first : high - first], weight[low:high], low == 0, active)

    def add_to_dweight(dz: Tensor, start: int, stop: int, first: int, last: int) -> None:
        x, active = ordered[start:stop], rows.active(start, stop, dense_row)
        if scratch is not None:
            products.dweight(scratch[: last - first], dz, x, start == 0, active)
        else:
            products.dweight((dweight if grad is None else grad)[first:last], dz, x, grad is None, active)

    gather(hidden, rows.order, ordered, WGRAD_TOKENS)
    for group in [blocks] if over_vocab else [[b] for b in blocks]:
        origin, end = group[0][0], group[-1][1]
        running = None if totals is None else totals[: end - origin]
        for first in range(0, vocab, width):
            last = min(vocab, first + width)
            for start, stop in group:
                dz = dz_buffer[: stop - start, : last - first]
                fill(dz, start, stop, first, last)
                if running is not None:
                    add_to_dhidden(running[start - origin : stop - origin], dz, start, stop, first, last)
                if needs_weight:
                    add_to_dweight(dz, start, stop, first, last)
            if scratch is not None:
                dweight[first:last].copy_(scratch[: last - first])
        if running is not None:  # overwrites the reordered hidden states of this group
            scatter(running, rows.order[origin:end], dhidden[origin:end], WGRAD_TOKENS)
    return dhidden, dweight
