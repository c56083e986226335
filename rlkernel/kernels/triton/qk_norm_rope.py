"""qk_norm_rope on GPUs: a program norms and rotates all heads of a token, read from the fused projection.

A head lies in two halves, as rope pairs them. The contract's row sum adds neighbours, so for a power of two it is the
sum of the halves' sums, and nothing is moved between the two steps.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.kernels.triton.aot import Variant, early_too
from rlkernel.kernels.triton.common import early, next_power_of_2, on_device, options
from rlkernel.kernels.triton.launch import direct
from rlkernel.kernels.triton.rms_norm import inverse_root, rms_norm, row_sum
from rlkernel.kernels.triton.rope import halves, rope, rotate

# ---- kernels ------------------------------------------------------------------------------------


@triton.jit
def scaled(x, rstd, weight, first, y, D: tl.constexpr, BLOCK: tl.constexpr):
    """One half of the normed heads, rounded as the op rounds them, in fp32 again."""
    w = tl.load(weight + first + tl.arange(0, BLOCK), mask=tl.arange(0, BLOCK) < D // 2, other=0.0).to(tl.float32)
    n = (x * rstd[:, None]).to(y.dtype.element_ty).to(tl.float32)
    return (n * w[None, :]).to(y.dtype.element_ty).to(tl.float32)


@triton.jit
def normed(x1, x2, weight, eps, y, D: tl.constexpr, BLOCK: tl.constexpr):
    rstd = inverse_root(row_sum(x1 * x1) + row_sum(x2 * x2), eps, D)
    return scaled(x1, rstd, weight, 0, y, D, BLOCK), scaled(x2, rstd, weight, D // 2, y, D, BLOCK)


@direct
@triton.jit
def qk_norm_rope_kernel(
    q,  # [T, H, D]
    k,  # [T, HK, D]
    q_weight,  # [D]
    k_weight,
    positions,  # [T] int64
    cos_sin,  # [P, D] fp32
    q_out,  # [T, H, D]
    k_out,  # [T, HK, D]
    eps,
    H,
    HK,
    q_row,
    q_head,
    k_row,
    k_head,
    D: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    q1, q2 = halves(q, token * q_row, q_head, H, D, Q_HEADS, BLOCK)
    k1, k2 = halves(k, token * k_row, k_head, HK, D, K_HEADS, BLOCK)
    j = tl.arange(0, BLOCK)
    table = cos_sin + position * D + j
    cos = tl.load(table, mask=j < D // 2, other=0.0)[None, :]
    sin = tl.load(table + D // 2, mask=j < D // 2, other=0.0)[None, :]
    q1, q2 = normed(q1, q2, q_weight, eps, q_out, D, BLOCK)
    k1, k2 = normed(k1, k2, k_weight, eps, k_out, D, BLOCK)
    rotate(q_out, q1, q2, cos, sin, token, H, D, Q_HEADS, BLOCK)
    rotate(k_out, k1, k2, cos, sin, token, HK, D, K_HEADS, BLOCK)


# ---- launchers ----------------------------------------------------------------------------------


def _tile(h: int, hk: int, d: int) -> dict[str, Any]:
    heads = next_power_of_2(h)
    meta = {"D": d, "Q_HEADS": heads, "K_HEADS": next_power_of_2(hk), "BLOCK": d // 2}
    return {**meta, "num_warps": min(8, max(1, heads * d // 512))}


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, positions: Tensor, cos_sin: Tensor
) -> tuple[Tensor, Tensor]:
    (tokens, h, d), hk = q.shape, k.shape[1]
    if d < 32 or d != next_power_of_2(d):
        q_normed = rms_norm(q.reshape(-1, d), q_weight, eps).view(q.shape)
        k_normed = rms_norm(k.reshape(-1, d), k_weight, eps).view(k.shape)
        return rope(q_normed, k_normed, positions, cos_sin, False)
    q, k = (t if t.stride(2) == 1 else t.contiguous() for t in (q, k))
    positions, cos_sin = positions.contiguous(), cos_sin.contiguous()
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if tokens == 0:
        return q_out, k_out
    with on_device(q):
        qk_norm_rope_kernel[(tokens,)](
            q, k, q_weight.contiguous(), k_weight.contiguous(), positions, cos_sin, q_out, k_out, eps, h, hk,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), **_tile(h, hk, d), **early(q), **options(),
        )  # fmt: skip
    return q_out, k_out


# ---- ahead of time ------------------------------------------------------------------------------


def _variant(h: int, hk: int) -> Variant:
    types = dict.fromkeys(("q", "k", "q_weight", "k_weight", "q_out", "k_out"), "*bf16:16")
    types |= {"positions": "*i64:16", "cos_sin": "*fp32:16", "eps": "fp32", "H": "i32:16", "HK": "i32"}
    types |= dict.fromkeys(("q_row", "q_head", "k_row", "k_head"), "i32:16")
    meta = _tile(h, hk, 128)
    warps = meta.pop("num_warps")
    return Variant(f"qk_norm_rope {h} + {hk}", qk_norm_rope_kernel, types, meta, num_warps=warps)


AOT: tuple[Variant, ...] = (*early_too(_variant(16, 8)), *early_too(_variant(32, 8)))
