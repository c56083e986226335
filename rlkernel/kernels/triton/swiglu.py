"""swiglu on GPUs: round(round(silu(gate)) * up) and its gradient, elementwise.

Contract: orders.py, `swiglu`. Divisions are correctly rounded, because approximate division differs between GPUs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.kernels.triton.common import after_previous, cdiv, exp, next_power_of_2, on_device, options, pdl
from rlkernel.kernels.triton.launch import direct

# ---- kernels ------------------------------------------------------------------------------------


@triton.jit
def token_and_channels(F, BLOCK: tl.constexpr):
    """Token and channels [BLOCK] of this program."""
    blocks = tl.cdiv(F, BLOCK)
    token = tl.program_id(0) // blocks
    return token.to(tl.int64), tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)


@direct
@triton.jit
def swiglu_kernel(gate_up, out, F, L2_RESIDENT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """gate_up [T, 2F] -> out [T, F]; one program per token and block of channels."""
    after_previous(PDL)
    token, j = token_and_channels(F, BLOCK)
    inside = j < F
    read: tl.constexpr = "evict_first" if L2_RESIDENT else ""
    gate = tl.load(gate_up + token * 2 * F + j, mask=inside, other=0.0, eviction_policy=read).to(tl.float32)
    up = tl.load(gate_up + token * 2 * F + F + j, mask=inside, other=0.0, eviction_policy=read).to(tl.float32)
    silu = tl.div_rn(gate, 1.0 + exp(-gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * F + j, (silu * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_grad_kernel(dy, gate_up, grad, F, BLOCK: tl.constexpr):
    """dy [T, F], gate_up [T, 2F] -> grad [T, 2F]."""
    token, j = token_and_channels(F, BLOCK)
    inside = j < F
    d = tl.load(dy + token * F + j, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_up + token * 2 * F + j, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * F + F + j, mask=inside, other=0.0).to(tl.float32)
    below = 1.0 + exp(-gate)
    s = tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), below)
    dup = d * tl.div_rn(gate, below).to(grad.dtype.element_ty).to(tl.float32)
    dgate = (d * up) * (s * tl.fma(gate, 1.0 - s, tl.full((BLOCK,), 1.0, tl.float32)))
    tl.store(grad + token * 2 * F + j, dgate.to(grad.dtype.element_ty), mask=inside)
    tl.store(grad + token * 2 * F + F + j, dup.to(grad.dtype.element_ty), mask=inside)


# ---- launchers ----------------------------------------------------------------------------------

L2_RESIDENT_BYTES = 60 << 20
"""Largest output that stays in Hopper's L2 cache for the next GEMM; the input is then loaded evict-first."""


def _launch(tokens: int, f: int) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and constants: a thread loads 16 bytes of each operand; small programs keep the last wave short."""
    block = min(512, next_power_of_2(f, 32))
    return (tokens * cdiv(f, block),), {"BLOCK": block, "num_warps": max(1, block // 256), **options()}


def swiglu(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    tokens, f = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, f, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    grid, meta = _launch(tokens, f)
    with on_device(gate_up):
        swiglu_kernel[grid](gate_up, out, f, L2_RESIDENT=out.nbytes <= L2_RESIDENT_BYTES, **meta, **pdl(gate_up))
    return out


def swiglu_grad(dy: Tensor, gate_up: Tensor) -> Tensor:
    dy, gate_up = dy.contiguous(), gate_up.contiguous()
    grad = torch.empty_like(gate_up)
    if grad.numel() == 0:
        return grad
    grid, meta = _launch(*dy.shape)
    with on_device(dy):
        swiglu_grad_kernel[grid](dy, gate_up, grad, dy.shape[1], **meta)
    return grad
