"""all_reduce on GPUs: the upper levels of the tree of `linear`, over ranks, then bias and one rounding.

Contract: orders.py, `linear`. `add_ranks` adds partial results that a collective brought; in `all_reduce` each GPU
writes its own into the others' memory, in one step or in two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.kernels.symmetric_memory import CAPACITY, CONTROL_BYTES, PROGRAMS, Workspace
from rlkernel.kernels.triton.common import after_previous, cdiv, on_device, options, pdl

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
def add_bias(total, bias, at, inside, first, N, HAS_BIAS: tl.constexpr):
    """total + bias, where element `at` of the total is element first + at of a result [..., N]."""
    if HAS_BIAS:
        total += tl.load(bias + (first + at) % N, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def finish(total, bias, out, at, inside, first, N, HAS_BIAS: tl.constexpr):
    """Stores round(total + bias); element `at` of out is element first + at of a result [..., N]."""
    total = add_bias(total, bias, at, inside, first, N, HAS_BIAS)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def load_fresh(pointers, inside):
    """A load past the L1 cache, which may hold what the buffer held at an earlier call."""
    return tl.load(pointers, mask=inside, other=0.0, cache_modifier=".cg")


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
def words_of(addresses, rank, start, dtype: tl.constexpr):
    """Numbers of a rank's symmetric buffer from byte `start` on, a multiple of 16."""
    return tl.multiple_of((tl.load(addresses + rank) + start).to(tl.pointer_type(dtype)), 16)


@triton.jit
def begin_call(addresses, rank, DATA: tl.constexpr, HALF: tl.constexpr):
    """Number of this call, and first byte of its half of the data; calls use the two halves in turn.

    Call c + 2 uses the half of call c again. By then every other rank has signalled in call c + 1, which it does only
    after its kernel of call c has ended.
    """
    call = tl.load(words_of(addresses, rank, 0, tl.int64) + tl.program_id(0)) + 1
    return call, DATA + (call & 1) * HALF


@triton.jit
def end_call(addresses, rank, call, PROGRAMS: tl.constexpr):
    """Counts the call in this program's counter, and in those of programs that this launch does not have."""
    program = tl.arange(0, PROGRAMS)
    mine = program % tl.num_programs(0) == tl.program_id(0)
    tl.store(words_of(addresses, rank, 0, tl.int64) + program, call, mask=mine)


@triton.jit
def barrier(addresses, rank, call, PHASE: tl.constexpr, RANKS: tl.constexpr, PROGRAMS: tl.constexpr):
    """Waits until this program of every rank is here, and sees what they wrote before.

    A rank writes the number of the call into its flag in every buffer and waits for the flags in its own.
    """
    tl.debug_barrier()
    every = tl.arange(0, RANKS)
    place = (1 + PHASE * RANKS) * PROGRAMS + tl.program_id(0) * RANKS
    theirs = tl.load(addresses + every).to(tl.pointer_type(tl.int64)) + place + rank
    tl.atomic_xchg(theirs, call, sem="release", scope="sys")
    own = words_of(addresses, rank, 0, tl.int64) + place + every
    seen = tl.min(tl.atomic_add(own, 0, sem="acquire", scope="sys"))
    while seen < call:
        seen = tl.min(tl.atomic_add(own, 0, sem="acquire", scope="sys"))
    tl.debug_barrier()


