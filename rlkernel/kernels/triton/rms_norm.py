"""rms_norm on GPUs: a few rows per program; one pass computes both gradients, the weight's by a fixed tree over rows.

Contract: orders.py, `rms_norm`. Every sum adds pairs (neighbours or halves) level by level, so neither layout nor
alignment nor num_warps changes a bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract.orders import WGRAD_TOKENS
from rlkernel.kernels.triton.common import (
    add_partials_,
    after_previous,
    cdiv,
    fold_rows,
    next_power_of_2,
    on_device,
    options,
    pdl,
)
from rlkernel.kernels.triton.launch import direct

# ---- kernels ------------------------------------------------------------------------------------


@triton.jit
def add_pairs(a, b, c, d):
    """Combine function of `row_sums`: adds two pairs."""
    return a + c, b + d


@triton.jit
def row_sum(x):
    """Sums [ROWS] of the rows of x [ROWS, 2^n], as a tree of neighbours."""
    for _ in tl.static_range(20):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), axis=2)
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def row_sums(x, y):
    """`row_sum` of x and y in one reduction, which halves the exchanges between warps."""
    for _ in tl.static_range(20):
        if x.shape[1] > 1:
            pairs = (
                tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)),
                tl.reshape(y, (x.shape[0], x.shape[1] // 2, 2)),
            )
            x, y = tl.reduce(pairs, 2, add_pairs)
    return tl.reshape(x, (x.shape[0],)), tl.reshape(y, (x.shape[0],))


@triton.jit
def inverse_root(square, eps, C: tl.constexpr):
    """1 / sqrt(square / C + eps), each step correctly rounded."""
    mean = tl.div_rn(square, tl.full(square.shape, C, tl.float32))
    return tl.div_rn(tl.full(square.shape, 1.0, tl.float32), tl.sqrt_rn(mean + eps))


@direct
@triton.jit(do_not_specialize=["T"])
def rms_norm_kernel(
    x,  # [T, C]
    residual,  # [T, C]
    weight,  # [C]
    y,  # [T, C]
    r,  # [T, C]
    T,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < T)[:, None] & (column < C)[None, :]
    at = row[:, None].to(tl.int64) * C + column[None, :]
    h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total = (h + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(y.dtype.element_ty)
        tl.store(r + at, total, mask=inside)
        h = total.to(tl.float32)
    w = tl.load(weight + column, mask=column < C, other=0.0).to(tl.float32)
    n = (h * inverse_root(row_sum(h * h), eps, C)[:, None]).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + at, (n * w[None, :]).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def rms_norm_grad_kernel(
    dy,  # [T, C]
    dr,  # [T, C]
    x,  # [T, C]
    weight,  # [C]
    dx,  # [T, C]
    partials,  # [programs, C] fp32
    T,
    eps,
    HAS_DR: tl.constexpr,
    HAS_PARTIALS: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    PAIR: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """dx, and partial sums of dy * round(x * rstd) for the weight gradient.

    A program computes one leaf of the tree over a chunk of rows: STEPS steps, added ascending, of ROWS rows each, which
    are folded in halves. If PAIR is not 0, it computes the leaves i and i + PAIR, which the tree adds first.
    """
    after_previous(PDL)
    column = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    w = tl.load(weight + column, mask=column < C, other=0.0).to(tl.float32)[None, :]
    leaf = tl.program_id(0)
    steps = STEPS
    if PAIR:
        leaf += leaf // PAIR * PAIR
        first = tl.zeros((BLOCK,), tl.float32)
        steps = tl.where((leaf + PAIR) * STEPS * ROWS < T, 2 * STEPS, STEPS)
    for step in tl.range(0, steps, num_stages=STAGES):
        index = leaf * STEPS + step
        if PAIR:
            second = step == STEPS
            first, total = tl.where(second, total, first), tl.where(second, 0.0, total)
            index += tl.where(step < STEPS, 0, (PAIR - 1) * STEPS)
        row = index * ROWS + tl.arange(0, ROWS)
        inside = (row < T)[:, None] & (column < C)[None, :]
        at = row[:, None].to(tl.int64) * C + column[None, :]
        h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        g = up * w
        square, dot = row_sums(h * h, g * h)
        # with eps = 0, rows past the end would be 0 / 0 and make the weight gradient NaN
        rstd = inverse_root(tl.where(row < T, square, 1.0), eps, C)
        # divides by -C, because Triton computes -h as 0 - h, which loses the sign of zero
        less = tl.div_rn(dot * rstd, tl.full((ROWS,), -C, tl.float32))[:, None]
        h = h * rstd[:, None]
        d = rstd[:, None] * tl.fma(h, tl.broadcast_to(less, h.shape), g)
        if HAS_DR:
            d += tl.load(dr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
        if HAS_PARTIALS:
            total += fold_rows(up * h.to(x.dtype.element_ty).to(tl.float32))
    if HAS_PARTIALS:
        if PAIR:
            total = first + total
        tl.store(partials + tl.program_id(0).to(tl.int64) * C + column, total, mask=column < C)


@triton.jit(do_not_specialize=["ROWS"])
def fold_kernel(
    partials, sums, ROWS, C, CHUNKS: tl.constexpr, ADD: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """sums [ROWS / (CHUNKS * CHUNK), C]: CHUNK rows of partials [ROWS, C] are folded in halves, CHUNKS folds are added.

    The sum starts at zero, or at the value in sums if ADD, and is rounded to the dtype of sums.
    """
    after_previous(PDL)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    out = sums + tl.cast(tl.program_id(1), tl.int64) * C + column
    total = tl.zeros((BLOCK,), tl.float32)
    if ADD:
        total = tl.load(out, mask=column < C, other=0.0)
    chunks = ()
    for i in tl.static_range(CHUNKS):  # issues all loads before the first addition
        row = (tl.program_id(1) * CHUNKS + i) * CHUNK + tl.arange(0, CHUNK)
        inside = (row < ROWS)[:, None] & (column < C)[None, :]
        at = row.to(tl.int64)[:, None] * C + column[None, :]
        chunks = chunks + (tl.load(partials + at, mask=inside, other=0.0),)  # type: ignore[assignment]
    for i in tl.static_range(CHUNKS):
        total += fold_rows(chunks[i])
    tl.store(out, total.to(sums.dtype.element_ty), mask=column < C)


# ---- launchers ----------------------------------------------------------------------------------

LEAF = 16
"""Least rows per leaf; part of the order of the weight gradient."""


def _shape(rows: int, c: int) -> tuple[tuple[int], dict[str, Any]]:
    block = next_power_of_2(c, 16)
    per_program = max(1, 2048 // block)
    # Few warps for long rows, so that an SM holds more programs with loads in flight, and fewer still if part of the
    # block is masked.
    warps = min(8 if block <= 8192 else 16, max(1, per_program * block // 512))
    if c < block and block in (4096, 8192):
        warps = 4
    meta = {"C": c, "ROWS": per_program, "BLOCK": block, "num_warps": warps}
    return (cdiv(rows, per_program),), meta | options()


def _rows(x: Tensor) -> int:
    """Rows of x [..., C]."""
    return x.numel() // x.shape[-1]


def _forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
    x, weight = x.contiguous(), weight.contiguous()
    residual = None if residual is None else residual.contiguous()
    y = torch.empty_like(x)
    r = None if residual is None else torch.empty_like(x)
    if x.numel():
        rows = _rows(x)
        grid, meta = _shape(rows, x.shape[-1])
        with on_device(x):
            rms_norm_kernel[grid](
                x, residual, weight, y, r, rows, eps, HAS_RESIDUAL=residual is not None, **meta, **pdl(x)
            )  # fmt: skip
    return y, r


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _forward(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, r = _forward(x, residual, weight, eps)
    assert r is not None
    return y, r


def _tile(c: int, size: int) -> tuple[int, int, dict[str, Any]]:
    """Rows per step and steps per leaf (the order of the weight gradient, a function of C only), and launch options."""
    block = next_power_of_2(c, 16)
    rows = max(1, 2048 // block)
    steps = max(8, LEAF // rows)
    # two steps of x, dy and dr are prefetched if they fit in the shared memory of every GPU
    stages = 3 if 2 * 3 * rows * block * size <= 49152 else 1
    return rows, steps, {"C": c, "BLOCK": block, "num_warps": min(16, max(4, block // 1024)), "STAGES": stages}


def leaves(tokens: int, c: int) -> tuple[int, int]:
    """Partial sums per WGRAD_TOKENS rows, and PAIR: the distance of a program's two leaves, 0 if it has one."""
    rows, steps, meta = _tile(c, 2)
    count = WGRAD_TOKENS // (rows * steps)
    # two leaves per program halve the partial sums; only if many remain to fill the GPU
    if rows * steps <= 2 * LEAF and (tokens > WGRAD_TOKENS or meta["BLOCK"] >= 4096):
        return count // 2, count // 2
    return count, 0


