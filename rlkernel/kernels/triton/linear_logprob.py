"""linear_logprob on GPUs: the head's matrix product with the tile statistics of logprob behind it, no [T, V] tensor.

Contract: docs/ops/linear_logprob.md. Logits come from linear's chain and statistics from logprob's `tile_stats`, so
the bits are those of the two ops in sequence. The backward forms dz a block of tokens and vocabulary at a time and
hands it to linear's own gradient kernels; the input gradient's chain continues over the blocks in fp32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract.orders import DGRAD_CHUNK, DGRAD_WHOLE, VOCAB_TILE, WGRAD_TOKENS
from rlkernel.kernels.triton.aot import Variant
from rlkernel.kernels.triton.common import on_device, options
from rlkernel.kernels.triton.linear import (
    Tile,
    add_dgrad_,
    can_fetch,
    chain,
    corner_of,
    descriptor,
    fit,
    gemm,
    linear_wgrad_,
    shared_limit,
    strided,
    tile_at,
)
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

DZ_BYTES = 1 << 27  # largest block of dz
DHIDDEN_BYTES = 1 << 27  # largest fp32 accumulator of the input gradient; with dz 256 MiB of scratch

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
    m, s, e = tile_stats(tl.reshape(z, (BLOCK_M, BLOCK_N // TILE, TILE)))
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
        out = dz_at(z, hit, top[:, None], log_total, g[:, None], h[:, None], entropies)
        if HAS_TEMPERATURE:
            out = out * inverse
        out = tl.where(keep, out, 0.0)
    at = local[:, None] * V + column[None, :]
    dz += tl.cast(tile_m, tl.int64) * BLOCK_M * V + tile_n * BLOCK_N
    tl.store(dz + at, out.to(dz.dtype.element_ty), mask=inside)


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


def linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return forward(hidden, weight, targets, inv_temperature, kept)


def forward(
    hidden: Tensor,  # [T, C]
    weight: Tensor,  # [V, C]
    targets: Tensor,  # [T]
    inv_temperature: Tensor | None,  # [T]
    kept: Tensor | None,  # [T, WORDS]
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # logp, entropy, lse [T], stats [T, 2]
    """`linear_logprob` with a schedule for tests and tuning; default by shape."""
    hidden, weight, targets = strided(hidden), strided(weight), targets.contiguous()
    inv_temperature, kept = _checked(inv_temperature), _checked(kept)
    (tokens, c), vocab = hidden.shape, weight.shape[0]
    out = outputs(tokens, hidden.device)
    if tokens == 0:
        return out
    size = hidden.element_size()
    with on_device(hidden):
        buffers = TileBuffers(tokens, vocab, hidden.device)
        for start in range(0, tokens, buffers.tokens):
            stop = min(tokens, start + buffers.tokens)
            n = stop - start
            wide = can_fetch(hidden, weight)  # operands that pass no register leave them to the wider tile
            shape = fit(tile or logits_schedule(n, size, wide), c, size, shared_limit(hidden))
            x, w, tma = operands(hidden[start:stop], weight, shape)
            linear_logprob_kernel[(triton.cdiv(n, shape.m) * triton.cdiv(vocab, shape.n),)](
                x, w, targets[start:stop], part(inv_temperature, start, stop),
                part(kept, start, stop), buffers.maximum, buffers.sum, buffers.entropy, buffers.target,
                n, vocab, c, buffers.tiles, triton.cdiv(vocab, 32),
                hidden.stride(0), hidden.stride(1), weight.stride(0), weight.stride(1),
                HAS_TEMPERATURE=inv_temperature is not None, HAS_KEPT=kept is not None, EVEN=c % shape.k == 0, TMA=tma,
                BLOCK_M=shape.m, BLOCK_N=shape.n, BLOCK_K=shape.k, GROUP=8,
                num_warps=shape.warps, num_stages=shape.stages, **options(matmul=True),
            )  # fmt: skip
            buffers.combine(*(t[start:stop] for t in out))
    return out


def block_sizes(tokens: int, vocab_size: int, c: int, element_size: int) -> tuple[int, int]:
    """Tokens and vocabulary entries of one block of dz.

    Tokens come first: each block of tokens reads and writes the weight gradient once. They are whole chunks of the
    weight gradient's order, entries whole vocabulary tiles (and so whole k-groups of the input gradient's chain), or
    one chunk of the input gradient's order where that has several.
    """
    if vocab_size > DGRAD_WHOLE:
        return WGRAD_TOKENS, DGRAD_CHUNK
    most = max(1, DHIDDEN_BYTES // (4 * c * WGRAD_TOKENS)) * WGRAD_TOKENS
    rows = min(most, triton.cdiv(tokens, WGRAD_TOKENS) * WGRAD_TOKENS)
    columns = max(1, DZ_BYTES // (element_size * rows * VOCAB_TILE)) * VOCAB_TILE
    return rows, min(columns, triton.cdiv(vocab_size, VOCAB_TILE) * VOCAB_TILE)


def linear_logprob_grad_(
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
    needs_input: bool,
) -> Tensor:
    hidden, weight, targets = strided(hidden), strided(weight), targets.contiguous()
    inv_temperature, kept, dlogp, dentropy = (_checked(t) for t in (inv_temperature, kept, dlogp, dentropy))
    stats, entropy = stats.contiguous(), entropy.contiguous()
    (tokens, c), vocab, size = hidden.shape, weight.shape[0], hidden.element_size()
    dhidden = torch.empty(tokens if needs_input else 0, c, dtype=hidden.dtype, device=hidden.device)
    if tokens == 0 or c == 0:
        return dhidden
    rows, columns = block_sizes(tokens, vocab, c, size)
    dz_memory = torch.empty(min(rows, tokens) * columns, dtype=weight.dtype, device=hidden.device)
    running = torch.empty(min(rows, tokens), c, dtype=torch.float32, device=hidden.device) if needs_input else None
    for start in range(0, tokens, rows):
        stop = min(tokens, start + rows)
        n = stop - start
        x = hidden[start:stop]
        shape = fit(logits_schedule(n, size), c, size, shared_limit(hidden))
        for first in range(0, vocab, columns):
            last = min(vocab, first + columns)
            w = weight[first:last]
            dz = dz_memory[: n * (last - first)].view(n, last - first)
            with on_device(hidden):
                rows_in, columns_in, tma = operands(x, w, shape)
                linear_logprob_dz_kernel[(triton.cdiv(n, shape.m) * triton.cdiv(last - first, shape.n),)](
                    rows_in, columns_in, targets[start:stop], part(inv_temperature, start, stop),
                    part(kept, start, stop), stats[start:stop], entropy[start:stop],
                    part(dlogp, start, stop), part(dentropy, start, stop), dz,
                    n, last - first, c, first, vocab, triton.cdiv(vocab, 32),
                    hidden.stride(0), hidden.stride(1), weight.stride(0), weight.stride(1),
                    HAS_TEMPERATURE=inv_temperature is not None, HAS_KEPT=kept is not None,
                    HAS_DLOGP=dlogp is not None, HAS_DENTROPY=dentropy is not None, EVEN=c % shape.k == 0, TMA=tma,
                    BLOCK_M=shape.m, BLOCK_N=shape.n, BLOCK_K=shape.k, GROUP=8,
                    num_warps=shape.warps, num_stages=shape.stages, **options(matmul=True),
                )  # fmt: skip
            if running is not None and vocab > DGRAD_WHOLE:
                add_dgrad_(running[:n], dz, w, first == 0)
                if last == vocab:
                    dhidden[start:stop] = running[:n]
            elif running is not None:
                to = dhidden[start:stop] if last == vocab else running[:n]
                gemm(dz, w, to, start=running[:n] if first > 0 else None)
            if grad is not None:
                linear_wgrad_(grad[first:last], dz, x)
    return dhidden


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
    constants = _constants(tile, HAS_KEPT=kept) | ({} if kept else {"kept": None})
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
)
