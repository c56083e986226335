"""Shape classes of linear_logprob and its products on CUDA: what decides a call's class, rows to compare, samples.

The schedules that compute them are in cuda/linear_logprob.py.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.contract.orders import VOCAB_TILE, WGRAD_TOKENS
from rlkernel.kernels.samples import finite, values
from rlkernel.kernels.triton import linear_logprob as anchor
from rlkernel.kernels.triton import linear_logprob_backward as loop
from rlkernel.kernels.triton import linear_logprob_rows as token_rows
from rlkernel.kernels.triton.linear_logprob_rows import Active

LEAST_TOKENS = 129  # fewer leave half of a cluster's tokens empty; the anchor has tiles for them
SAMPLE_ENTRIES = 12328  # vocabulary that certification compares: whole tiles, and a last one in part
SAMPLE_BLOCK = 8192  # the same for a block of dz, and for dhidden of many tokens: a chunk of its order
SAMPLE_WIDTH = 4096  # entries whose logits are kept, where it is timed
SAMPLE_BYTES = 1 << 28  # limit on dz and on the weight gradient in a comparison; a wider block is cut
FEW_TOKENS = 77  # below which cuBLASLt computes neither gradient
NARROW = (1, 9, FEW_TOKENS)  # tokens at which `dweight` is compared in a narrow block

# ---- the forward and dz --------------------------------------------------------------------------


class Shape(NamedTuple):
    """Shape class of both ops. The kernel's arithmetic knows neither T nor V, so they are no part of it."""

    device: int  # index, -1 for the CPU
    many: bool  # at least LEAST_TOKENS
    c: int
    dtype: torch.dtype
    dense: bool  # at 16-byte addresses TMA can load both operands and store the output
    temperature: bool
    kept: bool
    probs: bool
    logits: bool
    dlogp: bool
    dentropy: bool


def _fetchable(*matrices: Tensor) -> bool:
    """Whether TMA can load these matrices, if they begin at 16-byte addresses: contiguous rows that do not overlap."""
    return all(t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.stride(0) >= t.shape[1] for t in matrices)


def forward_shape(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None,
    keep_probs: bool, width: int,
) -> Shape:  # fmt: skip
    dense = _fetchable(hidden, weight) and not (keep_probs and weight.shape[0] % 8)
    return Shape(
        hidden.get_device(), hidden.shape[0] >= LEAST_TOKENS, hidden.shape[1], hidden.dtype, dense,
        inv_temperature is not None, kept is not None, keep_probs, width > 0, False, False,
    )  # fmt: skip


def dz_shape(
    dz: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None,
    stats: Tensor, entropy: Tensor, dlogp: Tensor | None, dentropy: Tensor | None, active: Active, first: int,
    vocab_size: int,
) -> Shape:  # fmt: skip
    return Shape(
        hidden.get_device(), hidden.shape[0] >= LEAST_TOKENS, hidden.shape[1], hidden.dtype,
        hidden.shape[1] % 8 == 0 and _fetchable(weight), inv_temperature is not None, kept is not None, False, False,
        dlogp is not None, dentropy is not None,
    )  # fmt: skip


# What a warm call looks up, as in `linear_shapes.py`. For contiguous operands, shapes decide `_fetchable`; else their
# strides count too. The backward's loop makes hidden states, dz and sums in one layout, which need no check.


def _strides(*matrices: Tensor) -> Hashable:
    return tuple(t.stride() for t in matrices)


def forward_call(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None,
    keep_probs: bool, width: int,
) -> Hashable:  # fmt: skip
    return (
        hidden.shape, hidden.dtype, hidden.get_device(), inv_temperature is None, kept is None,
        keep_probs and weight.shape, width > 0,
        (hidden.is_contiguous() and weight.is_contiguous()) or _strides(hidden, weight),
    )  # fmt: skip


def dz_call(
    dz: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None,
    stats: Tensor, entropy: Tensor, dlogp: Tensor | None, dentropy: Tensor | None, active: Active, first: int,
    vocab_size: int,
) -> Hashable:  # fmt: skip
    return (
        hidden.shape, hidden.dtype, hidden.get_device(), inv_temperature is None, kept is None, dlogp is None,
        dentropy is None, weight.is_contiguous() or weight.stride(),
    )  # fmt: skip


def rows_of(s: Shape) -> list[int]:
    return [LEAST_TOKENS, 1000, 4096] if s.many else [1, 77, LEAST_TOKENS - 1]


def _apart(x: Tensor) -> Tensor:
    """The same rows, further apart."""
    return torch.nn.functional.pad(x, (0, 8), value=float("nan"))[:, : x.shape[1]]


