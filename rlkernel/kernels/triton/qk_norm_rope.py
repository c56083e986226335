"""qk_norm_rope on GPUs: a program normalises and rotates all heads of a token from the fused projection.

A head is loaded as the two halves that rope pairs. If D is a power of two, the contract's row sum is the sum of the two
halves' sums, so norm and rope share registers. With a KV cache, key and value are stored in the token's slot.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.kernels.reference.qk_norm_rope import norm_then_rope
from rlkernel.kernels.triton.common import after_previous, next_power_of_2, on_device, options, pdl
from rlkernel.kernels.triton.launch import direct
from rlkernel.kernels.triton.rms_norm import inverse_root, rms_norm, row_sum
from rlkernel.kernels.triton.rope import clamp_position, halves, rope, rotate, unit_stride_heads

# ---- kernels ------------------------------------------------------------------------------------


@triton.jit
def scaled(x, rstd, weight, first, y, D: tl.constexpr, BLOCK: tl.constexpr):
    """One half of the normalised heads, rounded as rms_norm rounds them, converted to fp32."""
    w = tl.load(weight + first + tl.arange(0, BLOCK), mask=tl.arange(0, BLOCK) < D // 2, other=0.0).to(tl.float32)
    n = (x * rstd[:, None]).to(y.dtype.element_ty).to(tl.float32)
    return (n * w[None, :]).to(y.dtype.element_ty).to(tl.float32)


@triton.jit
def normed(x1, x2, weight, eps, y, D: tl.constexpr, BLOCK: tl.constexpr):
    """Both halves of the normalised heads."""
    rstd = inverse_root(row_sum(x1 * x1) + row_sum(x2 * x2), eps, D)
    return scaled(x1, rstd, weight, 0, y, D, BLOCK), scaled(x2, rstd, weight, D // 2, y, D, BLOCK)


@direct
@triton.jit(do_not_specialize=["P", "SIZE"])
def qk_norm_rope_kernel(
    q,  # [T, H, D]
    k,  # [T, HK, D]
    q_weight,  # [D]
    k_weight,
    positions,  # [T] int64
    cos_sin,  # [P, D] fp32
    q_out,  # [T, H, D]
    k_out,  # [T, HK, D], or the key cache if STORE
    v,  # [T, HK, D], if STORE
    v_out,  # the value cache
    slots,  # [T] int64
    eps,
    P,
    H,
    HK,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    slot_row,  # strides of slots and of the heads in a slot, in elements
    slot_head,
    SIZE,  # number of slots; k and v of a token with a slot outside [0, SIZE) are not stored
    D: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    STORE: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    position = clamp_position(tl.load(positions + token), P)
    q1, q2 = halves(q, token * q_row, q_head, 0, H, D, Q_HEADS, BLOCK)
    k1, k2 = halves(k, token * k_row, k_head, 0, HK, D, K_HEADS, BLOCK)
    if STORE:
        slot = tl.load(slots + token)
        head, column = tl.arange(0, K_HEADS)[:, None], tl.arange(0, 2 * BLOCK)[None, :]
        value = tl.load(v + token * v_row + head * v_head + column, mask=head < HK)
    j = tl.arange(0, BLOCK)
    table = cos_sin + position * D + j
    cos = tl.load(table, mask=j < D // 2, other=0.0)[None, :]
    sin = tl.load(table + D // 2, mask=j < D // 2, other=0.0)[None, :]
    q1, q2 = normed(q1, q2, q_weight, eps, q_out, D, BLOCK)
    k1, k2 = normed(k1, k2, k_weight, eps, k_out, D, BLOCK)
    rotate(q_out, q1, q2, cos, sin, token * H * D, D, 0, H, D, Q_HEADS, BLOCK)
    if STORE:
        if (slot >= 0) & (slot < SIZE):
            rotate(k_out, k1, k2, cos, sin, slot * slot_row, slot_head, 0, HK, D, K_HEADS, BLOCK)
            tl.store(v_out + slot * slot_row + head * slot_head + column, value, mask=head < HK)
    else:
        rotate(k_out, k1, k2, cos, sin, token * HK * D, D, 0, HK, D, K_HEADS, BLOCK)


# ---- launchers ----------------------------------------------------------------------------------


def _tile(h: int, hk: int, d: int) -> dict[str, Any]:
    heads = next_power_of_2(h)
    meta = {"D": d, "Q_HEADS": heads, "K_HEADS": next_power_of_2(hk), "BLOCK": d // 2}
    return {**meta, "num_warps": min(8, max(1, heads * d // 512))}


def computes(d: int) -> bool:
    """Whether the kernel supports heads of d elements."""
    return d >= 32 and d == next_power_of_2(d)


def _launch(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, positions: Tensor, cos_sin: Tensor,
    k_out: Tensor, v: Tensor | None, v_out: Tensor | None, slots: Tensor | None, cache_layout: tuple[int, int, int],
) -> Tensor:  # fmt: skip
    (tokens, h, d), hk = q.shape, k.shape[1]
    q, k = unit_stride_heads(q), unit_stride_heads(k)
    q_out = torch.empty((tokens, h, d), dtype=q.dtype, device=q.device)
    if tokens == 0:
        return q_out
    v_row, v_head = (0, 0) if v is None else (v.stride(0), v.stride(1))
    with on_device(q):
        qk_norm_rope_kernel[(tokens,)](
            q, k, q_weight.contiguous(), k_weight.contiguous(), positions.contiguous(), cos_sin.contiguous(), q_out,
            k_out, v, v_out, slots, eps, cos_sin.shape[0], h, hk, q.stride(0), q.stride(1), k.stride(0),
            k.stride(1), v_row, v_head, *cache_layout, **_tile(h, hk, d), STORE=slots is not None, **pdl(q),
            **options(),
        )  # fmt: skip
    return q_out


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, positions: Tensor, cos_sin: Tensor
) -> tuple[Tensor, Tensor]:
    if not computes(q.shape[2]):
        return norm_then_rope(rms_norm, rope, q, k, q_weight, k_weight, eps, positions, cos_sin)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    q_out = _launch(q, k, q_weight, k_weight, eps, positions, cos_sin, k_out, None, None, None, (0, 0, 0))
    return q_out, k_out


def qk_norm_rope_store(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, positions: Tensor, cos_sin: Tensor,
    k_cache: Tensor, v_cache: Tensor, slots: Tensor,
) -> Tensor:  # fmt: skip
    """Returns q' [T, H, D]; stores k' and v in `slots` [T] of the caches [pages, page, HK, D].

    Both caches have the same strides and contiguous slots.
    """
    v = unit_stride_heads(v)
    pages, page, _, _ = k_cache.shape
    cache_layout = (k_cache.stride(1), k_cache.stride(2), pages * page)
    return _launch(
        q, k, q_weight, k_weight, eps, positions, cos_sin, k_cache, v, v_cache, slots.contiguous(), cache_layout
    )  # fmt: skip
