"""attention on a GPU: accurate against fp64; prefill, its chunks, paged decode and training give the same bits.

Control: decode on stock torch differs from prefill.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu.gpu_checks import HOPPER, Compared, faster_schedule
from ops.attention_paths import (
    Sequence,
    check_gradients,
    check_paths,
    cu,
    cuts_of,
    gradients,
    packed,
    paged,
    rand,
    same,
    sequences,
    truth,
)
from ops.op_checks import differs
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_accurate, assert_bitwise

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DEVICE = "cuda"
LENS = [700, 1, 64, 333, 129]
Record = Callable[..., None]

by_shape = pytest.mark.parametrize(
    "group,hk,d,dtype,window",
    (
        (2, 8, 128, torch.bfloat16, None),
        (4, 2, 64, torch.bfloat16, None),
        (7, 2, 128, torch.bfloat16, 100),
        (1, 3, 80, torch.float16, None),
        (8, 1, 256, torch.bfloat16, None),
        (1, 2, 64, torch.float32, 100),
    ),
)


def batch_of(lens: list[int], group: int, hk: int, d: int, dtype: torch.dtype) -> list[Sequence]:
    return sequences(lens, group, hk, d, dtype, device=DEVICE)


@by_shape
def test_accuracy(group: int, hk: int, d: int, dtype: torch.dtype, window: int | None) -> None:
    lens = [300, 70]
    q, k, v = (torch.cat(parts) for parts in zip(*batch_of(lens, group, hk, d, dtype), strict=True))
    dout = rand(7, *q.shape, dtype=dtype, device=DEVICE)
    at = cu(lens, DEVICE)

    def run(op: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        out = op(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]

    op = lambda q, k, v: ops.attention(q, k, v, at, max_seqlen_q=300, window=window)[0]
    exact = run(lambda q, k, v: truth(q, k, v, at, at, window)[0], torch.float64)
    ours = run(op, dtype)
    with ops.stock():
        base = run(op, dtype)
    for name, o, e, b in zip(("out", "dq", "dk", "dv"), ours, exact, base, strict=True):
        assert_accurate(o, e, b, name)
    lse = ops.attention(q, k, v, at, max_seqlen_q=300, window=window)[1]
    top = truth(q.double(), k.double(), v.double(), at, at, window)[1]
    assert_accurate(lse, top, None, "lse", dtype=torch.float32)


@by_shape
@pytest.mark.parametrize("split", (128, 2048))
def test_every_path_gives_the_same_bits(
    group: int, hk: int, d: int, dtype: torch.dtype, window: int | None, split: int, record: Record
) -> None:
    batch, seen = batch_of(LENS, group, hk, d, dtype), Compared()
    for chunk, page in ((37, 16), (256, 64), (100, 5), (190, 48)):
        for tokens in check_paths(batch, cuts_of(LENS, chunk), page, window=window, split=split):
            seen.add(tokens)
    record(**vars(seen))


@by_shape
@pytest.mark.parametrize("split", (64, 2048))
def test_decode_token_by_token(
    group: int, hk: int, d: int, dtype: torch.dtype, window: int | None, split: int, record: Record
) -> None:
    lens = [150, 40, 290]
    batch = batch_of(lens, group, hk, d, dtype)
    cuts = [[n - 30, *range(n - 29, n + 1)] for n in lens]
    found, expected = paged(batch, cuts, 16, window=window, split=split), packed(batch, window=window, split=split)
    seen = Compared()
    seen.add(same(found, expected, "decode"))
    record(**vars(seen))


@pytest.mark.parametrize("d", (64, 128))
def test_decode_across_default_splits(d: int, record: Record) -> None:
    n = 5000
    batch = batch_of([n, 2049, 90], 4, 2, d, torch.bfloat16)
    cuts = [[n - 3, n - 2, n - 1, n], [2047, 2048, 2049], [88, 89, 90]]
    expected, seen = packed(batch), Compared()
    seen.add(same(paged(batch, cuts, 16), expected, "long decode"))
    seen.add(same(packed(batch[:1]), expected[:1], "alone"))
    record(**vars(seen))


def test_control_stock_decode_differs_from_prefill() -> None:
    batch = batch_of([400, 333], 2, 8, 128, torch.bfloat16)
    run = lambda: same(paged(batch, [[390, *range(391, 401)], [333]], 16), packed(batch), "decode")
    run()
    with ops.stock():
        assert differs(run)


@pytest.mark.parametrize("d", (64, 128))
@pytest.mark.parametrize("split", (128, 2048))
def test_bits_do_not_depend_on_tiles(d: int, split: int, record: Record) -> None:
    from rlkernel.kernels.triton.attention import attention
    from rlkernel.kernels.triton.attention_tiles import Tile, forward_tile
    from rlkernel.kernels.triton.common import family

    batch = batch_of(LENS, 2, 4, d, torch.bfloat16)
    q, k, v = (torch.cat(parts) for parts in zip(*batch, strict=True))
    at = cu(LENS, DEVICE)
    kind = family(q)
    tiles = {forward_tile(rows, d, 2, kind) for rows in (1, 64, 10**6)}
    if kind == "hopper":
        tiles |= {Tile(32, 1, 2), Tile(128, 4, 2), Tile(64, 4, 1), Tile(16, 1, 1)}
        tiles |= {Tile(16, 1, 2, tma=False), Tile(64, 4, 3, tma=False), Tile(128, 8, 3, tma=False)}
    runs = [attention(q, k, v, at, at, 700, 700, d**-0.5, None, split, tile=tile) for tile in sorted(tiles)]
    seen = Compared()
    for tile, run in zip(sorted(tiles)[1:], runs[1:], strict=True):
        seen.add(same([run], runs[:1], f"{tile} against {min(tiles)}"))
    record(**vars(seen))


@pytest.mark.parametrize(
    "group,d,dtype,padded",
    (
        (1, 128, torch.bfloat16, False),
        (2, 128, torch.bfloat16, True),
        (3, 128, torch.float16, False),
        (7, 64, torch.bfloat16, True),
    ),
)
def test_long_prefill_schedules_equal_the_anchor(
    group: int, d: int, dtype: torch.dtype, padded: bool, record: Record
) -> None:
    """With partial splits and blocks, over packed and over padded keys; memory behind the keys holds NaN."""
    seen = Compared()
    for queries, keys in (
        ([5, 700, 1, 2049, 333, 3000], [5, 2900, 4100, 2049, 333, 6001]),
        ([1000, 64, 1, 777], [1000, 128, 90, 2048]),
        ([1, 1, 2500, 1, 0], [3000, 1, 2500, 64, 0]),
        ([4096], [4096]),
    ):
        for split in (64, 128, 2048):
            for stride in (0, -(-max(keys) // 64) * 64) if padded else (0,):
                given = prefill_of(queries, keys, group, d, dtype, split, stride)
                seen += check_long_prefill(given, f"{queries} queries, key stride {stride}")
    record(**vars(seen))


def prefill_of(
    queries: list[int], keys: list[int], group: int, d: int, dtype: torch.dtype, split: int, stride: int
) -> list[Any]:
    """Arguments of long prefill; rows behind the keys hold NaN.

    Keys of sequence i start at row i * stride; with stride 0 they are packed.
    """
    rows = stride * len(keys) or sum(keys)
    q = rand(0, sum(queries), 2 * group, d, dtype=dtype, device=DEVICE)
    k, v = (rand(i, rows + 64, 2, d, dtype=dtype, device=DEVICE) for i in (1, 2))
    for x in (k, v):
        x[rows:] = torch.nan
        for i, n in enumerate(keys if stride else ()):
            x[i * stride + n : (i + 1) * stride] = torch.nan
    lens = torch.tensor(keys, dtype=torch.int32, device=DEVICE) if stride else cu(keys, DEVICE)
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, device=DEVICE)
    return [q, k, v, cu(queries, DEVICE), lens, max(queries), max(keys), d**-0.5, split, stride, out, lse]


def check_long_prefill(given: list[Any], what: str) -> Compared:
    from rlkernel.kernels.cuda import attention as module

    spec, seen = module.prefill.spec, Compared()
    key = spec.shape(*given)
    fresh = lambda: [*given[:10], *(torch.full_like(x, torch.nan) for x in given[10:])]
    spec.anchor(*(wanted := fresh()))
    assert all(torch.isfinite(x).all() for x in wanted[10:])
    for schedule in spec.schedules:
        if schedule.supports(key):
            run = schedule.bind(key)
            for _ in range(3):
                run(*(found := fresh()))
                seen.rows(found[10:], wanted[10:], f"out, lse by {schedule.name}: {what}, split {given[8]}")
    return seen


on_hopper = pytest.mark.skipif(not HOPPER, reason="only Hopper has schedules for long prefill")


@on_hopper
def test_long_queries_without_keys() -> None:
    """The values are undefined, but nothing fails, although CUDA refuses a tensor map of 0 rows."""
    q = torch.randn(2000, 16, 128, device=DEVICE).bfloat16()
    none = torch.empty(0, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    borders = torch.tensor([0, 2000], dtype=torch.int32, device=DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.attention(q, none, none, borders, torch.zeros_like(borders), max_seqlen_q=2000, max_seqlen_k=0)
        torch.cuda.synchronize()


@on_hopper
def test_long_prefill_is_certified_and_chosen(record: Record) -> None:
    """Packed and from pages, a certified schedule faster than the anchor runs; switching it off changes no bit."""
    from rlkernel.kernels import scheduled_op
    from rlkernel.kernels.cuda import attention as module

    batch = batch_of([4500, 3000, 70], 2, 8, 128, torch.bfloat16)
    seen = Compared()
    runs = {"packed": lambda: packed(batch), "pages": lambda: paged(batch, [[4500], [3000], [70]], 16)}
    for name, run in runs.items():
        assert faster_schedule(module.prefill, run) in ("hopper", "hopper.skip")
        found = run()
        with scheduled_op.without():
            seen.add(same(found, run(), f"{name}, without schedules"))
        with scheduled_op.without("hopper.skip"):
            seen.add(same(found, run(), f"{name} without hopper.skip"))
    verdicts = [v for v in module.prefill.verdicts() if v.identity["shape"]["heads"] == 16]
    assert {v.identity["shape"]["padded"] for v in verdicts} == {False, True}
    for verdict in verdicts:
        trials = {trial.name: trial for trial in verdict.trials}
        assert {"hopper", "hopper.skip"} <= set(trials) and all(t.certified for t in trials.values()), trials
    record(**vars(seen))


@on_hopper
@pytest.mark.parametrize("padded", (False, True), ids=("packed", "padded"))
@pytest.mark.parametrize("d", (64, 128))
def test_invalid_cu_seqlens_write_nothing_outside_in_long_prefill(d: int, padded: bool) -> None:
    """The values are undefined, but kernels end and write only to out and lse, which are allocated between sevens."""
    from rlkernel.kernels.cuda import attention as module

    t, low, high = 600, -(2**31), 2**31 - 1
    given = prefill_of([200, 400], [900, 2500], 2, d, torch.bfloat16, 128, 2560 if padded else 0)
    framed = []
    for x in given[10:]:
        whole = torch.full((3 * x.numel(),), 7, dtype=x.dtype, device=DEVICE)
        framed.append(whole)
        given[10 + len(framed) - 1] = whole[x.numel() : 2 * x.numel()].view(x.shape)
    lens = ([2560, 5000], [high, -3], [low, high]) if padded else ([0, 900, 9000], [900, 100, 3400], [low, high, 5])
    key = module.prefill.spec.shape(*given)
    for borders in ([0, 200, t], [0, 200, 900], [-30, 200, t], [t, 100, t], [700, high, t], [low, high, t]):
        for some in lens:
            given[3], given[4] = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (borders, some))
            for schedule in module.prefill.spec.schedules:
                if schedule.supports(key):
                    schedule.bind(key)(*given)
                    for whole, x in zip(framed, given[10:], strict=True):
                        n = x.numel()
                        assert (whole[:n] == 7).all() and (whole[2 * n :] == 7).all(), (schedule.name, borders, some)


@on_hopper
def test_long_prefill_at_any_address_and_in_a_graph() -> None:
    from rlkernel.kernels.cuda import attention as module

    given = prefill_of([1500, 3], [3000, 2500], 2, 128, torch.bfloat16, 2048, 0)
    spec = module.prefill.spec
    spec.anchor(*given)
    wanted = [x.clone() for x in given[10:]]
    unaligned = torch.empty(given[0].numel() + 1, dtype=torch.bfloat16, device=DEVICE)[1:].view(given[0].shape)
    for schedule in spec.schedules:
        run = schedule.bind(spec.shape(*given))
        shifted = [unaligned.copy_(given[0]), *given[1:]]
        run(*shifted)
        same([tuple(given[10:])], [tuple(wanted)], f"{schedule.name}, q at another address")
        run(*given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(*given)
        for _ in range(3):
            for x in given[10:]:
                x.fill_(torch.nan)
            graph.replay()
            same([tuple(given[10:])], [tuple(wanted)], f"{schedule.name}, replayed")


@by_shape
def test_gradients_do_not_depend_on_packing(
    group: int, hk: int, d: int, dtype: torch.dtype, window: int | None, record: Record
) -> None:
    check_gradients(batch_of(LENS, group, hk, d, dtype), [3, 0, 4, 1, 2], window=window)
    record(cases=len(LENS), tokens=sum(LENS), mismatches=0)


def test_gradients_do_not_depend_on_tiles() -> None:
    q, k, v = batch_of([700], 2, 4, 128, torch.bfloat16)[0]
    at = cu([700], DEVICE)
    out, lse = ops.attention(q, k, v, at, max_seqlen_q=700)
    from rlkernel.kernels.triton.attention_backward import attention_backward as op

    given = (rand(5, *q.shape, dtype=q.dtype, device=DEVICE), q, k, v, out, lse, at, at, 700, 700, 128**-0.5, None)
    expected = op(*given)
    for rows, walked, warps in ((64, 64, 4), (32, 32, 4), (128, 32, 8)):
        launch = {"BLOCK_M": rows, "BLOCK_N": walked, "num_warps": warps, "num_stages": 2}
        for name, a, b in zip(("dq", "dk", "dv"), op(*given, tiles=(launch, launch)), expected, strict=True):
            assert_bitwise(a, b, f"{name} {launch}")


@pytest.mark.parametrize("d", (64, 128))
def test_bits_do_not_depend_on_memory_layout(d: int) -> None:
    """Slices of a fused projection, and rows whose addresses TMA cannot read, against contiguous ones."""
    lens, heads = [200, 65], (8, 4, 4)
    at = cu(lens, DEVICE)
    fused = rand(0, sum(lens), sum(heads), d, dtype=torch.bfloat16, device=DEVICE)
    unaligned = torch.empty(fused.numel() + 4, dtype=fused.dtype, device=DEVICE)[4:].view(fused.shape).copy_(fused)
    dout = rand(1, sum(lens), heads[0], d, dtype=torch.bfloat16, device=DEVICE)

    def run(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out, lse = ops.attention(*leaves, at, max_seqlen_q=200)
        return [out, lse, *torch.autograd.grad(out, leaves, dout)]

    expected = run(*(t.contiguous() for t in fused.split(heads, 1)))
    for what, x in (("fused", fused), ("unaligned", unaligned)):
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), run(*x.split(heads, 1)), expected, strict=True):
            assert_bitwise(a, b, f"{name} of {what} rows")


@by_shape
def test_a_sequence_does_not_depend_on_its_neighbours(
    group: int, hk: int, d: int, dtype: torch.dtype, window: int | None
) -> None:
    """Loaded blocks reach past a sequence's end, where a NaN must not change its result."""
    lens = [100, 130, 60]
    batch = batch_of(lens, group, hk, d, dtype)
    douts = [rand(900 + i, *s.q.shape, dtype=dtype, device=DEVICE) for i, s in enumerate(batch)]
    alone = packed(batch[1:2], window=window)
    grads = gradients(batch[1:2], douts[1:2], window=window)[0]
    for i in (0, 2):
        for t in (*batch[i], douts[i]):
            t.fill_(torch.nan)
    same(packed(batch, window=window)[1:2], alone, "between NaNs")
    for name, a, b in zip(("dq", "dk", "dv"), gradients(batch, douts, window=window)[1], grads, strict=True):
        assert_bitwise(a, b, f"{name} between NaNs")


