"""Arguments that linear's CUDA schedules pass to their kernels: addresses, lengths, pieces; torch replaces cuBLASLt."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.linear_checks import GRAD, MOST, NONE, at, dhidden, dweight, keep_order, rand

from rlkernel.contract import assert_bitwise
from rlkernel.kernels import scheduled_op
from rlkernel.kernels.cuda import cublaslt
from rlkernel.kernels.cuda import linear as cuda
from rlkernel.kernels.cuda import linear_logprob as scoring
from rlkernel.kernels.cuda import linear_logprob_shapes as scored
from rlkernel.kernels.cuda import linear_logprob_sm90 as hopper
from rlkernel.kernels.cuda import linear_shapes as shapes
from rlkernel.kernels.scheduled_op import ScheduledOp


def memory(address: int, size: int, dtype: torch.dtype) -> Tensor:
    """A tensor over given memory."""
    bytes_ = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(address)
    return torch.frombuffer(bytes_, dtype=dtype)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Replaces cuBLASLt by torch on integers, also for few tokens; returns the heuristic's queries."""
    found: list[tuple] = []
    monkeypatch.setattr(scored, "CUBLASLT_MIN_TOKENS", 1)
    monkeypatch.setattr(cublaslt, "plan", lambda *args: (found.append(args), cublaslt.Plan(0, 0, "torch"))[1])

    def launcher(device: int, which: cublaslt.Plan) -> Callable[..., None]:
        _, _, n, _, _, a_row, b_row, a_by_k, _, dtype, out_dtype, _, _ = found[-1]

        def run(m: int, k: int, a: int, b: int, bias: None, add: bool, out: Tensor, space: None = None) -> None:
            rows, width = (k, m) if a_by_k else (m, k)
            left = memory(a, (rows - 1) * a_row + width, dtype)
            left = left.as_strided((m, k), (1, a_row) if a_by_k else (a_row, 1))
            right = memory(b, k * b_row, dtype).as_strided((k, n), (b_row, 1))
            total = left.float() @ right.float() + (out.float() if add else 0)
            out.copy_(total.to(out_dtype))

        return run

    monkeypatch.setattr(cublaslt, "launcher", launcher)
    return found


def test_the_products_of_linear_logprob_through_cublaslt(asked: list[tuple]) -> None:
    """A strided dz block: dhidden added to a sum, dweight added and fresh."""
    whole = lambda *shape: torch.randint(-4, 5, shape).bfloat16()
    dz, weight, hidden = whole(6, 48)[:, :40], whole(40, 24), whole(6, 24)
    running = torch.randint(-9, 9, (6, 24)).float()
    expected = running + dz.float() @ weight.float()
    run = scoring._cublaslt_dhidden(0).bind(scored.dhidden_shape(running, dz, weight, False, MOST)._replace(device=0))
    run(running, dz, weight, False, MOST)
    assert_bitwise(running, expected, "dhidden, added")
    for fresh, out in ((True, torch.float32), (True, torch.bfloat16), (False, torch.float32)):
        grad = torch.ones(40, 24, dtype=out)
        key = scored.dweight_shape(grad, dz, hidden, fresh, MOST)._replace(device=0)
        scoring._cublaslt_dweight(1).bind(key)(grad, dz, hidden, fresh, MOST)
        assert_bitwise(grad, (dz.float().t() @ hidden.float() + (not fresh)).to(out), f"dweight, {fresh}, {out}")
        assert asked[-1][2:3] + asked[-1][5:9] == (24, 48, 24, True, False) and asked[-1][-1] == 1
    assert not scoring._cublaslt_dweight(0).supports(
        scored.dweight_shape(grad, dz, hidden, False, NONE)._replace(device=0)
    )