def forward_sample(s: Shape, m: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    device = generator.device
    hidden = values(kind, m, s.c, s.dtype, generator)
    weight = values(finite(kind), SAMPLE_ENTRIES, s.c, s.dtype, generator, second=True) * (4 * s.c**-0.5)
    least, between, _ = rows_of(s)
    if m == between:
        hidden, weight = _apart(hidden), _apart(weight)
        if not s.probs:  # which have a multiple of 8
            weight = weight[: SAMPLE_ENTRIES - 3]
    targets = torch.randint(0, SAMPLE_ENTRIES, (m,), device=device, generator=generator)
    targets[1:3] = torch.tensor((-1, SAMPLE_ENTRIES), device=device)[: max(m - 1, 0)]  # outside
    inverse, kept = None, None
    if s.temperature:
        inverse = 0.5 + torch.rand(m, dtype=torch.float32, device=device, generator=generator)
    if s.kept:
        shape = (m, -(-SAMPLE_ENTRIES // 32))
        kept = torch.randint(-(2**31), 2**31, shape, device=device, generator=generator).to(torch.int32)
    pair = 2 * VOCAB_TILE
    width = {least: pair, between: -(-SAMPLE_ENTRIES // pair) * pair}.get(m, SAMPLE_WIDTH)
    return hidden, weight, targets, inverse, kept, s.probs, width * s.logits


def _upstream(m: int, generator: torch.Generator, most: bool = False) -> Tensor:
    """Gradients of which every seventh is zero, and a third of the tokens together as well unless `most` have one."""
    g = torch.randn(m, dtype=torch.float32, device=generator.device, generator=generator)
    if m > 1:  # whose gradient would be none
        g[::7] = 0.0
    if not most:
        g[m // 3 : 2 * m // 3] = 0.0
    return g


def _active(
    targets: Tensor, kept: Tensor | None, stats: Tensor, dlogp: Tensor | None, dentropy: Tensor | None, vocab: int,
    row: int,
) -> Active:  # fmt: skip
    return token_rows.rows_of(targets, kept, stats, dlogp, dentropy, vocab, len(targets)).active(0, len(targets), row)


def dz_sample(s: Shape, m: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    hidden, weight, targets, inverse, kept, *_ = forward_sample(s, m, kind, generator)
    _, entropy, _, stats = anchor.forward(hidden, weight, targets, inverse, kept)
    g = _upstream(m, generator)
    up = (g if s.dlogp else None, 2.0 * g if s.dentropy else None)
    first = SAMPLE_ENTRIES // VOCAB_TILE * VOCAB_TILE - SAMPLE_BLOCK  # a block inside the vocabulary that ends with it
    entries, row = len(weight) - first, SAMPLE_ENTRIES - first  # a multiple of 8, which TMA needs
    dz = torch.full((m, row), float("nan"), dtype=s.dtype, device=hidden.device)[:, :entries]
    active = _active(targets, kept, stats, *up, len(weight), 0)
    dense = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    hidden = token_rows.gather(hidden, active.order, dense, m)
    return dz, hidden, weight[first:], targets, inverse, kept, stats, entropy, *up, active, first, len(weight)


# ---- the two gradients ----------------------------------------------------------------------------


class GradShape(NamedTuple):
    """Shape class of dhidden and dweight: C, and the dtype of what receives the result."""

    device: int
    c: int
    dtype: torch.dtype
    out: torch.dtype
    dense: bool
    fresh: bool
    row: int  # `Active.row` where the other operand is contiguous: cuBLASLt's choice may depend on it
    whole: bool = True  # a multiple of 8 entries; a vocabulary's last block may have any number
    few: bool = False  # dhidden: so few tokens that chunks of the vocabulary are computed in parallel


def dhidden_shape(running: Tensor, dz: Tensor, weight: Tensor, fresh: bool, active: Active) -> GradShape:
    dense = weight.shape[1] % 8 == 0 and _fetchable(weight)
    row = active.row if weight.is_contiguous() else 0
    return GradShape(
        dz.get_device(), weight.shape[1], dz.dtype, torch.float32, dense, fresh, row,
        weight.shape[0] % 8 == 0, loop.chunks_beside(*running.shape) > 1,
    )  # fmt: skip


def dweight_shape(grad: Tensor, dz: Tensor, hidden: Tensor, fresh: bool, active: Active) -> GradShape:
    dense = grad.shape[1] % 8 == 0 and grad.is_contiguous()
    return GradShape(
        dz.get_device(), hidden.shape[1], dz.dtype, grad.dtype, dense, fresh, active.row, grad.shape[0] % 8 == 0
    )


def dhidden_call(running: Tensor, dz: Tensor, weight: Tensor, fresh: bool, active: Active) -> Hashable:
    return (
        running.shape, weight.shape[0] & 7, weight.dtype, fresh, weight.get_device(), active.row,
        weight.is_contiguous() or weight.stride(),
    )  # fmt: skip


def dweight_call(grad: Tensor, dz: Tensor, hidden: Tensor, fresh: bool, active: Active) -> Hashable:
    entries, c = grad.shape
    return (
        c, entries & 7, hidden.dtype, grad.dtype, fresh, grad.get_device(), active.row,
        grad.is_contiguous() or grad.stride(),
    )  # fmt: skip


def most_tokens(s: GradShape) -> int:
    """The most tokens that a block of dz has: of long rows it has few."""
    return min(WGRAD_TOKENS, max(1, 2 * loop.PROBS_ENTRIES // s.row)) if s.row else WGRAD_TOKENS


def rows_of_grad(s: GradShape) -> list[int]:
    """Token counts, among them the most that a call has, because the chain of `dweight` runs over the tokens."""
    most = most_tokens(s)
    return list(dict.fromkeys(min(m, most) for m in (*NARROW, LEAST_TOKENS, 1000, WGRAD_TOKENS, 4096)))


def rows_of_dhidden(s: GradShape) -> list[int]:
    """`few`: 1, and from 77 to the most that are few; timed at the count that comes with rows of dz of that length.
    Else from the fewest that are not few."""
    least, most, timed, fewest = FEW_TOKENS, most_tokens(s), 4096, 1
    columns = max(s.c, loop.FEWEST_CHANNELS)
    border = loop.FILLED // 2 // columns
    if s.few:
        most = min(most, border)
        timed = loop.FILLED // (columns * max(1, -(-s.row // SAMPLE_BLOCK)))
    elif loop.chunks_beside(border, s.c) > 1:
        fewest = least = max(least, border + 1)
    last = min(max(timed, least), most)
    counts = (fewest, least, least + 52, max(least, 1000), WGRAD_TOKENS)
    return [*sorted({min(m, most) for m in counts} - {last}), last]


def widest(s: GradShape, tokens: int) -> int:
    """Entries of the widest block of dz that `dweight` is compared at with so many tokens."""
    held = max(tokens * s.dtype.itemsize, s.c * s.out.itemsize)  # bytes an entry
    most = max(8, SAMPLE_BYTES // max(held, 1) // 8 * 8)
    return min(s.row, most) if s.row else most


def compared(s: GradShape) -> list[tuple[int, int]]:
    """Tokens, ascending, and the most entries that `dweight` gets with as many or less: a multiple of 8."""
    odd = 8 * (not s.whole)  # whose widest sample is one entry short
    return [(m, widest(s, m) - odd) for m in sorted(rows_of_grad(s)) if not _is_narrow(s, m)]


def _is_narrow(s: GradShape, tokens: int) -> bool:
    return tokens in NARROW and tokens < most_tokens(s)


def _block_of_dz(
    s: GradShape, tokens: int, entries: int, kind: str, generator: torch.Generator
) -> tuple[Tensor, Active]:  # fmt: skip
    """A gradient of logits with rows of zeros, those of many groups behind the others, and which are not."""
    g = _upstream(tokens, generator, s.row > 0 and tokens != LEAST_TOKENS)  # and once where many have none
    targets = torch.zeros(tokens, dtype=torch.int64, device=g.device)
    stats = torch.zeros(tokens, 2, dtype=torch.float32, device=g.device)
    active = _active(targets, None, stats, g, None, 1, s.row)
    drawn = values(kind, tokens, entries, s.dtype, generator).masked_fill_((active.order < 0)[:, None], 0.0)
    row = s.row or -(-entries // 8) * 8 + 56
    dz = drawn
    if row != entries:
        dz = torch.zeros(tokens, row, dtype=s.dtype, device=g.device)[:, :entries]
        dz.copy_(drawn)
    return dz, active


def dhidden_sample(s: GradShape, m: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    """Many tokens: one chunk of the vocabulary. Few: the largest number of parallel chunks at one row, at the fewest
    other rows and at the row count that is timed; else one chunk, as in a block's last call, and three. dz and the
    weight have at most SAMPLE_BYTES."""
    rows, chunks = rows_of_dhidden(s), loop.chunks_beside(m, s.c) if s.few else 1
    fewest, second = ((sorted({*rows} - {1}) or [1]) * 2)[:2]
    if m not in (1, fewest, rows[-1]):
        chunks = 1 if m == second else min(3, chunks)
    most = min(s.row or chunks * SAMPLE_BLOCK, chunks * SAMPLE_BLOCK)
    entries = max(8, most - 56 * (m == fewest)) - (not s.whole)
    dz, active = _block_of_dz(s, m, entries, kind, generator)
    weight = values(finite(kind), dz.shape[1], s.c, s.dtype, generator, second=True)
    running = torch.randn(m, s.c, dtype=torch.float32, device=dz.device, generator=generator)
    return running, dz, weight, s.fresh, active


def dweight_sample(s: GradShape, m: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    most = widest(s, m)
    entries = max(8, min(most, SAMPLE_BLOCK) - 56) if _is_narrow(s, m) else most
    entries -= not (s.whole or m == FEW_TOKENS)
    dz, active = _block_of_dz(s, m, entries, kind, generator)
    hidden = values(finite(kind), m, s.c, s.dtype, generator, second=True)
    hidden.masked_fill_((active.order < 0)[:, None], 0.0)
    grad = torch.randn(dz.shape[1], s.c, dtype=torch.float32, device=dz.device, generator=generator).to(s.out)
    return grad, dz, hidden, s.fresh, active
