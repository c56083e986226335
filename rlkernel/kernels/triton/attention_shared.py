"""Decode attention over a shared prefix on GPUs: the queries of a group form one tile, which reads the prefix once.

Contract: orders.py, `attention`. A row's bits do not depend on the other rows of its tile, so splits inside the prefix
equal those of the unshared kernel. For the split in which the prefix ends, the running sums are stored and each
sequence continues them with its own keys. Tests compare with `attention.paged_attention` bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.kernels.triton.attention import INT32, MERGE_GRID, PARTIAL_GRID, attend_blocks
from rlkernel.kernels.triton.attention_backward import branches, check_grid
from rlkernel.kernels.triton.attention_pages import contiguous_slots
from rlkernel.kernels.triton.attention_splits import KEY_BLOCK, merge_kernel, normalised
from rlkernel.kernels.triton.attention_tiles import Tile, forward_tile
from rlkernel.kernels.triton.common import (
    LN2,
    LOG2E,
    after_previous,
    cdiv,
    contiguous_heads,
    family,
    next_power_of_2,
    on_device,
    options,
    pdl,
)
from rlkernel.kernels.triton.launch import direct

# ---- kernels -------------------------------------------------------------------------------------


@triton.jit
def shared_keys(prefix, lens, sequence):
    """Keys of a sequence that its group computed: full blocks of the prefix before the sequence's last key."""
    return max(0, min(tl.load(prefix + sequence), tl.load(lens + sequence) - 1)) // KEY_BLOCK * KEY_BLOCK


