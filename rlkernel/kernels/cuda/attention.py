"""attention on CUDA: schedules of long prefill on Hopper (attention_prefill_sm90.py).

Calls run kernels/triton/attention.py, which calls the scheduled op `prefill` for long prefill.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.contract import orders
from rlkernel.kernels.certification import OpSpec, Run, Schedule
from rlkernel.kernels.cuda import attention_prefill_sm90, driver
from rlkernel.kernels.samples import KINDS, NONFINITE, SCALES, finite, values
from rlkernel.kernels.scheduled_op import ScheduledOp
from rlkernel.kernels.triton import attention as anchor

SPANS = (2048, 8192, 16384)  # buckets of the longest sequence's keys, because speed depends on it; the last is open
RAGGED = (1, 5, 129, 640)  # queries per sequence of the first sample
TIMED, TIMED_ROWS = 8192, 1 << 17  # most queries, and most (query, head) pairs, of the timed sample

# ---- shape classes -------------------------------------------------------------------------------


class AttentionShape(NamedTuple):
    """Shape class of long prefill. A row's bits do not depend on the other rows of the batch."""

    device: int  # index, -1 for the CPU
    dtype: torch.dtype
    heads: int
    kv_heads: int
    d: int
    split: int
    several: bool  # more than one split
    padded: bool  # keys and values hold a capacity per sequence: pages were gathered contiguously
    span: int  # of SPANS


def shape_of(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, lens: Tensor, max_q: int, max_k: int, scale: float, split: int,
    capacity: int, out: Tensor, lse: Tensor,
) -> AttentionShape:  # fmt: skip
    span = next((n for n in SPANS if max_k <= n), SPANS[-1])
    return AttentionShape(
        q.get_device(), q.dtype, q.shape[1], k.shape[1], q.shape[2], split, max_k > split, capacity > 0, span
    )


def paged_classes(
    device: int, dtype: torch.dtype, heads: int, kv_heads: int, d: int, tokens: int, longest: int
) -> list[AttentionShape]:
    """Classes of the paged calls that use this op, for at most `tokens` queries and `longest` keys per sequence."""
    if tokens < anchor.GATHER_QUERIES or longest < anchor.GATHER_KEYS:
        return []
    return [
        AttentionShape(
            device, dtype, heads, kv_heads, d, orders.ATTENTION_SPLIT, span > orders.ATTENTION_SPLIT, True, span
        )
        for below, span in pairwise((0, *SPANS))
        if below < longest and span >= anchor.GATHER_KEYS
    ]


def call_key(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, lens: Tensor, max_q: int, max_k: int, scale: float, split: int,
    capacity: int, out: Tensor, lse: Tensor,
) -> Hashable:  # fmt: skip
    _, heads, d = q.shape
    low, high, _ = SPANS
    return q.get_device(), q.dtype, heads, k.shape[1], d, split, max_k > split, capacity > 0, max_k > low, max_k > high


def rows_of(s: AttentionShape) -> list[int]:
    least = _most_interleaved(s) + 1 if _most_interleaved(s) < _longest(s) else 0
    return [sum(RAGGED), max(least, min(TIMED, max(1024, TIMED_ROWS // s.heads)))]


def _longest(s: AttentionShape) -> int:
    return s.span if s.several else min(s.span, s.split)


def _most_interleaved(s: AttentionShape) -> int:
    """Above this many queries the kernel orders its tiles differently, so samples have fewer and more."""
    return attention_prefill_sm90.most_interleaved(s.heads // s.kv_heads)


def lengths(s: AttentionShape, rows: int) -> tuple[list[int], list[int]]:
    """Queries and keys of a sample's sequences: ragged, or of the class's largest length."""
    most = _longest(s)
    if rows != sum(RAGGED):
        n = min(most, rows)
        return [n] * (rows // n), [most] * (rows // n)
    queries = [min(n, most, _most_interleaved(s)) for n in RAGGED]
    return queries, [min(most, n + past) for n, past in zip(queries, (70, 0, most, 641), strict=True)]


def sample(s: AttentionShape, rows: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    device = generator.device
    queries, keys = lengths(s, rows)
    ragged = rows == sum(RAGGED)
    strided = ragged and not s.padded  # strided rows, as in a fused QKV projection
    capacity = anchor.capacity_for(max(keys)) if s.padded else 0
    total = capacity * len(keys) if s.padded else sum(keys)
    # Scores far beyond 2^24 give NaN, because scale and maximum are fused; the ranges of float16 stay below.
    dtype = s.dtype if kind == "denormal" else torch.float16

    def draw(n: int, heads: int, kind: str = kind, second: bool = False) -> Tensor:
        drawn = values(kind, n * heads, s.d, dtype, generator, second=second, narrow=True)
        drawn = drawn.to(s.dtype).view(n, heads, s.d)
        return torch.cat((drawn, drawn), 1)[:, heads:] if strided else drawn

    def int32(x: list[int]) -> Tensor:
        return torch.tensor(x, dtype=torch.int32, device=device)

    # Values of masked keys stay finite, because a tile multiplies some of them by zero.
    q, k = draw(sum(queries), s.heads), draw(total + 64, s.kv_heads, finite(kind), True)
    v = draw(total + 64, s.kv_heads, finite(kind))
    if kind == NONFINITE:
        k[total // 2, ::2, 0] = torch.inf
    for x in (k, v):  # memory past a sequence's end is arbitrary
        x[total:] = torch.nan
        for i, n in enumerate(keys if s.padded else ()):
            x[i * capacity + n : (i + 1) * capacity] = torch.nan
    lens = int32(keys if s.padded else [0, *accumulate(keys)])
    out = torch.full(q.shape, torch.nan, dtype=s.dtype, device=device)
    lse = torch.full(q.shape[:2], torch.nan, dtype=torch.float32, device=device)
    cu_q = int32([0, *accumulate(queries)])
    max_q = max(queries)
    if ragged:  # max_seqlen_q is only a bound
        max_q = max(max_q, min(max_q + 130, _most_interleaved(s)))
    scale = SCALES[((*KINDS, NONFINITE).index(kind) + ragged) % len(SCALES)] * s.d**-0.5
    return q, k, v, cu_q, lens, max_q, max(keys), scale, s.split, capacity, out, lse


# ---- schedules -----------------------------------------------------------------------------------


def _on_hopper(s: AttentionShape) -> bool:
    if not driver.on_hopper(s.device):
        return False
    return s.dtype.itemsize == 2 and not (s.several and s.split >= s.span)  # a sample would have one split only


def _hopper(name: str, skip: bool) -> Schedule[AttentionShape]:
    def supports(s: AttentionShape) -> bool:
        return s.d in attention_prefill_sm90.HEAD_DIMS and _on_hopper(s)

    def bind(s: AttentionShape) -> Run:
        return attention_prefill_sm90.launcher(s.device, s.dtype, s.d, s.padded, skip)

    return Schedule(name, bind, supports)


prefill = ScheduledOp(
    OpSpec(
        name="attention_prefill", anchor=anchor.prefill, shape=shape_of, rows=rows_of, sample=sample, call_key=call_key,
        versions=driver.versions, mutates=(10, 11), kinds=(*KINDS, NONFINITE),
        schedules=(_hopper("hopper", False), _hopper("hopper.skip", True)),
    )
)  # fmt: skip

# ---- the ops -------------------------------------------------------------------------------------

attention = functools.partial(anchor.attention, long=prefill)
paged_attention = functools.partial(anchor.paged_attention, long=prefill)
