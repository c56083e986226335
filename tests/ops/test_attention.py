"""attention: accurate against fp64; training, chunked prefill and paged decode give a token the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_paths import (
    Sequence,
    check_gradients,
    check_paths,
    cu,
    cuts_of,
    gradients,
    packed,
    paged,
    same,
    sequences,
    truth,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import (
    DTYPES,
    assert_compiles,
    assert_reference_equal,
    by_dtype,
    differs,
    forward_backward,
    rand,
    threads,
    with_threads,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from rlkernel import ops
from rlkernel.contract import assert_accurate, assert_bitwise
from rlkernel.contract.orders import ATTENTION_SPLIT

properties = settings(max_examples=20, deadline=None, derandomize=True)
lengths = st.lists(st.integers(1, 200), min_size=1, max_size=4)
windows = st.one_of(st.none(), st.integers(1, 150))
splits = st.sampled_from((64, 128, ATTENTION_SPLIT))
groups = st.integers(1, 8)
head_dims = st.sampled_from((16, 24, 32, 64, 80, 128))
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**16)


# ---- right

CASES = (
    # group, hk, d, window, split, queries, keys
    (1, 2, 16, None, 64, [70, 1, 129], [70, 1, 129]),
    (4, 2, 32, None, 128, [5, 60], [77, 140]),
    (7, 1, 80, 20, 64, [3, 130], [9, 130]),
    (2, 1, 128, 5, 2048, [65], [65]),
    (1, 1, 24, None, 64, [1, 2], [200, 67]),
)


@by_dtype
@pytest.mark.parametrize("group,hk,d,window,split,queries,keys", CASES)
def test_accuracy(
    dtype: torch.dtype, group: int, hk: int, d: int, window: int | None, split: int, queries: list[int], keys: list[int]
) -> None:
    shapes = ((sum(queries), group * hk, d), (sum(keys), hk, d), (sum(keys), hk, d))
    q, k, v = (rand(i, *shape, dtype=dtype) for i, shape in enumerate(shapes))
    dout = rand(3, *shapes[0], dtype=dtype)
    limits = {"max_seqlen_q": max(queries), "max_seqlen_k": max(keys), "window": window, "split": split}
    run = lambda q, k, v: ops.attention(q, k, v, cu(queries), cu(keys), **limits)[0]
    exact = lambda q, k, v: truth(q, k, v, cu(queries), cu(keys), window)[0]
    ours = forward_backward(run, (q, k, v), (dout,))
    with ops.stock():
        base = forward_backward(run, (q, k, v), (dout,))
    wide = forward_backward(exact, (q.double(), k.double(), v.double()), (dout,))
    for name, o, b, w in zip(("out", "dq", "dk", "dv"), ours, base, wide, strict=True):
        assert_accurate(o, w, b, f"{name} {dtype} H={group * hk} HK={hk} D={d}", dtype=dtype)
    lse = ops.attention(q, k, v, cu(queries), cu(keys), **limits)[1]
    expected = truth(q.double(), k.double(), v.double(), cu(queries), cu(keys), window)[1]
    assert_accurate(lse, expected, None, "lse", dtype=torch.float32)


def test_one_key_returns_its_value() -> None:
    s = sequences([1], 3, 2, 32, torch.bfloat16)[0]
    out, lse = packed([s])[0]
    assert_bitwise(out, s.v.repeat_interleave(3, 1), "softmax over one key")
    score = (s.q.float() * s.k.float().repeat_interleave(3, 1)).sum(-1) * 32**-0.5
    assert torch.allclose(lse, score, atol=1e-5)


@by_dtype
@pytest.mark.parametrize(
    "group,hk,d,window,split,queries,keys",
    (
        (1, 2, 16, None, 64, [66, 1], [66, 1]),
        (3, 1, 32, 40, 64, [5, 20], [140, 20]),
        (2, 2, 20, None, 128, [1, 30], [150, 130]),
        (8, 1, 72, 5, 2048, [9], [12]),
    ),
)
def test_reference_equals_cpp(
    dtype: torch.dtype, group: int, hk: int, d: int, window: int | None, split: int, queries: list[int], keys: list[int]
) -> None:
    q = rand(0, sum(queries), group * hk, d, dtype=dtype)
    k, v = rand(1, sum(keys), hk, d, dtype=dtype), rand(2, sum(keys), hk, d, dtype=dtype)
    limits = {"max_seqlen_q": max(queries), "max_seqlen_k": max(keys), "window": window, "split": split}

    def dense() -> list[Tensor]:
        run = lambda q, k, v: ops.attention(q, k, v, cu(queries), cu(keys), **limits)[0]
        out = forward_backward(run, (q, k, v), (rand(3, *q.shape, dtype=dtype),))
        return [*out, ops.attention(q, k, v, cu(queries), cu(keys), **limits)[1]]

    assert_reference_equal(dense, f"attention {dtype} D={d}")
    batch = [Sequence(rand(4, n, group * hk, d, dtype=dtype), *rand(5, 2, n, hk, d, dtype=dtype)) for n in queries]
    pages = lambda: [t for pair in paged(batch, cuts_of(queries, 25), 7, window=window, split=split) for t in pair]
    assert_reference_equal(pages, f"paged_attention {dtype} D={d}")


# ---- invariant


@properties
@given(lengths, groups, st.integers(1, 2), head_dims, dtypes, windows, splits, st.data())
def test_every_path_gives_the_same_bits(
    lens: list[int], group: int, hk: int, d: int, dtype: torch.dtype, window: int | None, split: int, data: Any
) -> None:
    cuts = []
    for n in lens:
        inner = data.draw(st.lists(st.integers(1, max(1, n - 1)), max_size=6, unique=True)) if n > 1 else []
        cuts.append(sorted({*inner, n}))
    page = data.draw(st.sampled_from((1, 3, 16, 64, 100)))
    batch = sequences(lens, group, hk, d, dtype, data.draw(seeds))
    check_paths(batch, cuts, page, window=window, split=split)


@by_dtype
def test_every_path_control(dtype: torch.dtype) -> None:
    lens = [150, 33, 150]
    run = lambda: check_paths(sequences(lens, 2, 2, 32, dtype), cuts_of(lens, 37), 16)
    run()
    with ops.stock():
        assert differs(run)


@properties
@given(st.integers(2, 150), groups, head_dims, dtypes, windows, splits, st.integers(1, 20), seeds)
def test_decode_token_by_token(
    n: int, group: int, d: int, dtype: torch.dtype, window: int | None, split: int, page: int, seed: int
) -> None:
    prompt = 1 + seed % (n - 1)
    batch = sequences([n, prompt], group, 2, d, dtype, seed)
    cuts = [[prompt, *range(prompt + 1, n + 1)], [prompt]]
    expected = packed(batch, window=window, split=split)
    same(paged(batch, cuts, page, window=window, split=split), expected, "decode")


def test_decode_control() -> None:
    batch = sequences([90], 2, 2, 64, torch.float32)
    run = lambda: same(paged(batch, [[70, *range(71, 91)]], 16), packed(batch), "decode")
    run()
    with ops.stock():
        assert differs(run)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_beyond_the_default_split(dtype: torch.dtype) -> None:
    n = ATTENTION_SPLIT + 70
    batch = sequences([n, 40], 2, 1, 16, dtype)
    expected = packed(batch)
    cuts = [[1000, ATTENTION_SPLIT - 1, ATTENTION_SPLIT, ATTENTION_SPLIT + 1, ATTENTION_SPLIT + 65, n], [39, 40]]
    same(paged(batch, cuts, 16), expected, "across the split")
    same(packed(batch[:1]), expected[:1], "alone")


def test_the_split_changes_the_bits() -> None:
    batch = sequences([200], 2, 2, 32, torch.float32)
    assert differs(lambda: same(packed(batch, split=64), packed(batch, split=128), "split"))
    first = [(o[:64], top[:64]) for o, top in packed(batch, split=64)]
    same(first, [(o[:64], top[:64]) for o, top in packed(batch, split=128)], "rows inside the first split")


@properties
@given(lengths, groups, st.integers(1, 2), head_dims, dtypes, windows, splits, seeds)
def test_gradients_do_not_depend_on_packing(
    lens: list[int], group: int, hk: int, d: int, dtype: torch.dtype, window: int | None, split: int, seed: int
) -> None:
    order = torch.randperm(len(lens), generator=torch.Generator().manual_seed(seed)).tolist()
    check_gradients(sequences(lens, group, hk, d, dtype, seed), order, window=window, split=split)


@properties
@given(st.integers(1, 200), st.integers(1, 200), groups, head_dims, dtypes, windows, seeds)
def test_gradients_of_a_suffix(
    queries: int, past: int, group: int, d: int, dtype: torch.dtype, window: int | None, seed: int
) -> None:
    """Rows with a zero upstream gradient add nothing: the last rows alone give dk and dv of the full sequence."""
    n = past + queries
    s = sequences([n], group, 1, d, dtype, seed)[0]
    dout = rand(seed + 5, n, group, d, dtype=dtype)
    dout[:past] = 0
    dq, dk, dv = gradients([s], [dout], window=window)[0]
    q, k, v = s.q[past:].clone().requires_grad_(), s.k.clone().requires_grad_(), s.v.clone().requires_grad_()
    out, _ = ops.attention(q, k, v, cu([queries]), cu([n]), max_seqlen_q=queries, max_seqlen_k=n, window=window)
    part = torch.autograd.grad(out, (q, k, v), dout[past:])
    for name, a, b in zip(("dq", "dk", "dv"), part, (dq[past:], dk, dv), strict=True):
        assert_bitwise(a + 0, b + 0, name)  # + 0: a skipped row leaves -0 as it is, an added zero makes it +0


@pytest.mark.parametrize("window", (70, 2**31 - 1, 2**31, 2**63 - 1))
def test_a_window_as_wide_as_the_sequence_is_no_window(window: int) -> None:
    """`sys.maxsize` means no window, as None does, in forward and backward."""
    batch = sequences([70, 5], 2, 1, 16, torch.float32)
    douts = [rand(i, *s.q.shape) for i, s in enumerate(batch)]
    same(packed(batch, window=window), packed(batch), "forward")
    for found, wanted in zip(gradients(batch, douts, window=window), gradients(batch, douts), strict=True):
        for name, a, b in zip(("dq", "dk", "dv"), found, wanted, strict=True):
            assert_bitwise(a, b, name)


@by_dtype
def test_threads_are_free(dtype: torch.dtype) -> None:
    batch = sequences([130, 64, 3, 100], 3, 2, 48, dtype)
    douts = [rand(i, *s.q.shape, dtype=dtype) for i, s in enumerate(batch)]
    run = lambda: [t for parts in gradients(batch, douts, window=90) for t in parts]
    for a, b in zip(with_threads(1, run), with_threads(2, run), strict=True):
        assert_bitwise(a, b, "gradients on 1 and 2 threads")
    decode = lambda: [t for pair in paged(batch, cuts_of([130, 64, 3, 100], 50), 16, split=64) for t in pair]
    for a, b in zip(with_threads(1, decode), with_threads(2, decode), strict=True):
        assert_bitwise(a, b, "paged on 1 and 2 threads")


@properties
@given(st.integers(1, 90), groups, st.sampled_from((16, 40)), dtypes, seeds)
def test_strides_and_launch_limits_are_free(n: int, group: int, d: int, dtype: torch.dtype, seed: int) -> None:
    hk = 2
    fused = rand(seed, n, (group + 2) * hk, d, dtype=dtype)
    q, k, v = fused.split((group * hk, hk, hk), dim=1)
    plain = packed([Sequence(q.contiguous(), k.contiguous(), v.contiguous())])
    out = ops.attention(q, k, v, cu([n]), max_seqlen_q=1000)
    same([out], plain, "slices of a fused projection, larger max_seqlen")
    turned = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v)]
    same([ops.attention(*turned, cu([n]), max_seqlen_q=n)], plain, "heads outside")


def test_what_a_row_does_not_see_cannot_reach_it() -> None:
    s = sequences([100], 2, 1, 32, torch.float32)[0]
    clean = packed([s], window=30)[0]
    s.k[50], s.v[50] = torch.nan, torch.inf
    dirty = packed([s], window=30)[0]
    seen = torch.zeros(100, dtype=torch.bool)
    seen[50:80] = True
    for a, b in zip(dirty, clean, strict=True):
        assert_bitwise(a[~seen], b[~seen], "rows that do not see key 50")
        assert bool(a[seen].isnan().all())
    s.q[7] = torch.nan
    for a in packed([s])[0]:
        assert bool(a[7].isnan().all()) and bool(a[:7].isfinite().all())


def test_wide_scores() -> None:
    """Scores in the thousands: the largest key wins, nothing overflows, distant empty blocks stay the identity."""
    s = sequences([300], 1, 1, 64, torch.float32)[0]
    batch = [Sequence(s.q * 60, s.k * 60, s.v)]
    out, lse = packed(batch, split=64)[0]
    exact, top = truth(*(t.double() for t in batch[0]), cu([300]), cu([300]), None)
    assert_accurate(out, exact, None, "out")
    assert_accurate(lse, top, None, "lse")
    check_paths(batch, [[10, 99, 300]], 16, split=64)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=("fp32", "bf16"))
def test_scores_that_leave_no_probability(dtype: torch.dtype) -> None:
    """From 2^31 on a score's rounding exceeds the range of exp2: never the values of another call, and the reference's
    bits in either direction."""
    q, k, v = (rand(i, 40, 1, 64, dtype=dtype) * size for i, size in enumerate((1e5, 1e5, 1.0)))
    v, borders, others = v.abs() + 1.0, cu([1] * 40), cu([40])  # one key each

    def run(other: float = 0.0) -> list[Tensor]:
        leave = torch.full((40, 1, 64), other, dtype=dtype)
        ops.attention(leave, leave, leave, others, max_seqlen_q=40)
        op = lambda *tensors: ops.attention(*tensors, borders, max_seqlen_q=1)[0]
        return [t.nan_to_num(0.5) for t in forward_backward(op, (q, k, v), (v,))]  # a NaN's sign is free

    def decode(other: float = 0.0) -> tuple[Tensor, Tensor]:
        lengths = torch.ones(40, dtype=torch.int32)
        table = torch.arange(40, dtype=torch.int32)[:, None]
        caches = (t[:, None] for t in (k, v))
        leave = torch.full((40, 1, 64), other, dtype=dtype)
        ops.attention(leave, leave, leave, others, max_seqlen_q=40)
        out, lse = ops.paged_attention(q, *caches, table, borders, lengths, max_seqlen_q=1, max_seqlen_k=1)
        return out.nan_to_num(0.5), lse

    with threads(1):
        out, lse = decode()
        gone = lse == -torch.inf
        assert 5 < int(gone.sum()) < 35
        assert not out[gone[:, 0]].any()
        for call in (run, decode):
            for a, b in zip(call(123.0), call(777.0), strict=True):
                assert_bitwise(a, b, "after other calls")
            assert_reference_equal(call, "scores without probabilities")


# ---- store_kv_


@properties
@given(st.integers(0, 40), st.sampled_from((1, 5, 16)), dtypes, seeds)
def test_store_kv(t: int, page: int, dtype: torch.dtype, seed: int) -> None:
    pages = 2 + 40 // page
    k_cache, v_cache = rand(seed, 2, pages, page, 2, 16, dtype=dtype)
    fused = rand(seed + 1, t, 4, 16, dtype=dtype)
    k, v = fused.split((2, 2), dim=1)
    slots = torch.randperm(pages * page, generator=torch.Generator().manual_seed(seed))[:t]
    slots[::5] = -1
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected_k[slot // page, slot % page], expected_v[slot // page, slot % page] = k[i], v[i]

    def run() -> list[Tensor]:
        caches = k_cache.clone(), v_cache.clone()
        ops.store_kv_(*caches, k, v, slots)
        return list(caches)

    assert_reference_equal(run, "store_kv_")
    for found, wanted in zip(run(), (expected_k, expected_v), strict=True):
        assert_bitwise(found, wanted, "cache")


# ---- torch's machinery


def test_opcheck() -> None:
    r = torch.ops.rlkernel
    q, k, v = (rand(i, 9, h, 16).requires_grad_() for i, h in enumerate((4, 2, 2)))
    lens = cu([3, 6])
    torch.library.opcheck(r.attention.default, (q, k, v, lens, lens, 6, 6, 0.25, None, 64))
    out, lse = r.attention(q, k, v, lens, lens, 6, 6, 0.25, 4, 64)
    assert out.requires_grad and not lse.requires_grad
    plain = tuple(t.detach() for t in (out, q, k, v, out, lse))
    torch.library.opcheck(r.attention_backward.default, (*plain, lens, lens, 6, 6, 0.25, 4))
    cache = rand(4, 2, 5, 4, 2, 16)
    table = torch.tensor([[0, -1], [2, 4]], dtype=torch.int32)
    keys = torch.tensor([3, 6], dtype=torch.int32)
    torch.library.opcheck(
        r.paged_attention.default, (q.detach(), cache[0], cache[1], table, lens, keys, 6, 6, 0.25, None, 64)
    )
    slots = torch.tensor([3, -1, 7, 8, 0, 11, 2, 5, 19])
    torch.library.opcheck(r.store_kv_.default, (cache[0].clone(), cache[1].clone(), k.detach(), v.detach(), slots))


def test_compiles() -> None:
    lens = cu([40, 30])
    run = lambda q, k, v: ops.attention(q, k, v, lens, max_seqlen_q=40, window=20, split=64)[0]
    inputs = tuple(rand(i, 70, h, 32, dtype=torch.bfloat16) for i, h in enumerate((4, 2, 2)))
    assert_compiles(run, inputs, (rand(9, 70, 4, 32),))


def test_empty_sequences() -> None:
    s = sequences([6], 2, 1, 16, torch.float32)[0]
    out = ops.attention(*s, cu([0, 2, 0, 4, 0]), max_seqlen_q=4)
    expected = ops.attention(*s, cu([2, 4]), max_seqlen_q=4)
    same([out], [expected], "sequences without tokens")
    q = s.q[:0].requires_grad_()
    k = s.k.clone().requires_grad_()
    out, _ = ops.attention(q, k, s.v, cu([0]), cu([6]), max_seqlen_q=0, max_seqlen_k=6)
    dq, dk = torch.autograd.grad(out, (q, k), out)
    assert dq.shape == q.shape and not bool(dk.any())


# ---- bad input

GOOD = {"q": rand(0, 6, 4, 16), "k": rand(1, 6, 2, 16), "v": rand(2, 6, 2, 16), "cu_seqlens_q": cu([2, 4])}


@pytest.mark.parametrize(
    "change,error,match",
    (
        ({"q": rand(0, 6, 64)}, ValueError, "q is"),
        ({"v": rand(0, 5, 2, 16)}, ValueError, "v \\(5"),
        ({"q": rand(0, 6, 5, 16)}, ValueError, "H=5"),
        ({"q": rand(0, 6, 4, 24)}, ValueError, "head dim"),
        ({"q": rand(0, 6, 4, 16).bfloat16()}, ValueError, "bfloat16"),
        ({"k": rand(0, 7, 2, 16), "v": rand(0, 7, 2, 16)}, ValueError, "cu_seqlens_k"),
        ({"cu_seqlens_q": cu([2, 4]).long()}, TypeError, "cu_seqlens_q"),
        ({"cu_seqlens_q": cu([2, 5])}, ValueError, "cu_seqlens_q must rise from 0 to T=6"),
        ({"cu_seqlens_q": cu([2, -1, 5])}, ValueError, "cu_seqlens_q must rise from 0 to T=6"),
        (
            {"cu_seqlens_k": cu([2, 5]), "max_seqlen_k": 6},
            ValueError,
            "cu_seqlens_k must rise from 0 to S=6",
        ),
        ({"cu_seqlens_k": cu([2, 4])}, ValueError, "max_seqlen_k"),
        ({"cu_seqlens_k": cu([3, 3]), "max_seqlen_k": 6}, ValueError, "more queries than keys"),
        ({"cu_seqlens_k": cu([6]), "max_seqlen_k": 6}, ValueError, "cu_seqlens_k"),
        ({"max_seqlen_q": 3}, ValueError, "max_seqlen_q"),
        ({"window": 0}, ValueError, "window"),
        ({"scale": 0.0}, ValueError, "scale"),
        ({"split": 100}, ValueError, "split"),
        ({"result": (rand(0, 5, 4, 16), rand(0, 5, 4))}, ValueError, "result is \\(5, 4, 16\\)"),
    ),
)
def test_bad_input(change: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments = {**GOOD, "max_seqlen_q": 4, **change}
    with pytest.raises(error, match=match):
        ops.attention(**arguments)


def test_head_dim_limit() -> None:
    wide = rand(0, 2, 1, 264)
    with pytest.raises(ValueError, match="256"):
        ops.attention(wide, wide, wide, cu([2]), max_seqlen_q=2)


@pytest.mark.parametrize(
    "change,error,match",
    (
        ({"block_table": torch.tensor([[0], [5]], dtype=torch.int32)}, ValueError, "outside the 5 pages"),
        ({"block_table": torch.tensor([[0], [-1]], dtype=torch.int32)}, ValueError, "outside the 5 pages"),
        ({"seq_lens_k": torch.tensor([2, 9], dtype=torch.int32), "max_seqlen_k": 9}, ValueError, "needs 3 pages"),
        ({"seq_lens_k": torch.tensor([2, 3], dtype=torch.int32)}, ValueError, "more queries than keys"),
        ({"seq_lens_k": torch.tensor([2, 4])}, TypeError, "seq_lens_k"),
        ({"block_table": torch.zeros(3, 1, dtype=torch.int32)}, ValueError, "block_table"),
        ({"k_cache": rand(0, 5, 4, 2, 24)}, ValueError, "k_cache"),
    ),
)
def test_bad_pages(change: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments = {
        "q": GOOD["q"], "k_cache": rand(0, 5, 4, 2, 16), "v_cache": rand(1, 5, 4, 2, 16),
        "block_table": torch.tensor([[0], [2]], dtype=torch.int32), "cu_seqlens_q": cu([2, 4]),
        "seq_lens_k": torch.tensor([2, 4], dtype=torch.int32), "max_seqlen_q": 4, "max_seqlen_k": 4, **change,
    }  # fmt: skip
    with pytest.raises(error, match=match):
        ops.paged_attention(**arguments)


def test_bad_slots() -> None:
    cache, k = rand(0, 5, 4, 2, 16), rand(1, 3, 2, 16)
    for slots, error, match in (
        (torch.tensor([0, 1, 20]), ValueError, "slot 20"),
        (torch.tensor([0, 1, 2], dtype=torch.int32), TypeError, "int64"),
        (torch.tensor([0, 1]), ValueError, "slots \\(2,\\)"),
    ):
        with pytest.raises(error, match=match):
            ops.store_kv_(cache, cache.clone(), k, k, slots)
    with pytest.raises(ValueError, match="contiguous"):
        ops.store_kv_(cache.transpose(0, 1), cache.transpose(0, 1), k, k, torch.tensor([0, 1, 2]))


def test_on_gpus_the_kernel_gets_out_and_scratch_memory_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`out` and `attention_scratch_bytes` must use the implementation that is chosen for the op on a GPU."""
    pytest.importorskip("triton")
    from rlkernel.kernels import select
    from rlkernel.kernels.triton import attention as kernels

    choice = select.choose("paged_attention", "cuda")
    monkeypatch.setattr(kernels, "family", lambda q: "hopper")
    with FakeTensorMode():
        q, k = (torch.empty(1, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (32, 8))
        most = {"tokens": 8192, "sequences": 256, "longest": 32768}
        assert ops.attention_scratch_bytes(q, k, **most) == kernels.scratch_bytes(q, k, *most.values()) > 1 << 28
    seen = []

    def kernel(*args: Any, out: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(out)
        return out, torch.zeros(2, 1)

    cpu = select._chosen
    monkeypatch.setattr(select, "_chosen", {**cpu, ("paged_attention", "cpu"): replace(choice, fn=kernel)})
    q, page = torch.ones(2, 1, 8), torch.ones(1, 4, 1, 8)
    numbers = [torch.tensor(x, dtype=torch.int32) for x in ([[0]], [0, 2], [2])]
    out = torch.empty_like(q)
    found, _ = ops.paged_attention(q, page, page, *numbers, max_seqlen_q=2, max_seqlen_k=2, out=out)
    assert found is out and seen == [out] and out._version == 1


def test_out_of_another_device_is_refused() -> None:
    q, page = torch.ones(2, 1, 8), torch.ones(1, 4, 1, 8)
    numbers = [torch.tensor(x, dtype=torch.int32) for x in ([[0]], [0, 2], [2])]
    with pytest.raises(ValueError, match="paged_attention: tensors lie on cpu and on meta; move them to one device"):
        ops.paged_attention(q, page, page, *numbers, max_seqlen_q=2, max_seqlen_k=2, out=q.to("meta"))


def test_lse_is_natural() -> None:
    s = sequences([3], 1, 1, 16, torch.float32)[0]
    lse = packed([s])[0][1][2, 0]
    scores = (s.k[:, 0] @ s.q[2, 0]) * 16**-0.5
    assert abs(float(lse) - float(scores.logsumexp(0))) < 1e-5