def test_the_products_of_a_head_and_of_a_chunk_of_tokens(asked: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses, lengths and sums of the chunks."""
    monkeypatch.setattr(cuda, "DGRAD_CHUNK", 32)
    monkeypatch.setattr(shapes, "DGRAD_WHOLE", 64)
    whole = lambda *shape: torch.randint(-4, 5, shape).bfloat16()
    dy, w, x = whole(5, 80), whole(80, 24), whole(5, 24)
    s = shapes.dgrad_shape(dy, w, 1)._replace(device=0)
    head, _ = cuda._head(s, 0)
    assert_bitwise(head(dy, w), (dy.float() @ w.float()).bfloat16(), "three chunks, the last shorter")
    assert asked[-1][1:8] == (16, 24, 32, 1, 80, 24, False)
    explicit = next(offer.which for offer in cuda.ALGORITHM_OFFERS if offer.name == "128x128.1x2")
    assert asked[-1][-1] == 0 and cuda._head(s, explicit) and asked[-1][-1] == explicit == (66, 20, 35, 5, 3, 0, 0)
    start = torch.randint(-9, 9, (80, 24)).float()
    for fresh, out in ((True, torch.float32), (True, torch.bfloat16), (False, torch.float32)):
        grad = start.to(out, copy=True)
        onto, _ = cuda._wgrad(shapes.wgrad_shape(grad, dy, x, fresh)._replace(device=0), 0)
        onto(grad, dy, x, fresh)
        assert_bitwise(grad, (dy.float().t() @ x.float() + (0 if fresh else start)).to(out), f"tokens, {fresh}, {out}")


def whole_numbers(*shape: int) -> Tensor:
    return torch.randint(-4, 5, shape).bfloat16()


def test_a_misaligned_operand_of_linear_runs_the_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses are not part of a class, so every schedule checks them itself."""
    ran: list[str] = []
    tiles: list[Any] = []
    monkeypatch.setattr(cublaslt, "plan", lambda *args: cublaslt.Plan(0, 0, "none"))
    monkeypatch.setattr(cublaslt, "launcher", lambda device, which: lambda *_: ran.append("schedule"))
    monkeypatch.setattr(shapes, "DGRAD_WHOLE", 64)
    for module, name in (
        (cuda.anchor, "gemm"), (cuda.anchor, "linear_dgrad"), (cuda.linear_grad, "ascending"),
        (cuda.linear_grad, "wgrad_"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *_, tile=None, **rest: (ran.append("anchor"), tiles.append(tile)))
    tile = lambda offer, dgrad, head=False: cuda._tile(offer.tile, dgrad, head).bind
    forward = lambda x, w: (shapes.linear_shape(x, w, None, 1, 1, None), (x, w, None, 1, 1, None))
    dgrad = lambda dy, w: (shapes.dgrad_shape(dy, w, 1), (dy, w, 1))
    wgrad = lambda grad, dy, x: (shapes.wgrad_shape(grad, dy, x, True), (grad, dy, x, True))
    (few, *_), (head, *_) = cuda.OFFERS, cuda.HEAD_OFFERS
    for bind, call, sizes, tiled in (
        (cuda._cublaslt("0", "forward").bind, forward, ((9, 64), (48, 64)), False),
        (cuda._cublaslt("0", "dgrad").bind, dgrad, ((9, 48), (48, 64)), False),
        (cuda._cublaslt("0", "dgrad").bind, dgrad, ((9, 72), (72, 64)), False),
        (cuda._cublaslt("0", "wgrad").bind, wgrad, ((48, 64), (9, 48), (9, 64)), False),
        (tile(few, False), forward, ((9, 64), (48, 64)), True),
        (tile(few, True), dgrad, ((9, 48), (48, 64)), True),
        (tile(head, True, True), dgrad, ((9, 72), (72, 64)), True),
    ):
        for shifted in range(-1, len(sizes)):
            key, arguments = call(*(at(i == shifted, *size) for i, size in enumerate(sizes)))
            bind(key._replace(device=0))(*arguments)
            if tiled:
                assert ran.pop() == "anchor" and (tiles.pop() is None) == (shifted >= 0), "the anchor uses its own tile"
            else:
                assert set(ran) == {"anchor" if shifted >= 0 else "schedule"}, (call, shifted)
            ran.clear()


def test_a_misaligned_operand_of_linear_logprob_runs_the_anchor(
    asked: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    for name in ("tile_statistics", "dz_block", "dhidden_block", "dweight_block"):
        monkeypatch.setattr(scoring.anchor, name, lambda *_: ran.append("anchor"))
    monkeypatch.setattr(hopper, "tensor_map", lambda *_: None)
    monkeypatch.setattr(hopper, "kernel", lambda *_: None)
    monkeypatch.setattr(hopper, "_launch", lambda *_, **__: ran.append("schedule"))
    monkeypatch.setattr(cublaslt, "launcher", lambda *_: lambda *_: ran.append("schedule"))
    x, w, dz, y = (9, 64), (48, 64), rand(9, 48), torch.zeros(9, dtype=torch.int64)
    buffers = hopper.TileBuffers(9, 48, torch.device("cpu"))
    sums, ones, rows = torch.zeros(9, 64), torch.ones(9), scoring._cublaslt_dhidden(0).bind
    dhidden = scored.dhidden_shape(sums, dz, rand(*w), True, MOST)._replace(device=0)
    dweight = scored.dweight_shape(rand(*w), dz, rand(*x), True, MOST)._replace(device=0)
    tokens = scoring._cublaslt_dweight(0).bind
    for run, sizes in (
        (lambda x, w: hopper.statistics(buffers, x, w, y, None, None, None, None), (x, w)),
        (lambda x, w: hopper.dz_block(dz, x, w, y, None, None, ones, ones, ones, None, MOST, 0, 48), (x, w)),
        (lambda w: hopper.dhidden_block(sums, dz, w, True, MOST), (w,)),
        (lambda w: rows(dhidden)(sums, dz, w, True, MOST), (w,)),
        (lambda grad, x: hopper.dweight_block(grad, dz, x, True, MOST), (w, x)),
        (lambda grad, x: tokens(dweight)(grad, dz, x, True, MOST), (w, x)),
    ):
        for shifted in range(-1, len(sizes)):
            run(*(at(i == shifted, *size) for i, size in enumerate(sizes)))
            assert ran.pop() == ("anchor" if shifted >= 0 else "schedule") and not ran


def test_weight_gradients_go_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "WGRAD_TOKENS", 32)
    seen: list[tuple[int, bool]] = []

    def chunk(grad: Tensor, dy: Tensor, x: Tensor, fresh: bool) -> None:
        seen.append((dy.shape[0], fresh))
        assert grad.dtype == torch.float32 or dy.shape[0] <= 32
        total = dy.float().t() @ x.float()
        grad.copy_(total if fresh else grad + total)

    monkeypatch.setattr(cuda, "wgrad_chunk", chunk)
    dy, x = torch.randint(-4, 5, (80, 16)).bfloat16(), torch.randint(-4, 5, (80, 24)).bfloat16()
    expected = dy.float().t() @ x.float()
    assert_bitwise(cuda.linear_wgrad(dy, x), expected.bfloat16(), "rounded once")
    assert seen == [(32, True), (32, False), (16, False)]
    grad = torch.ones(16, 24)
    cuda.linear_wgrad_(grad, dy, x)
    assert_bitwise(grad, expected + 1, "main_grad continued")
    assert seen[3:] == [(32, False), (32, False), (16, False)]
    cuda.linear_wgrad(dy[:32], x[:32])
    assert seen[6:] == [(32, True)]


def no_memory(*_: Any, **__: Any) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_memory_of_a_failed_schedule_is_freed_before_its_anchor_runs(
    asked: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept error would hold its frames, and these the partial sums."""
    x, w = whole_numbers(5, 64), whole_numbers(48, 64)
    product, _ = cuda._product(shapes.linear_shape(x, w, None, 4, 1, None)._replace(device=0), 0)
    held: list[weakref.ref[Tensor]] = []

    def fold(partials: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        held.append(weakref.ref(partials))
        return no_memory()

    def anchor(*_: Any) -> Tensor:
        assert held[0]() is None, "the partial sums are freed"
        return torch.zeros(5, 48)

    monkeypatch.setattr(cuda.anchor, "fold_partials", fold)
    monkeypatch.setattr(scheduled_op, "_ops", {})
    op = ScheduledOp(dataclasses.replace(cuda.linear.spec, anchor=anchor))
    op._runs[shapes.linear_call(x, w, None, 4, 1, None)] = lambda x, w, *_: product(x, w)
    with pytest.warns(RuntimeWarning, match="ran its anchor in a call, because memory was refused"):
        assert not op(x, w, None, 4, 1, None).any()


def test_a_backward_has_its_memory_before_it_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later blocks of tokens allocate nothing."""
    loop = scored.loop
    monkeypatch.setattr(loop, "WGRAD_TOKENS", 8)
    keep_order(monkeypatch)

    def dz(out: Tensor, *_: Any) -> None:
        out.fill_(1)
        monkeypatch.setattr(torch, "empty", no_memory)

    products = loop.Products(dz, dhidden, dweight)
    hidden, weight, grad = whole_numbers(20, 16), whole_numbers(40, 16), torch.ones(40, 16)
    y, g = torch.zeros(20, dtype=torch.int64), torch.ones(20)
    rest = (y, None, None, torch.zeros(20, 2), g, g, None, None, None, None, False, True, True)
    dx, _ = loop.gradients(products, grad, hidden, weight, *rest)
    assert_bitwise(grad, hidden.float().sum(0).expand(40, 16) + 1, "main_grad")
    assert_bitwise(dx, weight.float().sum(0).bfloat16().expand(20, 16), "the input's gradient")


def test_calls_are_cut_evenly_into_what_was_compared() -> None:
    for most, m in itertools.product((8, 16, 7064, 16384), (17, 100, 7065, 8193, 16385, 100_003, 1_000_000)):
        pieces = shapes.cut(m, most)
        lengths = [piece.stop - piece.start for piece in pieces]
        assert sum(lengths) == m and len(lengths) == -(-m // most) and max(lengths) <= most
        assert all(a.stop == b.start and b.start % 8 == 0 for a, b in itertools.pairwise(pieces))
        if m > most > 16:
            assert min(lengths) >= most // 2 - 7, "at least the lowest count compared"


@pytest.mark.parametrize("kind", ("product", "head"))
def test_no_schedule_gets_more_rows_than_were_compared(
    kind: str, asked: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "DGRAD_CHUNK", 32)
    monkeypatch.setattr(shapes, "DGRAD_WHOLE", 64)
    monkeypatch.setattr(shapes, "BUCKETS", (0, 16, 64))
    seen: list[int] = []
    plain = cublaslt.launcher

    def launcher(device: int, which: cublaslt.Plan) -> Callable[..., None]:
        run = plain(device, which)
        return lambda m, *rest: (seen.append(m), run(m, *rest))[1]

    monkeypatch.setattr(cublaslt, "launcher", launcher)
    whole = lambda *shape: torch.randint(-4, 5, shape).bfloat16()
    k = 80 if kind == "head" else 48
    for limit, m in ((1 << 40, 200), (40 * k * 2, 57)):  # the open last bucket, and the limit on bytes
        monkeypatch.setattr(shapes, "SAMPLE_BYTES", limit)
        a, w = whole(m, k), whole(k, 24)
        s = shapes.dgrad_shape(a, w, 1)._replace(device=0)
        assert s.is_head == (kind == "head")
        found, _ = cuda._head(s, 0) if s.is_head else cuda._product(s, 0)
        got, expected = found(a, w), a.float() @ w.float()
        assert_bitwise(got, expected.bfloat16(), kind)
        pieces = seen[:: 3 if s.is_head else 1]  # one launch per chunk
        assert sum(pieces) == m and max(seen) <= shapes.max_rows(s) == shapes.rows_of(s)[-1] == asked[-1][1]
        seen.clear()


# ---- linear_logprob: chunks of dhidden ------------------------------------------------------


def test_chunks_of_dhidden_are_added_ascending_by_cublaslt(asked: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring.orders, "LOGPROB_DGRAD_CHUNK", 32)
    dz, weight = torch.randint(-4, 5, (5, 104)).bfloat16()[:, :100], torch.randint(-4, 5, (100, 24)).bfloat16()
    start, product = torch.randint(-9, 9, (5, 24)).float(), dz.float() @ weight.float()
    for fresh in (True, False):
        running, some = start.clone(), MOST._replace(row=104)
        shape = scored.dhidden_shape(running, dz, weight, fresh, some)._replace(device=0)
        scoring._cublaslt_dhidden(0).bind(shape)(running, dz, weight, fresh, some)
        assert_bitwise(running, product + (0 if fresh else start), f"fresh {fresh}")


def test_sums_over_several_launches_allocate_their_workspace_before_the_first(
    asked: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If memory is refused nothing has been added yet, and the anchor computes the call."""
    monkeypatch.setattr(cublaslt, "plan", lambda *args: (asked.append(args), cublaslt.Plan(0, 64, "torch"))[1])
    monkeypatch.setattr(scoring.orders, "LOGPROB_DGRAD_CHUNK", 32)
    monkeypatch.setattr(scored, "SAMPLE_BYTES", 1 << 10)
    dz, weight, hidden = rand(6, 96).bfloat16(), rand(96, 24).bfloat16(), rand(6, 24).bfloat16()
    running, grad, some = torch.zeros(6, 24), torch.zeros(96, 24), MOST._replace(row=96)
    of_hidden = scored.dhidden_shape(running, dz, weight, False, some)._replace(device=0)
    of_weight = scored.dweight_shape(grad, dz, hidden, False, some)._replace(device=0)
    for schedule, shape, given in (
        (scoring._cublaslt_dhidden(0), of_hidden, (running, dz, weight)),
        (scoring._cublaslt_dweight(0), of_weight, (grad, dz, hidden)),
    ):
        run = schedule.bind(shape)
        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
            patch.setattr(torch, "empty", no_memory)
            run(*given, False, some)
        assert not given[0].any()


@pytest.mark.parametrize("c", (16, 520, 1024, 2048, 4096, 5120, 8192, 16384))
def test_parallel_chunks_fill_a_gpu_and_are_no_more_than_were_compared(c: int) -> None:
    loop = scored.loop
    for tokens in (1, 77, 256, 257, 410, 512, 513, 1000, 1024, 1025, 2048, 2049, 4096, 8192):
        parallel = loop.parallel_chunks(tokens, c)
        assert parallel & (parallel - 1) == 0 and 1 <= parallel <= loop.MAX_PARALLEL_CHUNKS
        assert parallel == loop.MAX_PARALLEL_CHUNKS or max(256, tokens) * max(512, c) * parallel * 2 > loop.FILLED, (
            "a GPU is filled"
        )
        assert parallel == 1 or max(256, tokens) * c * parallel <= loop.FILLED, "the sums stay small"
        assert tokens * parallel <= 8192, "dz stays small"
        s = GRAD._replace(c=c, row=0, few=parallel > 1)
        rows = scored.rows_of_dhidden(s)
        assert tokens <= max(rows) <= scored.WGRAD_TOKENS
        assert all((loop.parallel_chunks(m, c) > 1) == s.few for m in rows) and min(rows) <= max(77, tokens)
        assert loop.parallel_chunks(min(rows), c) >= parallel, "compared with that many chunks"
        row = scored.SAMPLE_BLOCK * parallel
        timed = scored.rows_of_dhidden(s._replace(row=row))[-1]
        assert not s.few or loop.parallel_chunks(timed, c) == parallel, "timed as in real calls"


@pytest.mark.parametrize("c", (64, 1024, 4096, 8192))
@pytest.mark.parametrize("row", (0, 8192, 16384, 131072))
def test_samples_of_dhidden_have_the_chunks_that_calls_have(c: int, row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(
        scored, "_block_of_dz", lambda s, m, entries, *_: (torch.empty(m, entries, device="meta"), None)
    )
    monkeypatch.setattr(scored, "values", lambda kind, entries, *_, **__: (drawn.append(entries), torch.empty(0))[1])
    monkeypatch.setattr(torch, "randn", lambda *_, **__: torch.empty(0))
    chunk = scored.SAMPLE_BLOCK
    for few, whole in itertools.product((False, True), (False, True)):
        s = GRAD._replace(c=c, row=row, few=few, aligned=whole)
        rows, seen = scored.rows_of_dhidden(s), []
        for m in rows:
            scored.dhidden_sample(s, m, "normal", torch.Generator())
            entries = drawn.pop()
            assert (entries % 8 == 0) == whole and entries <= (row or entries)
            assert max(m, c) * entries * 2 <= scored.SAMPLE_BYTES
            seen.append(-(-entries // chunk))
            if m in (min(rows), rows[-1]):
                asked = scored.loop.parallel_chunks(m, c) if few else 1
                assert seen[-1] == min(asked, -(-(row or chunk * asked) // chunk)), "the number of parallel chunks"
        assert 1 in seen, "one chunk, as in a block's last call"
