"""What vLLM needs of the ops on a GPU: caches with keys and values in one tensor, `out=`, fused norm, rope and store;
invalid block tables, cu_seqlens and positions touch no other memory.

Control: what must not be read holds NaN, what must not be written holds sevens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops.op_checks import rand

from rlkernel import ops
from rlkernel.contract import assert_bitwise, compare_bitwise
from rlkernel.kernels.triton import attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def batch(b: int, longest: int, page: int, hk: int, d: int) -> tuple[torch.Tensor, ...]:
    """A cache [pages, page, HK, 2 D] of random keys and values, its block table and lengths."""
    lengths = torch.arange(b) * longest // max(1, b - 1)
    lengths = lengths.clamp(1).int().cuda()
    columns = -(-longest // page)
    table = torch.randperm(b * columns, generator=torch.Generator().manual_seed(1)).int().view(b, columns).cuda()
    both = rand(0, b * columns * page * hk * 2 * d, dtype=torch.bfloat16).cuda().view(-1, page, hk, 2 * d)
    return both, table, lengths


@pytest.mark.parametrize("d", (64, 128))
@pytest.mark.parametrize("b,longest", [(3, 5000), (80, 5000), (4, 300)])
def test_keys_and_values_in_one_cache(d: int, b: int, longest: int) -> None:
    both, table, lengths = batch(b, longest, 16, 8, d)
    k, v = both[..., :d], both[..., d:]
    q, cu = rand(2, b, 16, d, dtype=torch.bfloat16).cuda(), torch.arange(b + 1).int().cuda()
    sizes = {"max_seqlen_q": 1, "max_seqlen_k": longest}
    whole = ops.paged_attention(q, k.contiguous(), v.contiguous(), table, cu, lengths, **sizes)
    out = torch.empty_like(q)
    found = ops.paged_attention(q, k, v, table, cu, lengths, **sizes, out=out)
    assert found[0].data_ptr() == out.data_ptr()
    for mine, other in zip(found, whole, strict=True):
        assert_bitwise(mine, other, "keys and values in one cache")
    for row in {0, b // 2, b - 1}:  # alone its splits run in parallel, in a large batch one after another
        alone = ops.paged_attention(
            q[row : row + 1], k, v, table[row : row + 1], cu[:2], lengths[row : row + 1], **sizes
        )  # fmt: skip
        assert_bitwise(alone[0], out[row : row + 1], f"row {row} alone")


@pytest.mark.parametrize("h,hk,d", [(16, 8, 128), (32, 8, 128), (14, 2, 64), (4, 4, 80)])
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=("bf16", "fp32"))
def test_qk_norm_rope(h: int, hk: int, d: int, dtype: torch.dtype) -> None:
    packed = (rand(0, 300, h + 2 * hk, d, dtype=dtype) * 3).cuda()
    q, k = packed[:, :h], packed[:, h : h + hk]
    wq, wk, table = rand(1, d, dtype=dtype).cuda(), rand(2, d, dtype=dtype).cuda(), rand(3, 512, d).cuda()
    positions = torch.arange(300).cuda()
    ours = ops.qk_norm_rope(q, k, wq, wk, 1e-6, positions, table)
    both = ops.rope(ops.rms_norm(q, wq, 1e-6), ops.rms_norm(k, wk, 1e-6), positions, table)
    for o, b in zip(ours, both, strict=True):
        assert_bitwise(o, b, "fused against separate")


@pytest.mark.parametrize("h,hk", [(16, 8), (32, 8), (6, 3)])
def test_qk_norm_rope_store(h: int, hk: int) -> None:
    packed = (rand(0, 300, h + 2 * hk, 128, dtype=torch.bfloat16) * 3).cuda()
    q, k, v = packed.split((h, hk, hk), 1)
    wq, wk = (rand(i, 128, dtype=torch.bfloat16).cuda() for i in (1, 2))
    given = (wq, wk, 1e-6, torch.arange(300).cuda(), rand(3, 512, 128).cuda())
    slots = torch.randperm(400).cuda()[:300]
    slots[::7] = -1
    cache = rand(4, 25, 16, hk, 256, dtype=torch.bfloat16).cuda()
    keys, values = cache[..., :128], cache[..., 128:]
    wanted = keys.clone(), values.clone()
    q_wanted, k_wanted = ops.qk_norm_rope(q, k, *given)
    ops.store_kv_(*wanted, k_wanted, v, slots)
    ours = ops.qk_norm_rope_store(q, k, v, *given, keys, values, slots)
    for o, r in zip((ours, keys, values), (q_wanted, *wanted), strict=True):
        assert_bitwise(o, r, "fused against separate")


@pytest.mark.parametrize("hk,d,queries,keys", [(8, 128, [600, 3], [4500, 90]), (2, 64, [5000], [5000])])
def test_gathered_pages_equal_paged_reads(
    hk: int, d: int, queries: list[int], keys: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = [-(-n // 16) for n in keys]
    cache = rand(0, sum(needed), 16, hk, 2 * d, dtype=torch.bfloat16).cuda()
    q = rand(1, sum(queries), 2 * hk, d, dtype=torch.bfloat16).cuda()
    order = torch.randperm(sum(needed)).int()
    table = torch.zeros(len(keys), max(needed), dtype=torch.int32)
    for b, first in enumerate([0, *itertools.accumulate(needed)][:-1]):
        table[b, : needed[b]] = order[first : first + needed[b]]
    cu = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32).cuda()
    run = lambda: ops.paged_attention(
        q, cache[..., :d], cache[..., d:], table.cuda(), cu, torch.tensor(keys, dtype=torch.int32).cuda(),
        max_seqlen_q=max(queries), max_seqlen_k=max(keys),
    )  # fmt: skip
    ours = run()
    monkeypatch.setattr(attention, "GATHER_QUERIES", 1 << 30)
    for name, o, p in zip(("out", "lse"), ours, run(), strict=True):
        assert_bitwise(o, p, f"{name}: gathered against paged")


@pytest.mark.parametrize("prefix,suffix", [(4096, (1, 70, 2100)), (4096 + 640, (65, 1, 3000)), (190, (1, 10, 1900))])
@pytest.mark.parametrize("each,h,hk,dtype", [(3, 16, 8, torch.bfloat16), (40, 32, 8, torch.float16)])
def test_a_shared_prefix_changes_no_bit(
    each: int, h: int, hk: int, dtype: torch.dtype, prefix: int, suffix: tuple[int, ...], record: Callable[..., None]
) -> None:
    """Two groups and sequences of their own, whole splits and a split in which the prefix ends."""
    page, b = 16, 2 * each + 2
    lens = [prefix + suffix[i % 3] for i in range(2 * each)] + [5, 2500]
    needed = -(-max(lens) // page)
    table = torch.randperm(b * needed, generator=torch.Generator().manual_seed(0)).int().view(b, needed)
    for first in (0, each):
        table[first : first + each, : -(-prefix // page)] = table[first, : -(-prefix // page)]
    torch.manual_seed(1)
    k, v = (torch.randn(b * needed, page, hk, 128, dtype=dtype, device="cuda") for _ in range(2))
    q = rand(0, b, h, 128, dtype=dtype).cuda()
    int32 = lambda values: torch.tensor(values, dtype=torch.int32).cuda()
    given = (q, k, v, table.cuda(), int32(range(b + 1)), int32(lens))
    sizes = {"max_seqlen_q": 1, "max_seqlen_k": max(lens)}
    shared = ops.SharedPrefix(int32([0, each, 2 * each, 2 * each]), int32([prefix] * 2 * each + [0, 0]), each, prefix)
    alone = ops.paged_attention(*given, **sizes)
    found = ops.paged_attention(*given, **sizes, shared=shared)
    mismatches = sum(compare_bitwise(x, y).mismatches for x, y in zip(found, alone, strict=True))
    record(cases=1, elements=sum(x.numel() for x in found), mismatches=mismatches)
    assert mismatches == 0
    fewer = shared._replace(lengths=shared.lengths - 64 * (shared.lengths > 64).int())
    assert_bitwise(ops.paged_attention(*given, **sizes, shared=fewer)[0], alone[0], "fewer shared keys")
    other = table.clone()
    other[0, 0] = table[-1, 0]  # control: the first group reads another page
    changed = ops.paged_attention(q, k, v, other.cuda(), *given[4:], **sizes, shared=shared)
    assert compare_bitwise(changed[0][1:each], alone[0][1:each]).mismatches > 0


def framed(x: torch.Tensor) -> torch.Tensor:
    """A view of the same values, with len(x) rows of NaN before and after them in memory."""
    return torch.cat((torch.full_like(x, torch.nan), x, torch.full_like(x, torch.nan)))[len(x) : 2 * len(x)]


@pytest.mark.parametrize("queries,keys", ((1, 100), (1, 5000), (40, 100), (600, 5000)))
def test_invalid_page_numbers_read_only_the_cache(queries: int, keys: int) -> None:
    """Decode, split decode, prefill and gathered pages: a kernel cannot raise, so it reads other pages of the cache."""
    page, pages = 16, -(-keys // 16)
    k, v = (framed(rand(i, pages, page, 2, 128, dtype=torch.bfloat16).cuda()) for i in (1, 2))
    table = torch.arange(pages).int().expand(2, -1).cuda().clone()
    table[0, ::3], table[1, 1::2] = -1, pages + 1
    q = rand(0, 2 * queries, 4, 128, dtype=torch.bfloat16).cuda()
    cu, sizes = torch.tensor([0, queries, 2 * queries]).int().cuda(), {"max_seqlen_q": queries, "max_seqlen_k": keys}
    # Also lengths beyond the table, except for gathered pages, whose entries past the table's end are undefined.
    for more in (0, 10**6) if queries < attention.GATHER_QUERIES else (0,):
        lens = torch.tensor([keys + more, keys]).int().cuda()
        for x in ops.paged_attention(q, k, v, table, cu, lens, **sizes):
            assert torch.isfinite(x).all()


def test_invalid_cu_seqlens_write_nothing_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are undefined, but forward and backward write only to what they allocate, here between sevens."""
    t, d, frame = 64, 64, 4 * 64 * 2 * 64
    q, k, v = (rand(i, t, 2, d, dtype=torch.bfloat16).cuda().requires_grad_() for i in range(3))
    upstream = torch.ones_like(q)
    frames: list[torch.Tensor] = []

    def empty(*shape: int | torch.Size, **options: Any) -> torch.Tensor:
        size = torch.Size(shape if isinstance(shape[0], int) else shape[0])
        n = size.numel()
        whole = torch.full((n + 2 * frame,), 7, **options)
        frames.extend((whole[:frame], whole[frame + n :]))
        return whole[frame : frame + n].view(size)

    for borders in ([0, 40, 64], [0, 40, 90], [-30, 40, 64], [64, 10, 64], [70, 2**31 - 1, 64]):
        cu = torch.tensor(borders).int().cuda()
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", empty)
            out, _ = ops.attention(q, k, v, cu, max_seqlen_q=t)
            torch.autograd.grad(out, (q, k, v), upstream)
        assert len(frames) >= 10 and all((x == 7).all() for x in frames), borders
        frames.clear()


def test_rope_clamps_positions_outside_the_table() -> None:
    table = framed(rand(1, 8, 64).cuda())
    q, k = rand(0, 6, 4, 64).cuda(), rand(2, 6, 2, 64).cuda()
    outside, inside = torch.tensor([-1, 8, 3, 9, -7, 15]).cuda(), torch.tensor([0, 7, 3, 7, 0, 7]).cuda()
    for a, b in zip(ops.rope(q, k, outside, table), ops.rope(q, k, inside, table), strict=True):
        assert_bitwise(a, b, "outside against clamped")
