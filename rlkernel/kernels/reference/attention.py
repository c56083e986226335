"""Reference of attention: blocks of 64 keys from the sequence's first key, online softmax in base 2, merged splits.

Rows are packed (position, head of the group) pairs, as in the kernels. A key that is hidden from a row (causal mask or
window) is not part of its chains, so hidden blocks change no bit. `lse2` is the log-sum-exp in base 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from rlkernel.contract.orders import ATTENTION_BLOCK
from rlkernel.kernels.reference.arith import LN2, LOG2E, exp2, fma, log2, row_dot, row_sum
from rlkernel.kernels.reference.linear import chain


def check_sequences(op: str, cu_seqlens_q: Tensor, lens_k: Tensor, tokens_q: int, max_q: int, max_k: int) -> None:
    """Raises ValueError unless the sequences fill the packed queries and none has more queries than keys.

    For CPU tensors only, because it would synchronise on a GPU.
    """
    cu = cu_seqlens_q.tolist()
    lens_q = [b - a for a, b in itertools.pairwise(cu)]
    if cu[0] != 0 or cu[-1] != tokens_q or min(lens_q, default=0) < 0:
        raise ValueError(f"{op}: cu_seqlens_q must rise from 0 to T={tokens_q}; it is {_short(cu)}")
    keys = lens_k.tolist()
    if any(n > s for n, s in zip(lens_q, keys, strict=True)):
        raise ValueError(f"{op}: a sequence has more queries than keys; queries are the last tokens of their keys")
    if max(lens_q, default=0) > max_q or max(keys, default=0) > max_k:
        raise ValueError(
            f"{op}: the longest sequence has {max(lens_q)} queries and {max(keys)} keys, more than "
            f"max_seqlen_q={max_q} or max_seqlen_k={max_k}; raise them"
        )


def check_keys(op: str, cu_seqlens_k: Tensor, tokens_k: int) -> Tensor:
    """Numbers of keys [B]; raises ValueError unless cu_seqlens_k rises from 0 to tokens_k."""
    lens = cu_seqlens_k.diff()
    if int(cu_seqlens_k[0]) != 0 or int(cu_seqlens_k[-1]) != tokens_k or bool((lens < 0).any()):
        raise ValueError(f"{op}: cu_seqlens_k must rise from 0 to S={tokens_k}; it is {_short(cu_seqlens_k.tolist())}")
    return lens


def check_pages(op: str, block_table: Tensor, seq_lens_k: Tensor, pages: int, page_size: int) -> None:
    """Raises ValueError unless each sequence's row of block_table [B, columns] names enough pages, all in the cache."""
    used = (seq_lens_k + page_size - 1).div(page_size, rounding_mode="floor")
    if used.numel() and int(used.max()) > block_table.shape[1]:
        raise ValueError(
            f"{op}: a sequence needs {int(used.max())} pages, block_table has {block_table.shape[1]} columns; widen it"
        )
    columns = torch.arange(block_table.shape[1], device=block_table.device)
    bad = ((block_table < 0) | (block_table >= pages)) & (columns < used[:, None])
    if bool(bad.any()):
        raise ValueError(f"{op}: block_table names a page outside the {pages} pages of the cache")


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{values[0]}, {values[1]}, ..., {values[-1]}]"


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x * torch.tensor(scale, dtype=torch.float32)


