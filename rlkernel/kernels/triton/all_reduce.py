"""all_reduce on GPUs: the upper levels of the tree of `linear`, over ranks, then bias and one rounding.

Contract: orders.py, `linear`. `add_ranks` adds partial results that a collective brought; `all_reduce` reads them in
the other GPUs' memory, in one step or in two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.kernels.symmetric_memory import CAPACITY, FLAG_BYTES, PROGRAMS, Workspace
from rlkernel.kernels.triton.common import cdiv, on_device, options

# ---- kernels -------------------------------------------------------------------------------------


@triton.jit
def tree(parts, COUNT: tl.constexpr):
    """Sum of a tuple of 1, 2, 4 or 8 tensors, neighbours first."""
    for level in tl.static_range(3):
        if COUNT >> level > 1:
            sums = ()
            for i in tl.static_range(COUNT >> (level + 1)):
                sums = sums + (parts[2 * i] + parts[2 * i + 1],)  # type: ignore[assignment]
            parts = sums
    return parts[0]


@triton.jit
def finish(total, bias, out, at, inside, first, N, HAS_BIAS: tl.constexpr):
    """Stores round(total + bias); element `at` of out is element first + at of a result [..., N]."""
    if HAS_BIAS:
        total += tl.load(bias + (first + at) % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_ranks_kernel(
    parts, bias, out, SIZE, N, first, RANKS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """parts [RANKS, SIZE] fp32 -> out [SIZE]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    loaded = ()
    for r in tl.static_range(RANKS):
        loaded = loaded + (tl.load(parts + tl.cast(r, tl.int64) * SIZE + at, mask=inside, other=0.0),)  # type: ignore[assignment]
    finish(tree(loaded, RANKS), bias, out, at, inside, first, N, HAS_BIAS)


@triton.jit
def flags_of(addresses, rank):
    """Flags at the start of a rank's symmetric buffer."""
    return tl.load(addresses + rank).to(tl.pointer_type(tl.int32))


@triton.jit
def words_of(addresses, rank, START: tl.constexpr, dtype: tl.constexpr):
    """Numbers of a rank's symmetric buffer from byte START on, a multiple of 16."""
    return tl.multiple_of((tl.load(addresses + rank) + START).to(tl.pointer_type(dtype)), 16)


@triton.jit
def load_fresh(pointers, inside):
    """A load past the L1 cache, which may hold what a rank's buffer held at an earlier call."""
    return tl.load(pointers, mask=inside, other=0.0, volatile=True)