@direct
@triton.jit(do_not_specialize=["B", "COLUMNS", "MOST", "PAGES"])
def prefix_kernel(
    q,  # [B, H, D]
    k,  # pages [pages, PAGE, HK, D] with a stride of KV_HEAD elements between heads
    v,
    table,  # [B, COLUMNS]
    groups,  # [G + 1]: sequences groups[g] to groups[g + 1] - 1 share a prefix
    prefix,  # [B] keys of the prefix
    lens,  # [B]
    o_parts,  # [splits, B, H, D] fp32: normalised o, or the running acc of the split in which the prefix ends
    lse_parts,  # [splits, B, H]: lse2, or the running maximum of that split
    sums,  # [B, H] fp32: the running l of that split
    B,
    q_stride,
    COLUMNS,
    MOST,  # keys that a row of the table can hold
    PAGES,
    SPLIT,
    TILES,
    scale_log2e,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    KV_HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PAGE: tl.constexpr,
    BRANCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One split of the prefix for a tile of rows (sequence, head of the group)."""
    after_previous(PDL)
    head = tl.program_id(1)
    split = tl.program_id(0) // TILES
    first = max(0, min(tl.load(groups + tl.program_id(2)), B))
    sequences = max(0, min(tl.load(groups + tl.program_id(2) + 1), B)) - first
    row = tl.program_id(0) % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    if tl.program_id(0) % TILES * BLOCK_M >= sequences * GROUP:
        return
    keys = min(shared_keys(prefix, lens, first), MOST)
    start = split * SPLIT
    stop = min(keys, start + SPLIT)
    if start >= stop:
        return
    sequence = tl.cast(first, tl.int64) + row // GROUP
    inside = row < sequences * GROUP
    column = tl.arange(0, BLOCK_D)
    stored = inside[:, None] & (column < D)[None, :]
    at = sequence[:, None] * q_stride + (head * (GROUP * D) + row % GROUP * D)[:, None] + column[None, :]
    x = tl.load(q + at, mask=stored, other=0.0)
    step: tl.constexpr = HK * KV_HEAD
    pages = (table + tl.cast(first, tl.int64) * COLUMNS, PAGES)
    source = (None, None, k + head * KV_HEAD, v + head * KV_HEAD, step, step, (0, head * D), pages)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    position = keys + row * 0  # every row sees all keys
    acc, m, l = attend_blocks(acc, m, l, x, source, start, stop, keys, keys, position, 0, column, scale_log2e, D, False,
                              PAGE, False, BRANCH)  # fmt: skip
    to = sequence * (HK * GROUP) + head * GROUP + row % GROUP
    if stop == start + SPLIT:
        acc, m = normalised(acc, m, l)
    else:
        tl.store(sums + to, l, mask=inside)
    part = tl.cast(split, tl.int64) * B * (HK * GROUP)
    tl.store(lse_parts + part + to, m, mask=inside)
    tl.store(o_parts + part * D + (to * D)[:, None] + column[None, :], acc, mask=stored)


@direct
@triton.jit(do_not_specialize=["B", "COLUMNS", "MOST", "PAGES", "SPLITS"])
def suffix_kernel(
    q,  # as in prefix_kernel
    k,
    v,
    table,
    prefix,
    lens,
    o_parts,
    lse_parts,
    sums,
    out,  # [B, H, D], and lse [B, H] natural log: results of sequences inside one split
    lse,
    B,
    q_stride,
    COLUMNS,
    MOST,  # keys that a row of the table can hold
    PAGES,
    SPLIT,
    SPLITS,
    scale_log2e,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    KV_HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PAGE: tl.constexpr,
    BRANCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """The splits of one sequence from the end of its prefix on, for the heads of a group."""
    after_previous(PDL)
    head = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    keys = min(tl.load(lens + sequence), MOST)
    shared = min(shared_keys(prefix, lens, sequence), MOST)
    row = tl.arange(0, BLOCK_M)
    inside = row < GROUP
    column = tl.arange(0, BLOCK_D)
    stored = inside[:, None] & (column < D)[None, :]
    x = tl.load(
        q + sequence * q_stride + (head * (GROUP * D) + row * D)[:, None] + column[None, :], mask=stored, other=0.0
    )
    step: tl.constexpr = HK * KV_HEAD
    source = (None, None, k + head * KV_HEAD, v + head * KV_HEAD, step, step, (0, head * D),
              (table + sequence * COLUMNS, PAGES))  # fmt: skip
    position = tl.where(inside, keys - 1, keys)
    to = sequence * (HK * GROUP) + head * GROUP + row
    last = min(tl.cdiv(keys, SPLIT), SPLITS)
    for split in tl.range(shared // SPLIT + tl.program_id(0), last, tl.num_programs(0)):
        start = split * SPLIT
        stop = min(keys, start + SPLIT)
        m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        part = tl.cast(split, tl.int64) * B * (HK * GROUP)
        at = part * D + (to * D)[:, None] + column[None, :]
        if start < shared:  # the prefix ends inside this split
            m = tl.load(lse_parts + part + to, mask=inside, other=float("-inf"))
            l = tl.load(sums + to, mask=inside, other=0.0)
            acc = tl.load(o_parts + at, mask=stored, other=0.0)
            start = shared
        acc, m, l = attend_blocks(acc, m, l, x, source, start, stop, keys // KEY_BLOCK * KEY_BLOCK, keys, position, 0,
                                  column, scale_log2e, D, False, PAGE, False, BRANCH)  # fmt: skip
        acc, m = normalised(acc, m, l)
        if keys <= SPLIT:
            tl.store(lse + to, m * LN2, mask=inside)
            tl.store(out + (to * D)[:, None] + column[None, :], acc.to(out.dtype.element_ty), mask=stored)
        else:
            tl.store(lse_parts + part + to, m, mask=inside)
            tl.store(o_parts + at, acc, mask=stored)


# ---- launchers -----------------------------------------------------------------------------------


def shared_paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_k: Tensor,
    groups: Tensor,
    prefix: Tensor,
    max_group: int,
    max_prefix: int,
    max_seqlen_k: int,
    scale: float,
    split: int,
    tile: Tile | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention.paged_attention` for one query per sequence: out [B, H, D] and natural-log lse [B, H] fp32.

    Sequences groups[g] to groups[g + 1] - 1 share the pages of their first prefix[b] keys. `max_group` sequences and
    `max_prefix` keys bound groups and prefixes. `tile` is for tests and changes no bit.
    """
    q = contiguous_heads(q)
    k, v, kv_head = contiguous_slots(k_cache, v_cache)
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    (batch, h, d), hk = q.shape, k.shape[2]
    group, block_d = h // hk, next_power_of_2(d, 16)
    if out is None:
        out = torch.empty(batch, h, d, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, h, dtype=torch.float32, device=q.device)
    if batch == 0:
        return out, lse
    kind, count = family(q), groups.shape[0] - 1
    tile = tile or forward_tile(max_group * group, d, q.element_size(), kind)
    own = forward_tile(group, d, q.element_size(), kind)
    splits, tiles = cdiv(max_seqlen_k, split), cdiv(max_group * group, tile.rows)
    check_grid(max(batch, count), hk, max_seqlen_q=1)
    most = min(table.shape[1] * k.shape[1], INT32)
    new = lambda *shape: torch.empty(shape, dtype=torch.float32, device=q.device)
    parts = new(splits, batch, h, d), new(splits, batch, h), new(batch, h)
    meta = {"HK": hk, "GROUP": group, "D": d, "KV_HEAD": kv_head, "BLOCK_D": block_d, "PAGE": k.shape[1]}
    meta |= {"BRANCH": branches(kind, q), **pdl(q), **options(matmul=True)}
    scale_log2e = scale * LOG2E.value
    with on_device(q):
        if count and max_prefix:
            prefix_kernel[(min(splits, cdiv(max_prefix, split)) * tiles, hk, count)](
                q, k, v, table, groups, prefix, seq_lens_k, *parts, batch, q.stride(0), table.stride(0), most,
                k.shape[0], split, tiles, scale_log2e, BLOCK_M=tile.rows, num_warps=tile.warps,
                num_stages=tile.stages, **meta,
            )  # fmt: skip
        suffix_kernel[(min(splits, max(2, PARTIAL_GRID // (batch * hk))), hk, batch)](
            q, k, v, table, prefix, seq_lens_k, *parts, out, lse, batch, q.stride(0), table.stride(0), most, k.shape[0],
            split, splits, scale_log2e, BLOCK_M=own.rows, num_warps=own.warps, num_stages=own.stages, **meta,
        )  # fmt: skip
        if splits > 1:
            heads = min(next_power_of_2(h), max(1, 128 // block_d))
            programs = min(cdiv(h, heads), max(1, MERGE_GRID // batch))
            merge_kernel[(1, programs, batch)](
                parts[0], parts[1], cu_seqlens_q, seq_lens_k, out, lse, batch, 0, split, splits, H=h, D=d, HEADS=heads,
                BLOCK_D=block_d, HAS_WINDOW=False, LENGTHS=True, num_warps=1, **pdl(q), **options(),
            )  # fmt: skip
    return out, lse