def _blocks(keys: int, start: int, stop: int, positions: Tensor, window: int | None) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of [start, stop) that at least one row sees: the slice of keys [n] and which rows see them [R,n]."""
    for first in range(start, min(stop, keys), ATTENTION_BLOCK):
        last = min(first + ATTENTION_BLOCK, keys)
        j = torch.arange(first, last)[None, :]
        visible = j <= positions[:, None]
        if window is not None:
            visible &= j > positions[:, None] - window
        if bool(visible.any()):
            yield slice(first, last), visible


def _masked_chain(a: Tensor, b: Tensor, visible: Tensor, start: Tensor) -> Tensor:
    """start [M,N] + a [M,K] b [K,N], k ascending, without the terms (m, k) that are not visible."""
    total = start
    for k in range(a.shape[1]):
        total = torch.where(visible[:, k : k + 1], fma(a[:, k : k + 1], b[k : k + 1], total), total)
    return total


def merge(o: Tensor, lse2: Tensor, o_split: Tensor, lse2_split: Tensor) -> tuple[Tensor, Tensor]:
    """Merges a normalised split into (o [R,D], lse2 [R]) of the earlier ones; callers handle empty sides."""
    high = torch.maximum(lse2, lse2_split)
    w, w_split = exp2(lse2 - high), exp2(lse2_split - high)
    total = w + w_split
    merged = fma(o, w[:, None], o_split * w_split[:, None]) / total[:, None]
    return merged, high + log2(total)


def forward_rows(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float, window: int | None, split: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """fp32 o [R,D] and lse2 [R] of rows q [R,D] at absolute positions [R] over keys k, v [S,D]."""
    rows, d = q.shape
    o, lse2 = torch.zeros(rows, d), torch.full((rows,), -torch.inf)
    for start in range(0, k.shape[0], split):
        m, l, acc = torch.full((rows,), -torch.inf), torch.zeros(rows), torch.zeros(rows, d)
        for keys, visible in _blocks(k.shape[0], start, start + split, positions, window):
            raw = chain(q, k[keys].t(), torch.zeros(rows, keys.stop - keys.start))
            c = torch.tensor(scale * LOG2E, dtype=torch.float32)
            m_new = torch.maximum(m, torch.where(visible, raw, -torch.inf).amax(1) * c)
            p = torch.where(visible, exp2(fma(raw, c, -m_new[:, None])), 0.0)
            alpha = exp2(m - m_new)
            l_new = fma(l, alpha, row_sum(p))
            acc_new = _masked_chain(p.to(dtype).float(), v[keys].float(), visible, acc * alpha[:, None])
            sees = visible.any(1)
            m, l = torch.where(sees, m_new, m), torch.where(sees, l_new, l)
            acc = torch.where(sees[:, None], acc_new, acc)
        seen, first = l != 0, torch.isneginf(lse2)
        o_split, lse2_split = acc / l[:, None], m + log2(l)
        o_both, lse2_both = merge(o, lse2, o_split, lse2_split)
        o = torch.where(seen[:, None], torch.where(first[:, None], o_split, o_both), o)
        lse2 = torch.where(seen, torch.where(first, lse2_split, lse2_both), lse2)
    return o, lse2


def _pack(x: Tensor, group: int) -> Tensor:
    """[n, HK*G, D] as rows [HK, n*G, D]: positions ascending, heads of the group in the inner dimension."""
    n, h, d = x.shape
    return x.view(n, h // group, group, d).transpose(0, 1).reshape(h // group, n * group, d)


def _unpack(x: Tensor, group: int) -> Tensor:
    """The inverse of `_pack`."""
    hk, rows, d = x.shape
    return x.view(hk, rows // group, group, d).transpose(0, 1).reshape(rows // group, hk * group, d)


def _positions(queries: int, keys: int, group: int, causal: bool) -> Tensor:
    """Last key that each row sees."""
    last = torch.arange(keys - queries, keys)
    return (last if causal else torch.full_like(last, keys - 1)).repeat_interleave(group)


def _sequence(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, split: int, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """out [n,H,D] and natural-log LSE [n,H] of one sequence with queries [n,H,D] and keys, values [S,HK,D]."""
    group = q.shape[1] // k.shape[1]
    rows = _pack(q, group)
    positions = _positions(q.shape[0], k.shape[0], group, causal)
    done = [
        forward_rows(rows[i], k[:, i], v[:, i], positions, scale, window, split, v.dtype) for i in range(k.shape[1])
    ]
    out = torch.stack([o for o, _ in done])
    lse = torch.stack([lse2 for _, lse2 in done])[..., None]
    return _unpack(out, group).to(q.dtype), _unpack(lse, group)[..., 0] * torch.tensor(LN2, dtype=torch.float32)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window: int | None,
    split: int,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    lens_k = check_keys("attention", cu_seqlens_k, k.shape[0])
    check_sequences("attention", cu_seqlens_q, lens_k, q.shape[0], max_seqlen_q, max_seqlen_k)
    out, lse = q.new_empty(q.shape), torch.empty(q.shape[:2])
    cu_q, cu_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        out[rows], lse[rows] = _sequence(q[rows], k[keys], v[keys], scale, window, split, causal)
    return out, lse


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window: int | None,
    split: int,
) -> tuple[Tensor, Tensor]:
    check_sequences("paged_attention", cu_seqlens_q, seq_lens_k, q.shape[0], max_seqlen_q, max_seqlen_k)
    check_pages("paged_attention", block_table, seq_lens_k, k_cache.shape[0], k_cache.shape[1])
    out, lse = q.new_empty(q.shape), torch.empty(q.shape[:2])
    cu_q = cu_seqlens_q.tolist()
    for b, length in enumerate(seq_lens_k.tolist()):
        rows = slice(cu_q[b], cu_q[b + 1])
        pages = block_table[b, : -(-length // k_cache.shape[1])].long()
        k, v = k_cache[pages].flatten(0, 1)[:length], v_cache[pages].flatten(0, 1)[:length]
        out[rows], lse[rows] = _sequence(q[rows], k, v, scale, window, split)
    return out, lse


def backward_rows(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor,
    lse: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 dq [R,D], dk, dv [S,D] of the rows of one kv head; delta and natural-log lse are [R]."""
    dtype = q.dtype
    dq, dk, dv = torch.zeros(q.shape), torch.zeros(k.shape), torch.zeros(v.shape)
    c = torch.tensor(scale * LOG2E, dtype=torch.float32)
    lse2 = lse * torch.tensor(LOG2E, dtype=torch.float32)
    for keys, visible in _blocks(k.shape[0], 0, k.shape[0], positions, window):
        zero = torch.zeros(q.shape[0], keys.stop - keys.start)
        p = torch.where(visible, exp2(fma(chain(q, k[keys].t(), zero), c, -lse2[:, None])), 0.0)
        ds = torch.where(visible, p * (chain(dout, v[keys].t(), zero) - delta[:, None]), 0.0).to(dtype).float()
        dq = _masked_chain(ds, k[keys].float(), visible, dq)
        dk[keys] = _masked_chain(ds.t(), q.float(), visible.t(), dk[keys])
        dv[keys] = _masked_chain(p.to(dtype).float().t(), dout.float(), visible.t(), dv[keys])
    return _scaled(dq, scale), _scaled(dk, scale), dv


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window: int | None,
    causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    group = q.shape[1] // k.shape[1]
    delta = row_dot(dout, out)
    cu_q, cu_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        positions = _positions(rows.stop - rows.start, keys.stop - keys.start, group, causal)
        packed = [_pack(x, group) for x in (dout[rows], q[rows], delta[rows, :, None], lse[rows, :, None])]
        dq_rows = []
        for i in range(k.shape[1]):
            d_out, q_rows, d, lse_i = (x[i] for x in packed)
            grads = backward_rows(d_out, q_rows, k[keys, i], v[keys, i], d[:, 0], lse_i[:, 0], positions, scale, window)
            dq_rows.append(grads[0])
            dk[keys, i], dv[keys, i] = grads[1].to(k.dtype), grads[2].to(v.dtype)
        dq[rows] = _unpack(torch.stack(dq_rows), group).to(q.dtype)
    return dq, dk, dv


def store_kv_(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    kept = slots >= 0
    where = slots[kept]
    if where.numel() and int(where.max()) >= k_cache.shape[0] * k_cache.shape[1]:
        raise ValueError(
            f"store_kv_: slots names slot {int(where.max())}, the cache has {k_cache.shape[0] * k_cache.shape[1]}; "
            "a slot is page * page_size + offset"
        )
    k_cache.view(-1, *k_cache.shape[2:])[where] = k[kept]
    v_cache.view(-1, *v_cache.shape[2:])[where] = v[kept]
