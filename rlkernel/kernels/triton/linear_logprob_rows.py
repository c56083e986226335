"""The row order of linear_logprob's backward on GPUs: tokens without a gradient go last, in groups of K_GROUP.

Contract: docs/ops/linear_logprob.md. The order and the row count stay on the GPU, so the backward neither synchronises
nor breaks CUDA graph capture.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract.orders import K_GROUP
from rlkernel.kernels.triton.common import cdiv, next_power_of_2, on_device, options
from rlkernel.kernels.triton.logprob_backward import row_active

CHANNELS = 1024  # per program of the gather and scatter kernels
WARPS = 8  # of linear_logprob_order_kernel

# ---- kernels ------------------------------------------------------------------------------------


@triton.jit
def linear_logprob_order_kernel(
    targets,  # [T] int64
    kept,  # [T, WORDS] int32
    stats,  # [T, 2] fp32
    dlogp,  # [T] fp32
    dentropy,  # [T] fp32
    order,  # out [T] int32
    counts,  # out [blocks of tokens] int32
    T,
    V,
    WORDS,
    TOKENS,
    HAS_KEPT: tl.constexpr,
    HAS_DLOGP: tl.constexpr,
    HAS_DENTROPY: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """`Rows.order` and `Rows.counts` of a block of TOKENS tokens."""
    start = tl.program_id(0).to(tl.int64) * TOKENS
    tokens = tl.minimum(TOKENS, T - start).to(tl.int32)
    group = tl.arange(0, GROUPS)
    flag = tl.zeros((GROUPS,), tl.int32)
    for i in range(0, GROUP):
        active = token_active(
            targets, kept, stats, dlogp, dentropy, start, group * GROUP + i, tokens, V, WORDS,
            HAS_KEPT, HAS_DLOGP, HAS_DENTROPY,
        )  # fmt: skip
        flag = flag | active.to(tl.int32)
    # The last group may be short. It stays the last of the groups with a gradient, or of all groups.
    size = tl.minimum(tl.maximum(tokens - group * GROUP, 0), GROUP)
    before = tl.cumsum(flag * size, axis=0) - flag * size
    number = tl.sum(flag * size, axis=0)
    row = tl.where(flag != 0, before, number + group * GROUP - before)
    for i in range(0, GROUP):
        token = group * GROUP + i
        active = token_active(
            targets, kept, stats, dlogp, dentropy, start, token, tokens, V, WORDS, HAS_KEPT, HAS_DLOGP, HAS_DENTROPY
        )
        tl.store(order + start + row + i, tl.where(active, token, -1 - token), mask=token < tokens)
    tl.store(counts + tl.program_id(0), number)


@triton.jit
def token_active(
    targets, kept, stats, dlogp, dentropy, start, token, tokens, V, WORDS,
    HAS_KEPT: tl.constexpr, HAS_DLOGP: tl.constexpr, HAS_DENTROPY: tl.constexpr,
):  # fmt: skip
    """`row_active` of tokens of the block that begins at `start`."""
    row = start + token
    inside = token < tokens
    g = tl.zeros(token.shape, tl.float32)
    h = tl.zeros(token.shape, tl.float32)
    if HAS_DLOGP:
        g = tl.load(dlogp + row, mask=inside, other=0.0)
    if HAS_DENTROPY:
        h = tl.load(dentropy + row, mask=inside, other=0.0)
    top = tl.load(stats + 2 * row, mask=inside, other=float("-inf"))
    return row_active(kept, targets, row, inside, g, h, top, V, WORDS, HAS_KEPT)


@triton.jit
def linear_logprob_gather_kernel(
    hidden,  # [T, C]
    order,  # [T] int32
    out,  # [T, C]
    C,
    TOKENS,
    hidden_row,
    hidden_col,
    BLOCK: tl.constexpr,
):
    """out = hidden with the rows of each block of TOKENS in `Rows.order`; rows without a gradient are 0."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(order + row)
    source = row // TOKENS * TOKENS + token
    inside = column < C
    at = source * hidden_row + column.to(tl.int64) * hidden_col
    x = tl.load(hidden + at, mask=inside & (token >= 0), other=0.0)
    tl.store(out + row * C + column, x, mask=inside)


