"""Shape classes, row counts and samples for the certification of linear_logprob and its products on CUDA.

The schedules are in cuda/linear_logprob.py.
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

HOPPER_MIN_TOKENS = 129  # with fewer, one block of the cluster has no tokens; the anchor has smaller tiles
SAMPLE_ENTRIES = 12328  # vocabulary of a sample: full tiles and a partial last one
SAMPLE_BLOCK = 8192  # width of a sample's dz block: one chunk of dhidden's order
SAMPLE_WIDTH = 4096  # stored logits per row in the timed sample
SAMPLE_BYTES = 1 << 28  # limit on a sample's dz and weight gradient; wider blocks are computed in pieces
CUBLASLT_MIN_TOKENS = 77  # below this, cuBLASLt computes neither gradient
NARROW = (1, 9, CUBLASLT_MIN_TOKENS)  # token counts at which `dweight` is compared with a narrow block

# ---- the forward and dz --------------------------------------------------------------------------


class LinearLogprobShape(NamedTuple):
    """Shape class of both ops. T and V are not part of it, because the kernel's arithmetic does not depend on them."""

    device: int  # index, -1 for the CPU
    many: bool  # at least HOPPER_MIN_TOKENS
    c: int
    dtype: torch.dtype
    tma: bool  # TMA can load both operands and store the output if they are at 16-byte addresses
    temperature: bool
    kept: bool
    probs: bool
    logits: bool
    dlogp: bool
    dentropy: bool


def _tma_loadable(*matrices: Tensor) -> bool:
    """Whether TMA can load these matrices at 16-byte addresses: contiguous rows that do not overlap."""
    return all(t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.stride(0) >= t.shape[1] for t in matrices)


def forward_shape(
    hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None,
    keep_probs: bool, width: int,
) -> LinearLogprobShape:  # fmt: skip
    tma = _tma_loadable(hidden, weight) and not (keep_probs and weight.shape[0] % 8)
    return LinearLogprobShape(
        hidden.get_device(), hidden.shape[0] >= HOPPER_MIN_TOKENS, hidden.shape[1], hidden.dtype, tma,
        inv_temperature is not None, kept is not None, keep_probs, width > 0, False, False,
    )  # fmt: skip


def dz_shape(
    dz: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, inv_temperature: Tensor | None, kept: Tensor | None,
    stats: Tensor, entropy: Tensor, dlogp: Tensor | None, dentropy: Tensor | None, active: Active, first: int,
    vocab_size: int,
) -> LinearLogprobShape:  # fmt: skip
    return LinearLogprobShape(
        hidden.get_device(), hidden.shape[0] >= HOPPER_MIN_TOKENS, hidden.shape[1], hidden.dtype,
        hidden.shape[1] % 8 == 0 and _tma_loadable(weight), inv_temperature is not None, kept is not None, False, False,
        dlogp is not None, dentropy is not None,
    )  # fmt: skip


# Call keys, as in linear_shapes.py. `_tma_loadable` follows from the shapes of contiguous operands; others add their
# strides to the key. The backward's loop allocates hidden states, dz and sums in one layout, so their strides do not.


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


def rows_of(s: LinearLogprobShape) -> list[int]:
    return [HOPPER_MIN_TOKENS, 1000, 4096] if s.many else [1, 77, HOPPER_MIN_TOKENS - 1]


def _strided(x: Tensor) -> Tensor:
    """The same rows at a larger stride."""
    return torch.nn.functional.pad(x, (0, 8), value=float("nan"))[:, : x.shape[1]]


