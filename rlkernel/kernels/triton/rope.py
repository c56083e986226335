"""rope on GPUs: a program rotates query and key heads of one token with one load of the cos/sin row.

Contract: orders.py, `rope`. Elementwise with an explicit fma, so the launch configuration changes no bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.kernels.triton.common import after_previous, negated, next_power_of_2, on_device, options, pdl
from rlkernel.kernels.triton.launch import direct

# ---- kernels ------------------------------------------------------------------------------------


@triton.jit
def halves(x, row, head_stride, first, heads, D: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Both halves [HEADS, BLOCK] of a token's heads from `first` on, in fp32."""
    head, j = first + tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (j < D // 2)
    at = x + row + head * head_stride + j
    near = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return near, tl.load(at + D // 2, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def rotate(
    out, x1, x2, cos, sin, row, head_stride, first, heads, D: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Rotates the halves x1, x2 of a token's heads from `first` on and stores them at `out` + row."""
    head, j = first + tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (j < D // 2)
    to = out + row + head * head_stride + j
    tl.store(to, tl.fma(x1, cos, negated(x2 * sin)).to(out.dtype.element_ty), mask=inside)
    tl.store(to + D // 2, tl.fma(x2, cos, x1 * sin).to(out.dtype.element_ty), mask=inside)


@triton.jit
def clamp_position(position, P):
    """Row of the table for a position, clamped to the table because a GPU cannot raise."""
    return tl.maximum(tl.minimum(position, P - 1), 0)


@direct
@triton.jit(do_not_specialize=["P"])
def rope_kernel(
    q,  # [T, H, D]
    k,  # [T, HK, D]
    positions,  # [T] int64
    cos_sin,  # [P, D] fp32
    q_out,  # [T, H, D]
    k_out,  # [T, HK, D]
    P,
    H,
    HK,
    q_row,
    q_head,
    k_row,
    k_head,
    INVERSE: tl.constexpr,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    token = (tl.program_id(0) // GROUPS).to(tl.int64)
    group = tl.program_id(0) % GROUPS
    position = clamp_position(tl.load(positions + token), P)
    # issued before the table's loads, which wait for the position
    q1, q2 = halves(q, token * q_row, q_head, group * Q_HEADS, H, D, Q_HEADS, BLOCK)
    k1, k2 = halves(k, token * k_row, k_head, group * K_HEADS, HK, D, K_HEADS, BLOCK)
    j = tl.arange(0, BLOCK)
    table = cos_sin + position * D + j
    cos = tl.load(table, mask=j < D // 2, other=0.0)[None, :]
    sin = tl.load(table + D // 2, mask=j < D // 2, other=0.0)[None, :]
    if INVERSE:
        sin = negated(sin)
    rotate(q_out, q1, q2, cos, sin, token * H * D, D, group * Q_HEADS, H, D, Q_HEADS, BLOCK)
    rotate(k_out, k1, k2, cos, sin, token * HK * D, D, group * K_HEADS, HK, D, K_HEADS, BLOCK)


# ---- launchers ----------------------------------------------------------------------------------


def unit_stride_heads(x: Tensor) -> Tensor:
    """x [T, heads, D], copied unless D has stride 1 and the offsets between heads fit in 32 bits."""
    return x if x.stride(2) == 1 and abs(x.stride(1)) * x.shape[1] < 1 << 31 else x.contiguous()


PROGRAM_ELEMENTS = 1024
"""Most elements of the queries' first halves per program, so that an SM runs many programs."""


def _tile(h: int, hk: int, d: int) -> dict[str, Any]:
    block, heads = next_power_of_2(d // 2, 16), next_power_of_2(h)
    groups = min(heads, max(1, heads * block // PROGRAM_ELEMENTS))
    meta = {"D": d, "GROUPS": groups, "Q_HEADS": heads // groups, "K_HEADS": max(1, next_power_of_2(hk) // groups)}
    return {**meta, "BLOCK": block, "num_warps": min(8, max(1, heads // groups * block // 512))}


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """q [T, H, D] and k [T, HK, D], rotated; `inverse` rotates by the negative angle, as the gradient does."""
    q, k = unit_stride_heads(q), unit_stride_heads(k)
    positions, cos_sin = positions.contiguous(), cos_sin.contiguous()
    (tokens, h, d), hk = q.shape, k.shape[1]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if tokens == 0:
        return q_out, k_out
    meta = _tile(h, hk, d)
    with on_device(q):
        rope_kernel[(tokens * meta["GROUPS"],)](
            q, k, positions, cos_sin, q_out, k_out, cos_sin.shape[0], h, hk, q.stride(0), q.stride(1),
            k.stride(0), k.stride(1), INVERSE=inverse, **meta, **pdl(q), **options(),
        )  # fmt: skip
    return q_out, k_out
