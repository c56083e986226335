"""Paged KV cache on GPUs: stores new tokens in their slots, and copies the pages of long sequences to dense keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.kernels.triton.attention_splits import clamp_page
from rlkernel.kernels.triton.common import cdiv, contiguous_heads, next_power_of_2, on_device, options
from rlkernel.kernels.triton.launch import direct

# ---- kernels -------------------------------------------------------------------------------------


@direct
@triton.jit(do_not_specialize=["SIZE"])
def store_kv_kernel(k_cache, v_cache, k, v, slots, k_stride, v_stride, SIZE, ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Copies a token's k and v (ROW elements each) to its slot; skips tokens whose slot is not in [0, SIZE)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if (slot < 0) | (slot >= SIZE):
        return
    for begin in tl.static_range(0, ROW, BLOCK):
        j = begin + tl.arange(0, BLOCK)
        tl.store(k_cache + slot * ROW + j, tl.load(k + token * k_stride + j, mask=j < ROW), mask=j < ROW)
        tl.store(v_cache + slot * ROW + j, tl.load(v + token * v_stride + j, mask=j < ROW), mask=j < ROW)


@direct
@triton.jit(do_not_specialize=["COLUMNS", "PAGES", "CAPACITY"])
def gather_kernel(
    k,  # pages [pages, PAGE, HK, D] with a stride of KV_HEAD elements between heads
    v,
    table,  # [B, COLUMNS]
    lens,  # [B]
    k_out,  # [B, CAPACITY, HK, D]
    v_out,
    COLUMNS,
    PAGES,
    CAPACITY,
    HK: tl.constexpr,
    D: tl.constexpr,
    KV_HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies one page of a sequence to dense keys and values; leaves rows past the sequence's end unwritten."""
    sequence = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * PAGE
    keys = min(tl.load(lens + sequence), CAPACITY)  # greater only if `max_seqlen_k` is too small
    if first >= keys:
        return
    page = clamp_page(tl.load(table + sequence * COLUMNS + tl.program_id(0)), PAGES)
    slot = page.to(tl.int64) * PAGE
    j = tl.arange(0, BLOCK)
    inside = j < HK * D
    source = j // D * KV_HEAD + j % D
    for i in tl.range(0, min(PAGE, keys - first)):
        at = (slot + i) * (HK * KV_HEAD) + source
        to = (sequence * CAPACITY + first + i) * (HK * D) + j
        tl.store(k_out + to, tl.load(k + at, mask=inside), mask=inside)
        tl.store(v_out + to, tl.load(v + at, mask=inside), mask=inside)


# ---- launchers -----------------------------------------------------------------------------------


def gather_pages(
    k: Tensor, v: Tensor, table: Tensor, lens: Tensor, capacity: int, kv_head: int
) -> tuple[Tensor, Tensor]:  # [B * capacity, HK, D]
    """Dense keys and values of paged sequences; sequence b starts at row b * capacity."""
    batch, (_, page, hk, d) = lens.shape[0], k.shape
    k_out, v_out = (torch.empty(batch * capacity, hk, d, dtype=k.dtype, device=k.device) for _ in range(2))
    with on_device(k):
        gather_kernel[(min(cdiv(capacity, page), table.shape[1]), batch)](
            k, v, table, lens, k_out, v_out, table.stride(0), k.shape[0], capacity, HK=hk, D=d, KV_HEAD=kv_head,
            PAGE=page, BLOCK=next_power_of_2(hk * d), num_warps=4, **options(),
        )  # fmt: skip
    return k_out, v_out


def contiguous_slots(k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor, int]:
    """The caches [pages, page, HK, D] and the stride between heads; copied unless their slots are contiguous.

    The stride between heads is free, because some caches store a head's key and value next to each other.
    """
    (_, page, hk, d), slot = k_cache.shape, k_cache.stride(1)
    head = slot // hk
    strides = (page * slot, slot, head if hk > 1 else k_cache.stride(2), 1)
    if slot % hk == 0 and k_cache.stride() == strides and v_cache.stride() == strides:
        return k_cache, v_cache, head
    return k_cache.contiguous(), v_cache.contiguous(), d


def store_kv_(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    if slots.numel() == 0:
        return
    k, v, slots = contiguous_heads(k), contiguous_heads(v), slots.contiguous()
    row = k.shape[1] * k.shape[2]
    with on_device(k):
        store_kv_kernel[(slots.shape[0],)](
            k_cache, v_cache, k, v, slots, k.stride(0), v.stride(0), k_cache.shape[0] * k_cache.shape[1],
            ROW=row, BLOCK=min(next_power_of_2(row), 1024), num_warps=4, **options(),
        )  # fmt: skip