def programs_of(tokens: int, c: int) -> tuple[int, int]:
    """Programs of rms_norm_grad_kernel, one partial sum each, and PAIR."""
    rows, steps, _ = _tile(c, 2)
    programs, pair = cdiv(tokens, rows * steps), leaves(tokens, c)[1]
    if pair:
        programs = programs // (2 * pair) * pair + min(programs % (2 * pair), pair)
    return programs, pair


def _backward(
    dy: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, eps: float, with_partials: bool
) -> tuple[Tensor, Tensor | None]:
    """dx like x [..., C], and the partial sums of the weight gradient [programs, C]."""
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    dr = None if dr is None else dr.contiguous()
    dx = torch.empty_like(x)
    tokens, c = _rows(x), x.shape[-1]
    rows, steps, meta = _tile(c, x.element_size())
    steps = steps if with_partials else 1
    programs, pair = programs_of(tokens, c) if with_partials else (cdiv(tokens, rows), 0)
    partials = torch.empty(programs, c, dtype=torch.float32, device=x.device) if with_partials else None
    if x.numel():
        with on_device(x):
            rms_norm_grad_kernel[(programs,)](
                dy, dr, x, weight, dx, partials, tokens, eps, HAS_DR=dr is not None, HAS_PARTIALS=with_partials,
                ROWS=rows, STEPS=steps, PAIR=pair, **meta, **pdl(x), **options(),
            )  # fmt: skip
    return dx, partials


