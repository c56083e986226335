"""rms_norm on GPUs: a few rows a program, a row's sum by one fixed tree; the weight gradient in two passes.

Contract: orders.py, `rms_norm`. The tree is that of `tl.sum` over a layout fixed by C and the dtype: block, rows and
warps are functions of C alone, and every operand is 16-byte aligned, so neither batch nor row can move an element to
another thread.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract.orders import SUM_TOKENS
from rlkernel.kernels.triton.aot import Variant
from rlkernel.kernels.triton.common import add_partials_, aligned, next_power_of_2, on_device, options

# ---- kernels ------------------------------------------------------------------------------------


@triton.jit
def row_rstd(h, eps, C: tl.constexpr):
    """1 / sqrt(mean(h^2) + eps) of each row of h [ROWS, BLOCK] fp32, zero past C; [ROWS, 1]."""
    mean = tl.div_rn(tl.sum(h * h, axis=1), tl.full((h.shape[0],), C, tl.float32))
    return tl.div_rn(tl.full((h.shape[0],), 1.0, tl.float32), tl.sqrt_rn(mean + eps))[:, None]


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
):
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
    n = (h * row_rstd(h, eps, C)).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + at, (n * w[None, :]).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def rms_norm_dgrad_kernel(
    dy,  # [T, C]
    dr,  # [T, C]
    x,  # [T, C]
    weight,  # [C]
    dx,  # [T, C]
    T,
    eps,
    HAS_DR: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < T)[:, None] & (column < C)[None, :]
    at = row[:, None].to(tl.int64) * C + column[None, :]
    h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=column < C, other=0.0).to(tl.float32)
    g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32) * w[None, :]
    rstd = row_rstd(h, eps, C)
    h = h * rstd
    mean = tl.div_rn(tl.sum(g * h, axis=1), tl.full((ROWS,), C, tl.float32))[:, None]
    d = rstd * tl.fma(-h, tl.broadcast_to(mean, h.shape), g)
    if HAS_DR:
        d += tl.load(dr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def rstd_kernel(x, rstd, T, eps, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """rstd [T] of the rows of x [T, C]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < T)[:, None] & (column < C)[None, :]
    h = tl.load(x + row[:, None].to(tl.int64) * C + column[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(rstd + row[:, None], row_rstd(h, eps, C), mask=(row < T)[:, None])


@triton.jit(do_not_specialize=["T"])
def rms_norm_wgrad_kernel(
    dy,  # [T, C]
    x,  # [T, C]
    rstd,  # [T]
    partials,  # [segments, C]
    T,
    C: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """partials = sum of dy * round(x * rstd) over the rows of one segment, a chain of fma ascending from 0."""
    segment = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < C
    total = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(segment * SEGMENT, min(T, segment * SEGMENT + SEGMENT), loop_unroll_factor=8):
        at = tl.cast(row, tl.int64) * C + column
        h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * tl.load(rstd + row)
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        total = tl.fma(g, h.to(x.dtype.element_ty).to(tl.float32), total)
    tl.store(partials + tl.cast(segment, tl.int64) * C + column, total, mask=inside)


# ---- launchers ----------------------------------------------------------------------------------


def _shape(rows: int, c: int) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and constants of a kernel that sums rows; all but the grid come from C alone."""
    block = next_power_of_2(c, 16)
    per_program = max(1, 1024 // block)
    meta = {"C": c, "ROWS": per_program, "BLOCK": block, "num_warps": min(16, max(4, block // 512))}
    return (triton.cdiv(rows, per_program),), meta | options()


def _forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
    x, weight = aligned(x), aligned(weight)
    residual = None if residual is None else aligned(residual)
    y = torch.empty_like(x)
    r = None if residual is None else torch.empty_like(x)
    if x.numel():
        grid, meta = _shape(*x.shape)
        with on_device(x):
            rms_norm_kernel[grid](x, residual, weight, y, r, x.shape[0], eps, HAS_RESIDUAL=residual is not None, **meta)
    return y, r


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _forward(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, r = _forward(x, residual, weight, eps)
    assert r is not None
    return y, r


def rms_norm_dgrad(dy: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    dy, x, weight = aligned(dy), aligned(x), aligned(weight)
    dr = None if dr is None else aligned(dr)
    dx = torch.empty_like(x)
    if x.numel():
        grid, meta = _shape(*x.shape)
        with on_device(x):
            rms_norm_dgrad_kernel[grid](dy, dr, x, weight, dx, x.shape[0], eps, HAS_DR=dr is not None, **meta)
    return dx


def rms_norm_wgrad_(grad: Tensor, dy: Tensor, x: Tensor, eps: float) -> None:
    dy, x = aligned(dy), aligned(x)
    rows, c = x.shape
    if x.numel() == 0:
        return
    segments = triton.cdiv(rows, SUM_TOKENS)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    partials = torch.empty(segments, c, dtype=torch.float32, device=x.device)
    grid, meta = _shape(rows, c)
    block = min(512, next_power_of_2(c, 32))
    with on_device(x):
        rstd_kernel[grid](x, rstd, rows, eps, **meta)
        rms_norm_wgrad_kernel[(triton.cdiv(c, block), segments)](
            dy, x, rstd, partials, rows,
            C=c, SEGMENT=SUM_TOKENS, BLOCK=block, num_warps=max(1, block // 128), **options(),
        )  # fmt: skip
        add_partials_(grad, partials)


# ---- ahead of time ------------------------------------------------------------------------------

_ROW = {"T": "i32", "eps": "fp32"}
_META = {"C": 4096, "ROWS": 1, "BLOCK": 4096}
AOT: tuple[Variant, ...] = (
    Variant(
        "add_rms_norm", rms_norm_kernel,
        {**{n: "*bf16:16" for n in ("x", "residual", "weight", "y", "r")}, **_ROW}, {"HAS_RESIDUAL": True, **_META},
        num_warps=8, main=True,
    ),
    Variant(
        "rms_norm heads", rms_norm_kernel, {**{n: "*bf16:16" for n in ("x", "weight", "y")}, **_ROW},
        {"residual": None, "r": None, "HAS_RESIDUAL": False, "C": 128, "ROWS": 8, "BLOCK": 128}, main=True,
    ),
    Variant(
        "rms_norm_dgrad", rms_norm_dgrad_kernel,
        {**{n: "*bf16:16" for n in ("dy", "dr", "x", "weight", "dx")}, **_ROW}, {"HAS_DR": True, **_META},
        num_warps=8, main=True,
    ),
    Variant("rstd", rstd_kernel, {"x": "*bf16:16", "rstd": "*fp32:16", **_ROW}, _META, num_warps=8, main=True),
    Variant(
        "rms_norm_wgrad", rms_norm_wgrad_kernel,
        {"dy": "*bf16:16", "x": "*bf16:16", "rstd": "*fp32:16", "partials": "*fp32:16", "T": "i32"},
        {"C": 4096, "SEGMENT": SUM_TOKENS, "BLOCK": 512}, main=True,
    ),
)  # fmt: skip