@triton.jit
def linear_logprob_scatter_kernel(
    totals,  # [T, C] fp32
    order,  # [T] int32
    dhidden,  # [T, C]
    C,
    TOKENS,
    BLOCK: tl.constexpr,
):
    """The inverse: rounds the input gradients into the rows of their tokens; +0 for tokens without a gradient."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(order + row)
    to = row // TOKENS * TOKENS + tl.where(token >= 0, token, -1 - token)
    inside = column < C
    total = tl.load(totals + row * C + column, mask=inside & (token >= 0), other=0.0)
    tl.store(dhidden + to * C + column, total.to(dhidden.dtype.element_ty), mask=inside)


# ---- launchers ----------------------------------------------------------------------------------


class Active(NamedTuple):
    """The tokens of a block in the order of the products' rows, those with a gradient first."""

    order: Tensor  # [n] int32: the block's token in each row, -1 - token if it has no gradient
    count: Tensor  # [1] int32: rows of groups with a gradient; schedules may skip the rows after them
    row: int = 0  # row stride of dz if nearly all tokens have a gradient, else 0; schedules are certified per value


class Rows(NamedTuple):
    """The order of all tokens, block by block.

    Groups of K_GROUP tokens, which one matrix instruction adds, stay intact; groups in which no token has a gradient go
    last. The weight gradient may skip them, because a group of zeros leaves the chain over tokens unchanged.
    """

    order: Tensor  # [T] int32: `Active.order` of each block
    counts: Tensor  # [blocks] int32: `Active.count` of each block
    tokens: int  # per block

    def active(self, start: int, stop: int, row: int = 0) -> Active:
        """`Active` of the block of tokens [start, stop)."""
        block = start // self.tokens
        return Active(self.order[start:stop], self.counts[block : block + 1], row)


def row_order(
    targets: Tensor,  # [T]
    kept: Tensor | None,
    stats: Tensor,
    dlogp: Tensor | None,
    dentropy: Tensor | None,
    vocab: int,
    tokens: int,
) -> Rows:
    """Row order of all tokens, in blocks of `tokens`. `row_active` says which tokens have a gradient."""
    t, device = targets.shape[0], stats.device
    groups = next_power_of_2(cdiv(min(t, tokens), K_GROUP))
    order = torch.empty(t, dtype=torch.int32, device=device)
    counts = torch.empty(cdiv(t, tokens), dtype=torch.int32, device=device)
    words = 0 if kept is None else kept.shape[1]
    with on_device(stats):
        linear_logprob_order_kernel[(len(counts),)](
            targets, kept, stats, dlogp, dentropy, order, counts, t, vocab, words, tokens,
            HAS_KEPT=kept is not None, HAS_DLOGP=dlogp is not None, HAS_DENTROPY=dentropy is not None,
            GROUPS=groups, GROUP=K_GROUP, num_warps=WARPS, **options(),
        )  # fmt: skip
    return Rows(order, counts, tokens)


def gather(hidden: Tensor, order: Tensor, out: Tensor, block: int) -> Tensor:
    """out [T, C] = rows of hidden [T, C] in `Rows.order` of blocks of `block` tokens; 0 without a gradient."""
    tokens, c = hidden.shape
    with on_device(hidden):
        linear_logprob_gather_kernel[(tokens, cdiv(c, CHANNELS))](
            hidden, order, out, c, block, hidden.stride(0), hidden.stride(1), BLOCK=CHANNELS, num_warps=4,
            **options(),
        )  # fmt: skip
    return out


def scatter(totals: Tensor, order: Tensor, dhidden: Tensor, block: int) -> None:
    """dhidden [T, C] = totals [T, C] fp32, rounded and moved back from the row order of `gather`."""
    tokens, c = totals.shape
    with on_device(totals):
        linear_logprob_scatter_kernel[(tokens, cdiv(c, CHANNELS))](
            totals, order, dhidden, c, block, BLOCK=CHANNELS, num_warps=4, **options(),
        )  # fmt: skip
