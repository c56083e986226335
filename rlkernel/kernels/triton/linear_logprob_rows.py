"""The rows of linear_logprob's three backward products on GPUs: which tokens, in what order.

Contract: docs/ops/linear_logprob.md. The order is made on the GPU, and the host does not wait to learn how many rows
there are; it may guess by an earlier count.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract.orders import K_GROUP, WGRAD_TOKENS
from rlkernel.kernels.triton.aot import TARGETS, Variant
from rlkernel.kernels.triton.common import on_device, options
from rlkernel.kernels.triton.logprob_backward import row_active

CHANNELS = 1024  # of a row a program that moves hidden states
SPREAD_ROWS, SPREAD_COLUMNS = 512, 32  # of dz that a program moves at once; it moves all rows of its columns
SINGLES = ("sm_90",)  # where schedules leave single tokens out

# ---- kernels ------------------------------------------------------------------------------------


@triton.jit
def linear_logprob_order_kernel(
    targets,  # [T] int64
    kept,  # [T, WORDS] int32
    stats,  # [T, 2] fp32
    dlogp,  # [T] fp32
    dentropy,  # [T] fp32
    order,  # out [T] int32
    place,  # out [T] int32
    counts,  # out [blocks of tokens, 2] int32
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
    """`Rows` of a block of TOKENS tokens."""
    start = tl.program_id(0).to(tl.int64) * TOKENS
    tokens = tl.minimum(TOKENS, T - start).to(tl.int32)
    group = tl.arange(0, GROUPS)
    flag = tl.zeros((GROUPS,), tl.int32)
    many = tl.zeros((GROUPS,), tl.int32)
    for i in range(0, GROUP):
        active = token_active(
            targets, kept, stats, dlogp, dentropy, start, group * GROUP + i, tokens, V, WORDS,
            HAS_KEPT, HAS_DLOGP, HAS_DENTROPY,
        )  # fmt: skip
        flag = flag | active.to(tl.int32)
        many += active.to(tl.int32)
    # The last group may be a short one: it is the last of those that have a gradient, or of all.
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
        tl.store(place + start + token, row + i, mask=token < tokens)
    tl.store(counts + 2 * tl.program_id(0), number)
    tl.store(counts + 2 * tl.program_id(0) + 1, tl.sum(many, axis=0))


@triton.jit
def token_active(
    targets, kept, stats, dlogp, dentropy, start, token, tokens, V, WORDS,
    HAS_KEPT: tl.constexpr, HAS_DLOGP: tl.constexpr, HAS_DENTROPY: tl.constexpr,
):  # fmt: skip
    """`row_active` of tokens of a block that begins at `start`."""
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
    """Rows of hidden, blocks of TOKENS each in their `Rows.order`, zeros where there is no gradient."""
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
    """The way back: input gradients at their tokens, rounded; +0 where a token has none."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(order + row)
    to = row // TOKENS * TOKENS + tl.where(token >= 0, token, -1 - token)
    inside = column < C
    total = tl.load(totals + row * C + column, mask=inside & (token >= 0), other=0.0)
    tl.store(dhidden + to * C + column, total.to(dhidden.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def linear_logprob_spread_kernel(
    dz,  # [T, dz_row]
    order,  # [T] int32: of the rows that are wanted
    place,  # [T] int32: of the rows that are there
    T,
    SPAN,
    dz_row,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of a block from one order into another, in place: a row moves up or stays, so the last are moved first."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (column < SPAN)[None, :]
    pieces = tl.cdiv(T, ROWS)
    for i in range(0, pieces):
        row = (pieces - 1 - i) * ROWS + tl.arange(0, ROWS)
        token = tl.load(order + row, mask=row < T, other=-1)
        source = tl.load(place + token, mask=token >= 0, other=0).to(tl.int64)
        x = tl.load(dz + source[:, None] * dz_row + column[None, :], mask=(token >= 0)[:, None] & inside, other=0.0)
        # Some of these rows are written now, by other threads. NVIDIA's barrier orders the loads in front of it; AMD's
        # would not wait for them.
        tl.debug_barrier()
        tl.store(dz + row.to(tl.int64)[:, None] * dz_row + column[None, :], x, mask=(row < T)[:, None] & inside)


# ---- launchers ----------------------------------------------------------------------------------


class Active(NamedTuple):
    """The tokens of a block in the order of a product's rows, those that have a gradient in front."""

    order: Tensor  # [n] int32: the block's token in each row, -1 - token where it has no gradient
    count: Tensor  # [1] int32: rows in front, behind which none has a gradient; schedules may leave those out
    row: int = 0  # from one row of dz to the next under `Guess.ALL`; no bit depends on it


class Guess(Enum):
    """What an earlier count says of the tokens, so that the work suits them. No bit depends on it."""

    ALL = "nearly all have a gradient"
    GROUPS = "many groups of K_GROUP have none"
    SINGLE = "many have none in groups that have one"


class Rows(NamedTuple):
    """The order of all tokens, block by block.

    Groups of `group` tokens stay what they are: those in which no token has a gradient go behind the others. Of K_GROUP
    tokens, whose products tensor cores add together, whole groups of products with zeros change no chain over tokens.
    Of 1, every token that has a gradient stands in front: the order of products whose rows are tokens.
    """

    order: Tensor  # [T] int32: `Active.order` of each block
    place: Tensor  # [T] int32: the row of each token
    counts: Tensor  # [blocks, 2] int32: rows of groups in which a token has a gradient, and tokens that have one
    tokens: int  # of a block

    def active(self, start: int, stop: int, row: int = 0) -> Active:
        """Of the block of tokens [start, stop)."""
        return Active(self.order[start:stop], self.counts[start // self.tokens, :1], row)


def _warps(group: int) -> int:
    """Of the program that orders a block of tokens."""
    return 8 if group > 1 else 16


def rows_of(
    targets: Tensor,  # [T]
    kept: Tensor | None,
    stats: Tensor,
    dlogp: Tensor | None,
    dentropy: Tensor | None,
    vocab: int,
    tokens: int,
    group: int = K_GROUP,
) -> Rows:
    """A token has a gradient where it has an upstream one, a kept target and a distribution."""
    t, device = targets.shape[0], stats.device
    groups = triton.next_power_of_2(triton.cdiv(min(t, tokens), group))
    order, place = (torch.empty(t, dtype=torch.int32, device=device) for _ in range(2))
    counts = torch.empty(triton.cdiv(t, tokens), 2, dtype=torch.int32, device=device)
    words = 0 if kept is None else kept.shape[1]
    with on_device(stats):
        linear_logprob_order_kernel[(len(counts),)](
            targets, kept, stats, dlogp, dentropy, order, place, counts, t, vocab, words, tokens,
            HAS_KEPT=kept is not None, HAS_DLOGP=dlogp is not None, HAS_DENTROPY=dentropy is not None,
            GROUPS=groups, GROUP=group, num_warps=_warps(group), **options(),
        )  # fmt: skip
    return Rows(order, place, counts, tokens)


def gather(hidden: Tensor, order: Tensor, out: Tensor, block: int) -> Tensor:
    """out [T, C] = rows of hidden [T, C] in `Rows.order` of blocks of so many, zeros where there is no gradient."""
    tokens, c = hidden.shape
    with on_device(hidden):
        linear_logprob_gather_kernel[(tokens, triton.cdiv(c, CHANNELS))](
            hidden, order, out, c, block, hidden.stride(0), hidden.stride(1), BLOCK=CHANNELS, num_warps=4,
            **options(),
        )  # fmt: skip
    return out


def scatter(totals: Tensor, order: Tensor, dhidden: Tensor, block: int) -> None:
    """Leaves the fp32 sums of `gather`'s rows, rounded, at their tokens of dhidden [T, C]."""
    tokens, c = totals.shape
    with on_device(totals):
        linear_logprob_scatter_kernel[(tokens, triton.cdiv(c, CHANNELS))](
            totals, order, dhidden, c, block, BLOCK=CHANNELS, num_warps=4, **options(),
        )  # fmt: skip


def spread(dz: Tensor, order: Tensor, place: Tensor) -> None:
    """Moves the rows of a block of dz [n, v] from the order of single tokens, whose `place` this is, to that of groups,
    with zeros for those without a gradient."""
    n, span = dz.shape
    with on_device(dz):
        linear_logprob_spread_kernel[(triton.cdiv(span, SPREAD_COLUMNS),)](
            dz, order, place, n, span, dz.stride(0), ROWS=SPREAD_ROWS, BLOCK=SPREAD_COLUMNS, num_warps=8, num_stages=1,
            **options(),
        )  # fmt: skip


# ---- ahead of time ------------------------------------------------------------------------------

_MOVED = {"order": "*i32:16", "C": "i32:16", "TOKENS": "i32:16"}
_FLOATS = ("stats", "dlogp", "dentropy")
AOT: tuple[Variant, ...] = (
    *(
        Variant(
            name, linear_logprob_order_kernel,
            {
                "targets": "*i64:16", **dict.fromkeys(("kept", "order", "place", "counts"), "*i32:16"),
                **dict.fromkeys(_FLOATS, "*fp32:16"), "T": "i32", "V": "i32:16", "WORDS": "i32", "TOKENS": "i32:16",
            },
            {
                "HAS_KEPT": True, "HAS_DLOGP": True, "HAS_DENTROPY": True, "GROUPS": WGRAD_TOKENS // group,
                "GROUP": group,
            },
            num_warps=_warps(group), targets=targets,
        )
        for name, group, targets in (
            ("linear_logprob order", K_GROUP, tuple(TARGETS)),
            ("linear_logprob order of tokens", 1, SINGLES),
        )
    ),
    Variant(
        "linear_logprob gather", linear_logprob_gather_kernel,
        {**_MOVED, "hidden": "*bf16:16", "out": "*bf16:16", "hidden_row": "i32:16"},
        {"hidden_col": 1, "BLOCK": CHANNELS},
    ),
    Variant(
        "linear_logprob scatter", linear_logprob_scatter_kernel,
        {**_MOVED, "totals": "*fp32:16", "dhidden": "*bf16:16"}, {"BLOCK": CHANNELS},
    ),
    Variant(
        "linear_logprob spread", linear_logprob_spread_kernel,
        {"dz": "*bf16:16", "order": "*i32:16", "place": "*i32:16", "T": "i32", "SPAN": "i32:16", "dz_row": "i32:16"},
        {"ROWS": SPREAD_ROWS, "BLOCK": SPREAD_COLUMNS}, num_warps=8, num_stages=1, main=True, targets=SINGLES,
    ),
)  # fmt: skip
