"""rope on GPUs: one program rotates a few heads of one token; queries and keys share a launch.

Contract: orders.py, `rope`. Elementwise with an explicit fma, so any schedule gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.kernels.triton.aot import Variant
from rlkernel.kernels.triton.common import next_power_of_2, on_device, options

# ---- kernels ------------------------------------------------------------------------------------


@triton.jit
def rope_kernel(
    q,  # [T, H, D]
    k,  # [T, HK, D]
    positions,  # [T] int64
    cos_sin,  # [P, D] fp32
    q_out,  # [T, H, D]
    k_out,  # [T, HK, D]
    H,
    HK,
    q_row,
    q_head,
    k_row,
    k_head,
    INVERSE: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    q_groups = tl.cdiv(H, HEADS)
    half = D // 2
    j = tl.arange(0, BLOCK)
    table = cos_sin + tl.load(positions + token) * D + j
    cos = tl.load(table, mask=j < half, other=0.0)[None, :]
    sin = tl.load(table + half, mask=j < half, other=0.0)[None, :]
    if INVERSE:
        sin = -sin
    if group < q_groups:
        x = q + token * q_row
        out = q_out + token * H * D
        heads = H
        head_stride = q_head
        first = group * HEADS
    else:
        x = k + token * k_row
        out = k_out + token * HK * D
        heads = HK
        head_stride = k_head
        first = (group - q_groups) * HEADS
    head = first + tl.arange(0, HEADS)
    inside = (head < heads)[:, None] & (j < half)[None, :]
    at = head[:, None] * head_stride + j[None, :]
    x1 = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x + at + half, mask=inside, other=0.0).to(tl.float32)
    y1 = tl.fma(x1, cos, -(x2 * sin))
    y2 = tl.fma(x2, cos, x1 * sin)
    to = out + head[:, None] * D + j[None, :]
    tl.store(to, y1.to(out.dtype.element_ty), mask=inside)
    tl.store(to + half, y2.to(out.dtype.element_ty), mask=inside)


# ---- launchers ----------------------------------------------------------------------------------


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    q, k = (t if t.stride(2) == 1 else t.contiguous() for t in (q, k))
    positions, cos_sin = positions.contiguous(), cos_sin.contiguous()
    (tokens, h, d), hk = q.shape, k.shape[1]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if tokens == 0:
        return q_out, k_out
    block = next_power_of_2(d // 2, 16)
    heads = max(1, min(next_power_of_2(h), 1024 // block))
    with on_device(q):
        rope_kernel[(tokens, triton.cdiv(h, heads) + triton.cdiv(hk, heads))](
            q, k, positions, cos_sin, q_out, k_out, h, hk, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
            INVERSE=inverse, D=d, HEADS=heads, BLOCK=block, num_warps=4, **options(),
        )  # fmt: skip
    return q_out, k_out


# ---- ahead of time ------------------------------------------------------------------------------

AOT: tuple[Variant, ...] = (
    Variant(
        "rope", rope_kernel,
        {"q": "*bf16:16", "k": "*bf16:16", "positions": "*i64:16", "cos_sin": "*fp32:16", "q_out": "*bf16:16",
         "k_out": "*bf16:16", "H": "i32:16", "HK": "i32", "q_row": "i32:16", "q_head": "i32:16", "k_row": "i32:16",
         "k_head": "i32:16"},
        {"INVERSE": False, "D": 128, "HEADS": 16, "BLOCK": 64},
        main=True,
    ),
)  # fmt: skip