@triton.jit
def one_shot_kernel(
    partial, bias, out, addresses, rank, SIZE, N, first, RANKS: tl.constexpr, HAS_BIAS: tl.constexpr,
    PROGRAMS: tl.constexpr, DATA: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [SIZE] from partial [SIZE] of all ranks, which each rank writes into all buffers.

    A program writes and reads the same elements, so it waits only for the same program of the other ranks.
    """
    after_previous(PDL)
    call, data = begin_call(addresses, rank, DATA, HALF)
    begin, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    for start in range(begin, SIZE, step):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(partial + at, mask=at < SIZE, other=0.0)
        for r in tl.static_range(RANKS):
            theirs = words_of(addresses, (rank + 1 + r) % RANKS, data, tl.float32) + rank * SIZE
            tl.store(theirs + at, value, mask=at < SIZE)
    barrier(addresses, rank, call, 0, RANKS, PROGRAMS)
    own = words_of(addresses, rank, data, tl.float32)
    for start in range(begin, SIZE, step):
        at = start + tl.arange(0, BLOCK)
        loaded = ()
        for r in tl.static_range(RANKS):
            loaded = loaded + (load_fresh(own + r * SIZE + at, at < SIZE),)  # type: ignore[assignment]
        finish(tree(loaded, RANKS), bias, out, at, at < SIZE, first, N, HAS_BIAS)
    end_call(addresses, rank, call, PROGRAMS)


@triton.jit
def two_shot_kernel(
    partial, bias, out, addresses, rank, SIZE, PART, N, first, RANKS: tl.constexpr, HAS_BIAS: tl.constexpr,
    PROGRAMS: tl.constexpr, DATA: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [SIZE] from partial [SIZE] of all ranks, in parts of PART: rank r adds part r and writes the rounded sum
    into all buffers, behind the data. A program works on the same elements of each part.
    """
    after_previous(PDL)
    call, data = begin_call(addresses, rank, DATA, HALF)
    results = data + HALF // 2
    begin, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    for start in range(begin, PART, step):
        at = start + tl.arange(0, BLOCK)
        for r in tl.static_range(RANKS):
            to = (rank + 1 + r) % RANKS
            inside = (at < PART) & (to * PART + at < SIZE)
            value = tl.load(partial + to * PART + at, mask=inside, other=0.0)
            tl.store(words_of(addresses, to, data, tl.float32) + rank * PART + at, value, mask=inside)
    barrier(addresses, rank, call, 0, RANKS, PROGRAMS)
    own = words_of(addresses, rank, data, tl.float32)
    for start in range(begin, PART, step):
        at = start + tl.arange(0, BLOCK)
        inside = (at < PART) & (rank * PART + at < SIZE)
        loaded = ()
        for r in tl.static_range(RANKS):
            loaded = loaded + (load_fresh(own + r * PART + at, inside),)  # type: ignore[assignment]
        total = add_bias(tree(loaded, RANKS), bias, rank * PART + at, inside, first, N, HAS_BIAS)
        for r in tl.static_range(RANKS):
            theirs = words_of(addresses, (rank + 1 + r) % RANKS, results, out.dtype.element_ty)
            tl.store(theirs + rank * PART + at, total.to(out.dtype.element_ty), mask=inside)
    barrier(addresses, rank, call, 1, RANKS, PROGRAMS)
    own = words_of(addresses, rank, results, out.dtype.element_ty)
    for start in range(begin, PART, step):
        at = start + tl.arange(0, BLOCK)
        for r in tl.static_range(RANKS):
            inside = (at < PART) & (r * PART + at < SIZE)
            tl.store(out + r * PART + at, load_fresh(own + r * PART + at, inside), mask=inside)
    end_call(addresses, rank, call, PROGRAMS)


# ---- launchers -----------------------------------------------------------------------------------

BLOCK = 1024
"""Elements of a program of 8 warps."""
ONE_SHOT_BYTES = 2 << 20
"""Most bytes that a rank sends to the others in one step; for more, two steps send less."""


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
    """Rounded sum [L] of all ranks' partial [L] fp32, elements of results [..., n], in pieces of CAPACITY bytes."""
    out, most = torch.empty_like(partial, dtype=dtype), CAPACITY // partial.itemsize
    for first in range(0, partial.numel(), most):
        _all_reduce_piece(partial[first : first + most], bias, out[first : first + most], n, first % n, workspace)
    return out


def _all_reduce_piece(
    partial: Tensor, bias: Tensor | None, out: Tensor, n: int, first: int, workspace: Workspace
) -> None:
    size, ranks = partial.numel(), workspace.addresses.numel()
    meta = {
        "RANKS": ranks, "HAS_BIAS": bias is not None, "PROGRAMS": PROGRAMS, "DATA": CONTROL_BYTES,
        "HALF": 2 * CAPACITY, **pdl(partial), **options(),
    }  # fmt: skip
    where = (workspace.addresses, workspace.rank)
    with on_device(partial):
        if (ranks - 1) * partial.nbytes <= ONE_SHOT_BYTES:
            grid = (min(PROGRAMS, cdiv(size, BLOCK)),)
            one_shot_kernel[grid](partial, bias, out, *where, size, n, first, BLOCK=BLOCK, num_warps=8, **meta)
        else:
            part = 16 * cdiv(size, 16 * ranks)  # a multiple of 16, so that accesses to each part are vectorised
            grid = (min(PROGRAMS, cdiv(part, 2 * BLOCK)),)
            two_shot_kernel[grid](
                partial, bias, out, *where, size, part, n, first, BLOCK=2 * BLOCK, num_warps=16, **meta
            )
