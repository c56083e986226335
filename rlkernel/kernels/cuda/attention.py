"""attention on CUDA: long prefill by Hopper's own kernels, where they equal the Triton kernel to the bit.

The anchor, and all that is not long prefill, are those of kernels/triton/attention.py; here are the schedules that may
take the anchor's place (cuda/attention_prefill.py, triton/attention_hopper.py) and their certification.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.contract import orders
from rlkernel.kernels.certification import Family, Run, Schedule
from rlkernel.kernels.cuda import attention_prefill, driver
from rlkernel.kernels.samples import KINDS, NONFINITE, SCALES, finite, values
from rlkernel.kernels.schedule import ScheduledOp
from rlkernel.kernels.triton import attention as anchor
from rlkernel.kernels.triton import attention_backward as backward  # by its own name it would be taken for the op
from rlkernel.kernels.triton.launch import KNOWN

if KNOWN:  # Gluon is no stable interface
    from rlkernel.kernels.triton import attention_hopper

SPANS = (2048, 8192, 16384)  # keys of the longest sequence, by which classes differ in speed; the last one is open
RAGGED = (1, 5, 129, 640)  # queries of the sequences compared first
TIMED, TIMED_ROWS = 8192, 1 << 17  # queries of what is compared and timed then, and (query, head) pairs, at most

# ---- shape classes -------------------------------------------------------------------------------


class Shape(NamedTuple):
    """Shape class of long prefill. A row's bits know neither the batch nor its own position's past."""

    device: int  # index, -1 for the CPU
    dtype: torch.dtype
    heads: int
    kv_heads: int
    d: int
    split: int
    several: bool  # splits
    room: bool  # pages that were laid in a row
    span: int  # of SPANS


def shape_of(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, lens: Tensor, max_q: int, max_k: int, scale: float, split: int,
    room: int, out: Tensor, lse: Tensor,
) -> Shape:  # fmt: skip
    span = next((n for n in SPANS if max_k <= n), SPANS[-1])
    return Shape(q.get_device(), q.dtype, q.shape[1], k.shape[1], q.shape[2], split, max_k > split, room > 0, span)


def paged_classes(
    device: int, dtype: torch.dtype, heads: int, kv_heads: int, d: int, tokens: int, longest: int
) -> list[Shape]:
    """Classes of the calls over pages that come here, with `tokens` queries and `longest` keys a sequence at most."""
    if tokens < anchor.GATHER_QUERIES or longest < anchor.GATHER_KEYS:
        return []
    return [
        Shape(device, dtype, heads, kv_heads, d, orders.ATTENTION_SPLIT, span > orders.ATTENTION_SPLIT, True, span)
        for below, span in pairwise((0, *SPANS))
        if below < longest and span >= anchor.GATHER_KEYS
    ]


def call_key(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, lens: Tensor, max_q: int, max_k: int, scale: float, split: int,
    room: int, out: Tensor, lse: Tensor,
) -> Hashable:  # fmt: skip
    _, heads, d = q.shape
    low, high, _ = SPANS
    return q.get_device(), q.dtype, heads, k.shape[1], d, split, max_k > split, room > 0, max_k > low, max_k > high


def rows_of(s: Shape) -> list[int]:
    least = _beside(s) + 1 if _beside(s) < _longest(s) else 0
    return [sum(RAGGED), max(least, min(TIMED, max(1024, TIMED_ROWS // s.heads)))]


def _longest(s: Shape) -> int:
    return s.span if s.several else min(s.span, s.split)


def _beside(s: Shape) -> int:
    """Queries from which on the kernel numbers its tiles in another way: samples lie on both sides."""
    return attention_prefill.beside_at_most(s.heads // s.kv_heads)


def lengths(s: Shape, rows: int) -> tuple[list[int], list[int]]:
    """Queries and keys of the sequences of a sample: ragged ones, or as long as the class has them."""
    most = _longest(s)
    if rows != sum(RAGGED):
        n = min(most, rows)
        return [n] * (rows // n), [most] * (rows // n)
    queries = [min(n, most, _beside(s)) for n in RAGGED]
    return queries, [min(most, n + past) for n, past in zip(queries, (70, 0, most, 641), strict=True)]


def sample(s: Shape, rows: int, kind: str, generator: torch.Generator) -> tuple[Any, ...]:
    device = generator.device
    queries, keys = lengths(s, rows)
    ragged = rows == sum(RAGGED)
    apart = ragged and not s.room  # rows lie apart, as those of one projection to queries, keys and values do
    room = anchor.room_for(max(keys)) if s.room else 0
    total = room * len(keys) if s.room else sum(keys)
    # Scores far beyond 2^24 are NaN: scale and maximum are fused. float16's ranges stay below that.
    dtype = s.dtype if kind == "denormal" else torch.float16

    def draw(n: int, heads: int, kind: str = kind, second: bool = False) -> Tensor:
        drawn = values(kind, n * heads, s.d, dtype, generator, second=second, narrow=True)
        drawn = drawn.to(s.dtype).view(n, heads, s.d)
        return torch.cat((drawn, drawn), 1)[:, heads:] if apart else drawn

    def int32(x: list[int]) -> Tensor:
        return torch.tensor(x, dtype=torch.int32, device=device)

    # Of keys that a row does not see a tile multiplies some values by zero: those are finite.
    q, k = draw(sum(queries), s.heads), draw(total + 64, s.kv_heads, finite(kind), True)
    v = draw(total + 64, s.kv_heads, finite(kind))
    if kind == NONFINITE:
        k[total // 2, ::2, 0] = torch.inf
    for x in (k, v):  # what lies behind a sequence may be anything
        x[total:] = torch.nan
        for i, n in enumerate(keys if s.room else ()):
            x[i * room + n : (i + 1) * room] = torch.nan
    lens = int32(keys if s.room else [0, *accumulate(keys)])
    out = torch.full(q.shape, torch.nan, dtype=s.dtype, device=device)
    lse = torch.full(q.shape[:2], torch.nan, dtype=torch.float32, device=device)
    cu_q = int32([0, *accumulate(queries)])
    max_q = max(queries)
    if ragged:  # a bound that no sequence reaches
        max_q = max(max_q, min(max_q + 130, _beside(s)))
    scale = SCALES[((*KINDS, NONFINITE).index(kind) + ragged) % len(SCALES)] * s.d**-0.5
    return q, k, v, cu_q, lens, max_q, max(keys), scale, s.split, room, out, lse


# ---- schedules -----------------------------------------------------------------------------------


def _on_hopper(s: Shape) -> bool:
    if not driver.on_hopper(s.device):
        return False
    return s.dtype.itemsize == 2 and not (s.several and s.split >= s.span)  # of which a sample has several splits


def _hopper(name: str, skip: bool) -> Schedule[Shape]:
    def supports(s: Shape) -> bool:
        return s.d in attention_prefill.HEAD_DIMS and _on_hopper(s)

    def bind(s: Shape) -> Run:
        return attention_prefill.launcher(s.device, s.dtype, s.d, s.room, skip)

    return Schedule(name, bind, supports)


def _gluon_supports(s: Shape) -> bool:
    return KNOWN and s.d == 128 and s.several and _on_hopper(s)


def _gluon_bind(s: Shape) -> Run:
    def prefill(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, lens: Tensor, max_q: int, max_k: int, scale: float, split: int,
        room: int, out: Tensor, lse: Tensor,
    ) -> None:  # fmt: skip
        boxes = backward.descriptors(k, v, attention_hopper.KEYS.value)
        attention_hopper.prefill(q, boxes, k.shape[1], cu_q, lens, max_q, scale, split, room, out, lse)

    return prefill


prefill = ScheduledOp(
    Family(
        op="attention_prefill", anchor=anchor.prefill, shape=shape_of, rows=rows_of, sample=sample, call_key=call_key,
        versions=lambda: {"cuda compiler": driver.compiler()}, mutates=(10, 11), kinds=(*KINDS, NONFINITE),
        schedules=(
            _hopper("hopper", False), _hopper("hopper.skip", True), Schedule("gluon", _gluon_bind, _gluon_supports),
        ),
    )
)  # fmt: skip

# ---- the ops -------------------------------------------------------------------------------------

attention = functools.partial(anchor.attention, long=prefill.call)
paged_attention = functools.partial(anchor.paged_attention, long=prefill.call)
