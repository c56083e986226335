"""attention on the CPU: launchers of `csrc/cpu/attention.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels.cpu.library import CPU, code, function, pointer, threads
from rlkernel.kernels.reference.arith import LOG2E
from rlkernel.kernels.reference.attention import check_keys, check_pages, check_sequences


def _rows(x: Tensor) -> Tensor:
    """x [n, heads, D], copied unless the heads of a row are contiguous, as in a slice of a fused projection."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    page: int,
    scale: float,
    window: int | None,
    split: int,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Dense if page is 0 (seqlens_k are then cumulative), otherwise paged."""
    q = _rows(q)
    t, h, d = q.shape
    out, lse = torch.empty(t, h, d, dtype=q.dtype, device=CPU), torch.empty(t, h, dtype=torch.float32, device=CPU)
    function("rlk_attention", "p" * 8 + "l" * 11 + "fiii")(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), pointer(table), cu_seqlens_q.data_ptr(), seqlens_k.data_ptr(),
        out.data_ptr(), lse.data_ptr(), cu_seqlens_q.shape[0] - 1, h, k.shape[-2], d, q.stride(0), k.stride(-3),
        v.stride(-3), page, 0 if table is None else table.shape[1], window or 0, split, scale * LOG2E,
        causal, code(q.dtype), threads(),
    )  # fmt: skip
    return out, lse


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
    cu_q, cu_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    return _forward(q, _rows(k), _rows(v), None, cu_q, cu_k, 0, scale, window, split, causal)


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
    table, cu_q, lens = block_table.contiguous(), cu_seqlens_q.contiguous(), seq_lens_k.contiguous()
    k, v = k_cache.contiguous(), v_cache.contiguous()
    return _forward(q, k, v, table, cu_q, lens, k.shape[1], scale, window, split)


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
    dout, out, q, k, v = dout.contiguous(), out.contiguous(), _rows(q), _rows(k), _rows(v)
    cu_q, cu_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=CPU) for x in (q, k, v))
    h, d = q.shape[1:]
    function("rlk_attention_backward", "p" * 11 + "l" * 8 + "ffiii")(
        dout.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), cu_q.data_ptr(),
        cu_k.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), cu_q.shape[0] - 1, h, k.shape[1], d, q.stride(0),
        k.stride(0), v.stride(0), window or 0, scale * LOG2E, scale, causal, code(q.dtype), threads(),
    )  # fmt: skip
    return dq, dk, dv


def store_kv_(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    size = k_cache.shape[0] * k_cache.shape[1]
    if slots.numel() and int(slots.max()) >= size:
        raise ValueError(
            f"store_kv_: slots names slot {int(slots.max())}, the cache has {size}; a slot is page * page_size + offset"
        )
    k, v, slots = _rows(k), _rows(v), slots.contiguous()
    row = k.shape[1] * k.shape[2] * k.element_size()
    function("rlk_store_kv", "ppppplllli")(
        k_cache.data_ptr(), v_cache.data_ptr(), k.data_ptr(), v.data_ptr(), slots.data_ptr(), slots.shape[0], row,
        k.stride(0) * k.element_size(), v.stride(0) * v.element_size(), threads(),
    )  # fmt: skip
