"""The gradient of logprob on GPUs: elementwise, from the statistics of each row that the forward saved.

Contract: docs/ops/logprob.md. `linear_logprob` computes the gradient of its logits with the same `dz_at`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.kernels.triton.common import cdiv, exp, on_device, options

DGRAD_BLOCK = 2048  # vocabulary entries per program

# ---- kernels ------------------------------------------------------------------------------------


@triton.jit
def is_kept(kept, row, v, inside, WORDS):
    """Whether bit v of a row of the mask is set; row int64 and v broadcast together."""
    word = tl.load(kept + row * WORDS + (v >> 5), mask=inside, other=0)
    return ((word >> (v & 31)) & 1) != 0


@triton.jit
def dz_at(z, hit, top, log_total, g, h, entropy, HAS_DENTROPY: tl.constexpr = True):
    """Gradient of z from those of logp (g) and entropy (h), before the temperature; all broadcast together.

    z is -inf where dropped; `hit` is true at the target.
    """
    log_p = (z - top) - log_total
    p = exp(log_p)
    u = g * (tl.where(hit, 1.0, 0.0) - p)
    if HAS_DENTROPY:
        u = tl.fma(-(h * p), tl.where(p == 0.0, 0.0, log_p + entropy), u)
    return u


@triton.jit
def row_active(kept, targets, row, inside, g, h, top, V, WORDS, HAS_KEPT: tl.constexpr):
    """Rows with a gradient: they have an upstream gradient, a kept target and a kept entry."""
    active = inside & ((g != 0.0) | (h != 0.0)) & (top != float("-inf"))
    if HAS_KEPT:
        target = tl.load(targets + row, mask=inside, other=0)
        active = active & is_kept(kept, row, target, inside & (target >= 0) & (target < V), WORDS)
    return active


@triton.jit
def logprob_dgrad_kernel(
    logits,  # [T, V]
    targets,  # [T] int64
    inv_temperature,  # [T] fp32
    kept,  # [T, WORDS] int32
    stats,  # [T, 2] fp32
    entropy,  # [T] fp32
    dlogp,  # [T] fp32
    dentropy,  # [T] fp32
    dlogits,  # [T, V]
    V,
    WORDS,
    logits_row,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    HAS_DLOGP: tl.constexpr,
    HAS_DENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(V, BLOCK)
    # the last rows first, because the forward read them last and L2 still holds them
    row = (tl.num_programs(0) // blocks - 1 - tl.program_id(0) // blocks).to(tl.int64)
    start = tl.program_id(0) % blocks * BLOCK
    v = start + tl.arange(0, BLOCK)
    if HAS_KEPT:  # [words of the mask, entries of a word]
        first = start + (tl.arange(0, BLOCK // 32) * 32)[:, None]
        bit = tl.arange(0, 32)[None, :]
        v = first + bit
    inside = v < V
    g = 0.0
    h = 0.0
    if HAS_DLOGP:
        g = tl.load(dlogp + row)
    if HAS_DENTROPY:
        h = tl.load(dentropy + row)
    top = tl.load(stats + 2 * row)
    log_total = tl.load(stats + 2 * row + 1)
    active = row_active(kept, targets, row, True, g, h, top, V, WORDS, HAS_KEPT)
    # rows without a gradient are masked; a branch around them measured slower
    z = tl.load(logits + row * logits_row + v, mask=inside & active, other=0.0).to(tl.float32)
    if HAS_TEMPERATURE:
        inverse = tl.load(inv_temperature + row)
        z = z * inverse
    if HAS_KEPT:
        word = tl.load(kept + row * WORDS + (first >> 5), mask=(first < V) & active, other=0)
        keep = ((word >> bit) & 1) != 0
        z = tl.where(keep, z, float("-inf"))
    hit = v == tl.load(targets + row).to(tl.int32)
    out = dz_at(z, hit, top, log_total, g, h, tl.load(entropy + row), HAS_DENTROPY)
    if HAS_TEMPERATURE:
        out = out * inverse
    if HAS_KEPT:
        out = tl.where(keep, out, 0.0)
    out = tl.where(active, out, 0.0)
    tl.store(dlogits + row * V + v, out.to(dlogits.dtype.element_ty), mask=inside)


# ---- launchers ----------------------------------------------------------------------------------


def contiguous_rows(t: Tensor) -> Tensor:
    """The matrix, copied unless its rows are contiguous."""
    return t if t.stride(1) == 1 else t.contiguous()


def logprob_dgrad(
    logits: Tensor,
    targets: Tensor,
    inv_temperature: Tensor | None,
    kept: Tensor | None,
    stats: Tensor,
    entropy: Tensor,
    dlogp: Tensor | None,
    dentropy: Tensor | None,
) -> Tensor:
    logits = contiguous_rows(logits)
    tokens, vocab = logits.shape
    dlogits = torch.empty(tokens, vocab, dtype=logits.dtype, device=logits.device)
    if dlogits.numel() == 0:
        return dlogits
    vectors = (targets, inv_temperature, kept, stats, entropy, dlogp, dentropy)
    with on_device(logits):
        logprob_dgrad_kernel[(tokens * cdiv(vocab, DGRAD_BLOCK),)](
            logits, *(None if t is None else t.contiguous() for t in vectors), dlogits,
            vocab, cdiv(vocab, 32), logits.stride(0),
            HAS_TEMPERATURE=inv_temperature is not None, HAS_KEPT=kept is not None,
            HAS_DLOGP=dlogp is not None, HAS_DENTROPY=dentropy is not None, BLOCK=DGRAD_BLOCK, num_warps=2, **options(),
        )  # fmt: skip
    return dlogits