def _add_chunks_(grad: Tensor, partials: Tensor, tokens: int, fresh: bool) -> None:
    """grad [C] += (`fresh`: =) the tree over the partial sums of each WGRAD_TOKENS rows, chunks ascending."""
    programs, c = partials.shape
    chunks, per_chunk = cdiv(tokens, WGRAD_TOKENS), leaves(tokens, c)[0]
    at_once = chunks if chunks <= 2 else 1
    sums = grad if chunks == at_once else torch.empty(chunks, c, dtype=torch.float32, device=partials.device)
    block = 16
    fold_kernel[(cdiv(c, block), chunks // at_once)](
        partials, sums, programs, c, CHUNKS=at_once, ADD=sums is grad and not fresh, CHUNK=per_chunk, BLOCK=block,
        num_warps=4, **pdl(partials), **options(),
    )  # fmt: skip
    if sums is not grad:
        add_partials_(grad, sums, fresh)


def rms_norm_dgrad(dy: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _backward(dy, dr, x, weight, eps, False)[0]


def rms_norm_grad(dy: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dx, partials = _backward(dy, dr, x, weight, eps, True)
    if partials is None or x.numel() == 0:
        return dx, torch.zeros_like(weight)
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
    with on_device(x):
        _add_chunks_(dw, partials, _rows(x), True)
    return dx, dw


def rms_norm_grad_(grad: Tensor, dy: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    dx, partials = _backward(dy, dr, x, weight, eps, True)
    if partials is not None and x.numel():
        with on_device(x):
            _add_chunks_(grad, partials, _rows(x), False)
    return dx