def forward_sample(s: LinearLogprobShape, m: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    device = generator.device
    hidden = values(kind, m, s.c, s.dtype, generator)
    weight = values(finite(kind), SAMPLE_ENTRIES, s.c, s.dtype, generator, second=True) * (4 * s.c**-0.5)
    least, between, _ = rows_of(s)
    if m == between:
        hidden, weight = _strided(hidden), _strided(weight)
        if not s.probs:  # probabilities need a multiple of 8
            weight = weight[: SAMPLE_ENTRIES - 3]
    targets = torch.randint(0, SAMPLE_ENTRIES, (m,), device=device, generator=generator)
    targets[1:3] = torch.tensor((-1, SAMPLE_ENTRIES), device=device)[: max(m - 1, 0)]  # outside the vocabulary
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
    """Upstream gradients. Every seventh is zero, and a contiguous third of the tokens too, unless `most` is set."""
    g = torch.randn(m, dtype=torch.float32, device=generator.device, generator=generator)
    if m > 1:  # a single token keeps its gradient
        g[::7] = 0.0
    if not most:
        g[m // 3 : 2 * m // 3] = 0.0
    return g


def _active(
    targets: Tensor, kept: Tensor | None, stats: Tensor, dlogp: Tensor | None, dentropy: Tensor | None, vocab: int,
    row: int,
) -> Active:  # fmt: skip
    return token_rows.row_order(targets, kept, stats, dlogp, dentropy, vocab, len(targets)).active(0, len(targets), row)


def dz_sample(s: LinearLogprobShape, m: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    hidden, weight, targets, inverse, kept, *_ = forward_sample(s, m, kind, generator)
    _, entropy, _, stats = anchor.forward(hidden, weight, targets, inverse, kept)
    g = _upstream(m, generator)
    up = (g if s.dlogp else None, 2.0 * g if s.dentropy else None)
    first = SAMPLE_ENTRIES // VOCAB_TILE * VOCAB_TILE - SAMPLE_BLOCK  # the vocabulary's last block
    entries, row = len(weight) - first, SAMPLE_ENTRIES - first  # a multiple of 8, which TMA needs
    dz = torch.full((m, row), float("nan"), dtype=s.dtype, device=hidden.device)[:, :entries]
    active = _active(targets, kept, stats, *up, len(weight), 0)
    ordered = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    hidden = token_rows.gather(hidden, active.order, ordered, m)
    return dz, hidden, weight[first:], targets, inverse, kept, stats, entropy, *up, active, first, len(weight)


# ---- the two gradients ----------------------------------------------------------------------------


class GradShape(NamedTuple):
    """Shape class of dhidden and dweight; `out` is the dtype of the result."""

    device: int
    c: int
    dtype: torch.dtype
    out: torch.dtype
    tma: bool
    fresh: bool
    row: int  # `Active.row` if the other operand is contiguous, because cuBLASLt's choice may depend on it; else 0
    aligned: bool = True  # the width is a multiple of 8; that of a vocabulary's last block may not be
    few: bool = False  # dhidden: so few tokens that chunks of the vocabulary are computed in parallel


def dhidden_shape(running: Tensor, dz: Tensor, weight: Tensor, fresh: bool, active: Active) -> GradShape:
    tma = weight.shape[1] % 8 == 0 and _tma_loadable(weight)
    row = active.row if weight.is_contiguous() else 0
    return GradShape(
        dz.get_device(), weight.shape[1], dz.dtype, torch.float32, tma, fresh, row,
        weight.shape[0] % 8 == 0, loop.parallel_chunks(*running.shape) > 1,
    )  # fmt: skip


def dweight_shape(grad: Tensor, dz: Tensor, hidden: Tensor, fresh: bool, active: Active) -> GradShape:
    tma = grad.shape[1] % 8 == 0 and grad.is_contiguous()
    return GradShape(
        dz.get_device(), hidden.shape[1], dz.dtype, grad.dtype, tma, fresh, active.row, grad.shape[0] % 8 == 0
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


def max_tokens(s: GradShape) -> int:
    """The most tokens of a dz block; it falls with the length of its rows."""
    return min(WGRAD_TOKENS, max(1, 2 * loop.PROBS_ENTRIES // s.row)) if s.row else WGRAD_TOKENS


def rows_of_grad(s: GradShape) -> list[int]:
    """Token counts up to the largest of a call, because the chain of `dweight` runs over the tokens."""
    most = max_tokens(s)
    return list(dict.fromkeys(min(m, most) for m in (*NARROW, HOPPER_MIN_TOKENS, 1000, WGRAD_TOKENS, 4096)))


def rows_of_dhidden(s: GradShape) -> list[int]:
    """With `few`: 1, and counts from 77 to the largest that is `few`, timed at the count that occurs with dz rows of
    that length. Otherwise counts from the smallest that is not `few`."""
    least, most, timed, fewest = CUBLASLT_MIN_TOKENS, max_tokens(s), 4096, 1
    columns = max(s.c, loop.FEWEST_CHANNELS)
    border = loop.FILLED // 2 // columns
    if s.few:
        most = min(most, border)
        timed = loop.FILLED // (columns * max(1, -(-s.row // SAMPLE_BLOCK)))
    elif loop.parallel_chunks(border, s.c) > 1:
        fewest = least = max(least, border + 1)
    last = min(max(timed, least), most)
    counts = (fewest, least, least + 52, max(least, 1000), WGRAD_TOKENS)
    return [*sorted({min(m, most) for m in counts} - {last}), last]


def widest(s: GradShape, tokens: int) -> int:
    """Width of the widest dz block with which `dweight` is compared at this token count."""
    held = max(tokens * s.dtype.itemsize, s.c * s.out.itemsize)  # bytes per entry
    most = max(8, SAMPLE_BYTES // max(held, 1) // 8 * 8)
    return min(s.row, most) if s.row else most


def compared(s: GradShape) -> list[tuple[int, int]]:
    """Token counts, ascending, and the widest block that `dweight` gets at up to that count, a multiple of 8."""
    odd = 8 * (not s.aligned)  # the widest sample is one entry short
    return [(m, widest(s, m) - odd) for m in sorted(rows_of_grad(s)) if not _is_narrow(s, m)]


def _is_narrow(s: GradShape, tokens: int) -> bool:
    return tokens in NARROW and tokens < max_tokens(s)


def _block_of_dz(
    s: GradShape, tokens: int, entries: int, kind: str, generator: torch.Generator
) -> tuple[Tensor, Active]:  # fmt: skip
    """A dz block with zero rows ordered as in the backward's loop, and its `Active` rows."""
    g = _upstream(tokens, generator, most=s.row > 0 and tokens != HOPPER_MIN_TOKENS)  # one sample lacks a third
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
    """Without `few`, one chunk of the vocabulary. With `few`, the largest number of parallel chunks at one row, at the
    next smallest count and at the timed one; at the other counts one chunk, as in a block's last call, or three. dz and
    the weight have at most SAMPLE_BYTES."""
    rows, chunks = rows_of_dhidden(s), loop.parallel_chunks(m, s.c) if s.few else 1
    fewest, second = ((sorted({*rows} - {1}) or [1]) * 2)[:2]
    if m not in (1, fewest, rows[-1]):
        chunks = 1 if m == second else min(3, chunks)
    most = min(s.row or chunks * SAMPLE_BLOCK, chunks * SAMPLE_BLOCK)
    entries = max(8, most - 56 * (m == fewest)) - (not s.aligned)
    dz, active = _block_of_dz(s, m, entries, kind, generator)
    weight = values(finite(kind), dz.shape[1], s.c, s.dtype, generator, second=True)
    running = torch.randn(m, s.c, dtype=torch.float32, device=dz.device, generator=generator)
    return running, dz, weight, s.fresh, active


def dweight_sample(s: GradShape, m: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    most = widest(s, m)
    entries = max(8, min(most, SAMPLE_BLOCK) - 56) if _is_narrow(s, m) else most
    entries -= not (s.aligned or m == CUBLASLT_MIN_TOKENS)
    dz, active = _block_of_dz(s, m, entries, kind, generator)
    hidden = values(finite(kind), m, s.c, s.dtype, generator, second=True)
    hidden.masked_fill_((active.order < 0)[:, None], 0.0)
    grad = torch.randn(dz.shape[1], s.c, dtype=torch.float32, device=dz.device, generator=generator).to(s.out)
    return grad, dz, hidden, s.fresh, active
