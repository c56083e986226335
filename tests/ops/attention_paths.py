"""The ways to compute a token's attention, for tests on any device: packed, chunked, paged, alone, and by definition.

`check_paths` and `check_gradients` compare them by their bytes.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_bitwise


def rand(seed: int, *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Standard normal numbers, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


class Sequence(NamedTuple):
    q: Tensor  # [n, H, D]
    k: Tensor  # [n, HK, D]
    v: Tensor  # [n, HK, D]


def cu(lens: list[int], device: str | torch.device = "cpu") -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=device)


def sequences(
    lens: list[int], group: int, hk: int, d: int, dtype: torch.dtype, seed: int = 0, device: str = "cpu"
) -> list[Sequence]:
    """One Sequence per length; its values depend on the seed, its index and its length alone."""
    heads = (group * hk, hk, hk)
    return [
        Sequence(*(rand(seed + 10 * i + j, n, h, d, dtype=dtype, device=device) for j, h in enumerate(heads)))
        for i, n in enumerate(lens)
    ]


def packed(batch: list[Sequence], **options: Any) -> list[tuple[Tensor, Tensor]]:
    """(out, lse) of each sequence from one call over all of them."""
    lens = [s.q.shape[0] for s in batch]
    q, k, v = (torch.cat(parts) for parts in zip(*batch, strict=True))
    out, lse = ops.attention(q, k, v, cu(lens, q.device), max_seqlen_q=max(lens), **options)
    return list(zip(out.split(lens), lse.split(lens), strict=True))


def chunked(batch: list[Sequence], cuts: list[list[int]], **options: Any) -> list[tuple[Tensor, Tensor]]:
    """(out, lse) of each sequence, computed in steps over dense keys: step i ends at token cuts[b][i]."""
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in batch]
    for ends in itertools.zip_longest(*cuts):
        live = [(b, e) for b, e in enumerate(ends) if e is not None]
        starts = [sum(o.shape[0] for o, _ in parts[b]) for b, _ in live]
        lens, keys = [e - s for (_, e), s in zip(live, starts, strict=True)], [e for _, e in live]
        q = torch.cat([batch[b].q[s:e] for (b, e), s in zip(live, starts, strict=True)])
        k, v = (torch.cat([batch[b][i][:e] for b, e in live]) for i in (1, 2))
        limits = {"max_seqlen_q": max(lens), "max_seqlen_k": max(keys)}
        out, lse = ops.attention(q, k, v, cu(lens, q.device), cu(keys, q.device), **limits, **options)
        for (b, _), o, top in zip(live, out.split(lens), lse.split(lens), strict=True):
            parts[b].append((o, top))
    return [(torch.cat([o for o, _ in p]), torch.cat([top for _, top in p])) for p in parts]


def paged(batch: list[Sequence], cuts: list[list[int]], page: int, **options: Any) -> list[tuple[Tensor, Tensor]]:
    """As `chunked`, from pages in random order; unwritten slots hold NaN, unused table entries -1."""
    device = batch[0].q.device
    needed = [-(-s.q.shape[0] // page) for s in batch]
    shuffled = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(page))
    table = torch.full((len(batch), max(needed) + 1), -1, dtype=torch.int32)
    for b, first in enumerate([0, *itertools.accumulate(needed)][:-1]):
        table[b, : needed[b]] = shuffled[first : first + needed[b]].int()
    shape = (sum(needed) + 3, page, *batch[0].k.shape[1:])
    k_cache, v_cache = (torch.full(shape, torch.nan, dtype=batch[0].k.dtype, device=device) for _ in range(2))
    done = [0] * len(batch)
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in batch]
    for ends in itertools.zip_longest(*cuts):
        live = [b for b, e in enumerate(ends) if e is not None]
        spans = [(b, done[b], ends[b]) for b in live]
        q, k, v = (torch.cat([batch[b][i][s:e] for b, s, e in spans]) for i in range(3))
        tokens = [(b, torch.arange(s, e)) for b, s, e in spans]
        slots = torch.cat([table[b, j // page] * page + j % page for b, j in tokens])
        ops.store_kv_(k_cache, v_cache, k, v, slots.long().to(device))
        lens, ends_now = [e - s for _, s, e in spans], [e for *_, e in spans]
        keys = torch.tensor(ends_now, dtype=torch.int32, device=device)
        limits = {"max_seqlen_q": max(lens), "max_seqlen_k": max(ends_now)}
        out, lse = ops.paged_attention(
            q, k_cache, v_cache, table[live].to(device), cu(lens, device), keys, **limits, **options
        )
        for (b, _, e), o, top in zip(spans, out.split(lens), lse.split(lens), strict=True):
            parts[b].append((o, top))
            done[b] = e
    return [(torch.cat([o for o, _ in p]), torch.cat([top for _, top in p])) for p in parts]


def same(found: list[tuple[Tensor, Tensor]], expected: list[tuple[Tensor, Tensor]], what: str) -> int:
    """Out and lse of all sequences have the same bytes; returns the number of tokens compared."""
    for b, (x, y) in enumerate(zip(found, expected, strict=True)):
        assert_bitwise(x[0], y[0], f"{what}: out of sequence {b}")
        assert_bitwise(x[1], y[1], f"{what}: lse of sequence {b}")
    return sum(y[0].shape[0] for y in expected)


def cuts_of(lens: list[int], chunk: int) -> list[list[int]]:
    return [[*range(chunk, n, chunk), n] for n in lens]


def check_paths(batch: list[Sequence], cuts: list[list[int]], page: int, **options: Any) -> list[int]:
    """Alone, packed, chunked prefill and pages agree to the bit; returns the tokens of each comparison."""
    alone = [packed([s], **options)[0] for s in batch]
    return [
        same(packed(batch, **options), alone, "packed"),
        same(packed(batch[::-1], **options)[::-1], alone, "packed the other way round"),
        same(chunked(batch, cuts, **options), alone, "chunked"),
        same(paged(batch, cuts, page, **options), alone, "paged"),
    ]


def gradients(batch: list[Sequence], douts: list[Tensor], **options: Any) -> list[list[Tensor]]:
    """dq, dk, dv of each sequence from one call over all of them."""
    lens = [s.q.shape[0] for s in batch]
    q, k, v = (torch.cat(parts).requires_grad_() for parts in zip(*batch, strict=True))
    out, _ = ops.attention(q, k, v, cu(lens, q.device), max_seqlen_q=max(lens), **options)
    grads = torch.autograd.grad(out, (q, k, v), torch.cat(douts))
    return [list(parts) for parts in zip(*(g.split(lens) for g in grads), strict=True)]


def check_gradients(batch: list[Sequence], order: list[int], **options: Any) -> None:
    douts = [rand(900 + i, *s.q.shape, dtype=s.q.dtype, device=str(s.q.device)) for i, s in enumerate(batch)]
    alone = [gradients([s], [g], **options)[0] for s, g in zip(batch, douts, strict=True)]
    together = gradients([batch[i] for i in order], [douts[i] for i in order], **options)
    for i, found in zip(order, together, strict=True):
        for name, a, b in zip(("dq", "dk", "dv"), found, alone[i], strict=True):
            assert_bitwise(a, b, f"{name} of sequence {i} among {len(batch)}")


def truth(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """The definition in the dtype of q (fp64 in the tests), differentiable."""
    outs, tops = [], []
    for b in range(len(cu_q) - 1):
        rows, keys = q[cu_q[b] : cu_q[b + 1]], slice(int(cu_k[b]), int(cu_k[b + 1]))
        group = q.shape[1] // k.shape[1]
        kb, vb = k[keys].repeat_interleave(group, 1), v[keys].repeat_interleave(group, 1)
        s = torch.einsum("qhd,khd->hqk", rows, kb) * q.shape[2] ** -0.5
        at = torch.arange(kb.shape[0] - rows.shape[0], kb.shape[0], device=q.device)[:, None]
        j = torch.arange(kb.shape[0], device=q.device)
        hidden = (j > at) | (j <= at - (window or kb.shape[0]))
        s = s.masked_fill(hidden, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", s.softmax(-1), vb))
        tops.append(s.logsumexp(-1).t())
    return torch.cat(outs), torch.cat(tops)