def test_backward_is_deterministic(record: Record) -> None:
    batch = batch_of([1500, 37, 800], 4, 2, 128, torch.bfloat16)
    douts = [rand(i, *s.q.shape, dtype=s.q.dtype, device=DEVICE) for i, s in enumerate(batch)]
    first = gradients(batch, douts)
    for _ in range(50):
        for found, expected in zip(gradients(batch, douts), first, strict=True):
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a.view(torch.int16), b.view(torch.int16))
    record(cases=50, tokens=50 * sum(s.q.shape[0] for s in batch), mismatches=0)


def test_max_seqlen_may_exceed_the_longest_sequence() -> None:
    batch = batch_of([300, 5], 2, 4, 128, torch.bfloat16)
    q, k, v = (torch.cat(parts) for parts in zip(*batch, strict=True))
    out = ops.attention(q, k, v, cu([300, 5], DEVICE), max_seqlen_q=20000)
    same([out], [ops.attention(q, k, v, cu([300, 5], DEVICE), max_seqlen_q=300)], "max_seqlen 20000")


def test_decode_runs_in_a_graph_and_does_not_synchronize() -> None:
    s = batch_of([64], 2, 4, 128, torch.bfloat16)[0]
    pages, page = 40, 16
    caches = [rand(i, pages, page, 4, 128, dtype=torch.bfloat16, device=DEVICE) for i in (1, 2)]
    q, k, v = (t[:2].clone() for t in s)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).int().view(2, 20).to(DEVICE)
    lens = torch.tensor([300, 17], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([4, -1], device=DEVICE)
    at = cu([1, 1], DEVICE)

    def step() -> tuple[Tensor, Tensor]:
        ops.store_kv_(*caches, k, v, slots)
        return ops.paged_attention(q, *caches, table, at, lens, max_seqlen_q=1, max_seqlen_k=320, split=64)

    expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    same([captured], [expected], "replayed")
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu_memory(13)
def test_cache_of_more_than_2_to_the_31_elements() -> None:
    """Offsets of the last pages do not fit into 32 bits."""
    page, hk, d = 16, 1, 128
    pages = (1 << 31) // (page * hk * d) + 8
    caches = [torch.empty(pages, page, hk, d, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    s = batch_of([100], 2, hk, d, torch.bfloat16)[0]
    table = torch.arange(pages - 7, pages, dtype=torch.int32, device=DEVICE)[None]
    slots = (pages - 7) * page + torch.arange(100, device=DEVICE)
    ops.store_kv_(*caches, s.k, s.v, slots)
    lens = torch.tensor([100], dtype=torch.int32, device=DEVICE)
    found = ops.paged_attention(s.q, *caches, table, cu([100], DEVICE), lens, max_seqlen_q=100, max_seqlen_k=100)
    same([found], packed([s]), "far pages")


def test_close_to_the_cpu() -> None:
    options: dict[str, Any] = {"window": 70, "split": 128}
    on_cpu = packed(sequences([200, 31], 2, 2, 64, torch.bfloat16), **options)
    on_gpu = packed(batch_of([200, 31], 2, 2, 64, torch.bfloat16), **options)
    for (a, top), (b, expected) in zip(on_gpu, on_cpu, strict=True):
        assert_accurate(a, b, None, "out")
        assert_accurate(top, expected, None, "lse")