@triton.jit
def barrier(addresses, rank, PHASE: tl.constexpr, RANKS: tl.constexpr, PROGRAMS: tl.constexpr):
    """Waits until this program of every rank is here, and sees what they wrote before.

    A rank sets a flag in every other's buffer and clears the flags in its own, so all are 0 again afterwards.
    """
    tl.debug_barrier()
    place = (PHASE * PROGRAMS + tl.program_id(0)) * RANKS
    for r in tl.static_range(RANKS):
        theirs = flags_of(addresses, r) + place + rank
        before = tl.atomic_cas(theirs, 0, 1, sem="release", scope="sys")
        while before != 0:
            before = tl.atomic_cas(theirs, 0, 1, sem="release", scope="sys")
    for r in tl.static_range(RANKS):
        ours = flags_of(addresses, rank) + place + r
        before = tl.atomic_cas(ours, 1, 0, sem="acquire", scope="sys")
        while before != 1:
            before = tl.atomic_cas(ours, 1, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


@triton.jit
def one_shot_kernel(
    partial, bias, out, addresses, rank, SIZE, N, RANKS: tl.constexpr, HAS_BIAS: tl.constexpr, PROGRAMS: tl.constexpr,
    DATA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [SIZE] from partial [SIZE] of all ranks; DATA: first byte of a buffer's data.

    A program copies its elements into its rank's buffer and reads the same elements of all ranks' buffers, so it waits
    only for the same program of the other ranks. The last barrier keeps the buffers until all have read them.
    """
    first, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    own = words_of(addresses, rank, DATA, tl.float32)
    for start in range(first, SIZE, step):
        at = start + tl.arange(0, BLOCK)
        tl.store(own + at, tl.load(partial + at, mask=at < SIZE, other=0.0), mask=at < SIZE)
    barrier(addresses, rank, 0, RANKS, PROGRAMS)
    for start in range(first, SIZE, step):
        at = start + tl.arange(0, BLOCK)
        loaded = ()
        for r in tl.static_range(RANKS):
            loaded = loaded + (load_fresh(words_of(addresses, r, DATA, tl.float32) + at, at < SIZE),)  # type: ignore[assignment]
        finish(tree(loaded, RANKS), bias, out, at, at < SIZE, 0, N, HAS_BIAS)
    barrier(addresses, rank, 1, RANKS, PROGRAMS)


@triton.jit
def two_shot_kernel(
    partial, bias, out, addresses, rank, PART, N, RANKS: tl.constexpr, HAS_BIAS: tl.constexpr, PROGRAMS: tl.constexpr,
    DATA: tl.constexpr, RESULTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [RANKS, PART] from partial [RANKS, PART] of all ranks; rank r adds part r, and all read the rounded parts.

    A program works on the same elements of each part. A rank's next kernel starts after all of its programs have passed
    the second barrier, when the others have read its data, and writes results after that kernel's first barrier, when
    they have read its results.
    """
    first, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    own = words_of(addresses, rank, DATA, tl.float32)
    for start in range(first, PART, step):
        at = start + tl.arange(0, BLOCK)
        for r in tl.static_range(RANKS):
            part = tl.load(partial + r * PART + at, mask=at < PART, other=0.0)
            tl.store(own + r * PART + at, part, mask=at < PART)
    barrier(addresses, rank, 0, RANKS, PROGRAMS)
    results = words_of(addresses, rank, RESULTS, out.dtype.element_ty)
    for start in range(first, PART, step):
        at = start + tl.arange(0, BLOCK)
        loaded = ()
        for r in tl.static_range(RANKS):
            data = words_of(addresses, r, DATA, tl.float32) + rank * PART
            loaded = loaded + (load_fresh(data + at, at < PART),)  # type: ignore[assignment]
        finish(tree(loaded, RANKS), bias, results, at, at < PART, rank * PART, N, HAS_BIAS)
    barrier(addresses, rank, 1, RANKS, PROGRAMS)
    for start in range(first, PART, step):
        at = start + tl.arange(0, BLOCK)
        for r in tl.static_range(RANKS):
            part = load_fresh(words_of(addresses, r, RESULTS, out.dtype.element_ty) + at, at < PART)
            tl.store(out + r * PART + at, part, mask=at < PART)


# ---- launchers -----------------------------------------------------------------------------------

BLOCK = 1024
ONE_SHOT_BYTES = 1 << 20
"""Most bytes that a rank reads from the others in one step; for more, two steps read less."""


def add_ranks(parts: Tensor, bias: Tensor | None, dtype: torch.dtype, n: int, first: int) -> Tensor:
    """Rounded sum [L] of parts [R, L] fp32, which are elements `first` and on of partial results [..., n]."""
    ranks, size = parts.shape
    out = torch.empty(size, dtype=dtype, device=parts.device)
    if size == 0:
        return out
    with on_device(parts):
        add_ranks_kernel[(cdiv(size, BLOCK),)](
            parts, bias, out, size, n, first, RANKS=ranks, HAS_BIAS=bias is not None, BLOCK=BLOCK, num_warps=8,
            **options(),
        )  # fmt: skip
    return out


def all_reduce(partial: Tensor, bias: Tensor | None, dtype: torch.dtype, n: int, workspace: Workspace) -> Tensor:
    """Rounded sum [L] of all ranks' partial [L] fp32, elements of results [..., n]; at most CAPACITY bytes."""
    out = torch.empty_like(partial, dtype=dtype)
    size, ranks = partial.numel(), workspace.addresses.numel()
    meta = {
        "RANKS": ranks, "HAS_BIAS": bias is not None, "PROGRAMS": PROGRAMS, "DATA": FLAG_BYTES, "BLOCK": BLOCK,
        "num_warps": 8, **options(),
    }  # fmt: skip
    where = (workspace.addresses, workspace.rank)
    with on_device(partial):
        if (ranks - 1) * partial.nbytes <= ONE_SHOT_BYTES or size % ranks:
            grid = (min(PROGRAMS, cdiv(size, BLOCK)),)
            one_shot_kernel[grid](partial, bias, out, *where, size, n, **meta)
        else:
            part = size // ranks
            grid = (min(PROGRAMS, cdiv(part, BLOCK)),)
            two_shot_kernel[grid](partial, bias, out, *where, part, n, RESULTS=FLAG_BYTES + CAPACITY, **meta)
    return out
