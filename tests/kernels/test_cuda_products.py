"""What linear's CUDA schedules hand to their kernels: addresses, lengths, pieces; torch takes cuBLASLt's place."""

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
from rlkernel.kernels import schedule
from rlkernel.kernels.certification import Schedule
from rlkernel.kernels.cuda import cublaslt
from rlkernel.kernels.cuda import linear as cuda
from rlkernel.kernels.cuda import linear_logprob as scoring
from rlkernel.kernels.cuda import linear_logprob_hopper as hopper
from rlkernel.kernels.cuda import linear_logprob_shapes as scored
from rlkernel.kernels.cuda import linear_shapes as shapes
from rlkernel.kernels.errors import FinishedError, LaunchError
from rlkernel.kernels.schedule import ScheduledOp
from rlkernel.kernels.triton.linear_logprob_rows import Guess


def memory(address: int, size: int, dtype: torch.dtype) -> Tensor:
    """A tensor over memory that is not its own."""
    bytes_ = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(address)
    return torch.frombuffer(bytes_, dtype=dtype)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """cuBLASLt's place taken by torch on whole numbers, few tokens too; what its heuristic was asked for."""
    found: list[tuple] = []
    monkeypatch.setattr(scored, "FEW_TOKENS", 1)
    monkeypatch.setattr(cublaslt, "plan", lambda *args: (found.append(args), cublaslt.Plan(0, 0, "torch"))[1])

    def launcher(device: int, which: cublaslt.Plan) -> Callable[..., None]:
        _, _, n, _, _, a_row, b_row, a_by_k, _, dtype, out_dtype, _, _ = found[-1]

        def run(m: int, k: int, a: int, b: int, bias: None, add: bool, out: Tensor) -> None:
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
    """A block of dz whose rows are longer than it is: dhidden onto a sum, dweight onto one and fresh."""
    whole = lambda *shape: torch.randint(-4, 5, shape).bfloat16()
    dz, weight, hidden = whole(6, 48)[:, :40], whole(40, 24), whole(6, 24)
    running = torch.randint(-9, 9, (6, 24)).float()
    expected = running + dz.float() @ weight.float()
    run = scoring._cublaslt(0, False).bind((0, *scored.dhidden_key(running, dz, weight, False, MOST)[1:]))
    run(running, dz, weight, False, MOST)
    assert_bitwise(running, expected, "dhidden, added")
    for fresh, out in ((True, torch.float32), (True, torch.bfloat16), (False, torch.float32)):
        grad = torch.ones(40, 24, dtype=out)
        key = (0, *scored.dweight_key(grad, dz, hidden, fresh, MOST)[1:])
        scoring._cublaslt(1, True).bind(key)(grad, dz, hidden, fresh, MOST)
        assert_bitwise(grad, (dz.float().t() @ hidden.float() + (not fresh)).to(out), f"dweight, {fresh}, {out}")
        assert asked[-1][2:3] + asked[-1][5:9] == (24, 48, 24, True, False) and asked[-1][-1] == 1
    assert not scoring._cublaslt(0, True).supports((0, *scored.dweight_key(grad, dz, hidden, False, NONE)[1:]))


def test_the_products_of_a_head_and_of_a_chunk_of_tokens(asked: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses, lengths and the sums."""
    monkeypatch.setattr(cuda, "DGRAD_CHUNK", 32)
    monkeypatch.setattr(shapes, "DGRAD_WHOLE", 64)
    whole = lambda *shape: torch.randint(-4, 5, shape).bfloat16()
    dy, w, x = whole(5, 80), whole(80, 24), whole(5, 24)
    s = shapes.shape_of((0, *shapes.dgrad_key(dy, w, 1)[1:]))
    head, _ = cuda._head(s, 0)
    assert_bitwise(head(dy, w), (dy.float() @ w.float()).bfloat16(), "three chunks, the last shorter")
    assert asked[-1][1:8] == (16, 24, 32, 1, 80, 24, False)
    spelt = next(choice.which for choice in cuda.CHOICES if choice.name == "128x128.1x2")
    assert asked[-1][-1] == 0 and cuda._head(s, spelt) and asked[-1][-1] == spelt == (66, 20, 35, 5, 3, 0, 0)
    start = torch.randint(-9, 9, (80, 24)).float()
    for fresh, out in ((True, torch.float32), (True, torch.bfloat16), (False, torch.float32)):
        grad = start.to(out, copy=True)
        onto, _ = cuda._wgrad(shapes.shape_of((0, *shapes.wgrad_key(grad, dy, x, fresh)[1:])), 0)
        onto(grad, dy, x, fresh)
        assert_bitwise(grad, (dy.float().t() @ x.float() + (0 if fresh else start)).to(out), f"tokens, {fresh}, {out}")


def whole_numbers(*shape: int) -> Tensor:
    return torch.randint(-4, 5, shape).bfloat16()


def test_a_misaligned_operand_of_linear_runs_the_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses are no part of a class: every schedule asks for them itself."""
    ran: list[str] = []
    tiles: list[Any] = []
    monkeypatch.setattr(cublaslt, "plan", lambda *args: cublaslt.Plan(0, 0, "none"))
    monkeypatch.setattr(cublaslt, "launcher", lambda device, which: lambda *_: ran.append("schedule"))
    monkeypatch.setattr(cuda.linear_rows, "launcher", lambda *_: lambda *_: ran.append("schedule"))
    monkeypatch.setattr(shapes, "DGRAD_WHOLE", 64)
    for module, name in (
        (cuda.anchor, "gemm"), (cuda.anchor, "linear_dgrad"), (cuda.linear_grad, "ascending"),
        (cuda.linear_grad, "wgrad_"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *_, tile=None, **rest: (ran.append("anchor"), tiles.append(tile)))
    tile = lambda offer, dgrad, head=False: cuda._tile(offer.tile, dgrad, head).bind
    forward = lambda x, w: (shapes.linear_key(x, w, None, 1, 1, None), (x, w, None, 1, 1, None))
    dgrad = lambda dy, w: (shapes.dgrad_key(dy, w, 1), (dy, w, 1))
    wgrad = lambda grad, dy, x: (shapes.wgrad_key(grad, dy, x, True), (grad, dy, x, True))
    (few, *_), (head, *_) = cuda.OFFERS, cuda.HEAD_OFFERS
    for bind, call, sizes, tiled in (
        (cuda._cublaslt("0", "forward").bind, forward, ((9, 64), (48, 64)), False),
        (cuda._cublaslt("0", "dgrad").bind, dgrad, ((9, 48), (48, 64)), False),
        (cuda._cublaslt("0", "dgrad").bind, dgrad, ((9, 72), (72, 64)), False),
        (cuda._cublaslt("0", "wgrad").bind, wgrad, ((48, 64), (9, 48), (9, 64)), False),
        (cuda._few_rows(16).bind, dgrad, ((9, 48), (48, 64)), False),
        (tile(few, False), forward, ((9, 64), (48, 64)), True),
        (tile(few, True), dgrad, ((9, 48), (48, 64)), True),
        (tile(head, True, True), dgrad, ((9, 72), (72, 64)), True),
    ):
        for shifted in range(-1, len(sizes)):
            key, arguments = call(*(at(i == shifted, *size) for i, size in enumerate(sizes)))
            bind((0, *key[1:]))(*arguments)
            if tiled:
                assert ran.pop() == "anchor" and (tiles.pop() is None) == (shifted >= 0), "in a tile of its own"
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
    sums, ones, rows = torch.zeros(9, 64), torch.ones(9), scoring._cublaslt(0, False).bind
    dhidden = (0, *scored.dhidden_key(sums, dz, rand(*w), True, MOST)[1:])
    dweight = (0, *scored.dweight_key(rand(*w), dz, rand(*x), True, MOST)[1:])
    tokens = scoring._cublaslt(0, True).bind
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


def test_a_guess_asks_its_memory_and_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking an event would end a capture of another thread."""
    monkeypatch.setattr(torch.cuda, "Event", lambda *_, **__: pytest.fail("an event"))
    count = lambda *n: torch.tensor(n, dtype=torch.int32).view(-1, 2)
    counts = torch.empty(4, 2, dtype=torch.int32)
    ask = scoring._Guess(counts)
    first = ask(count(128, 128, 100, 100), 228, 600, True)
    assert first is Guess.GROUPS and counts[:2].tolist() == [[128, 128], [100, 100]]
    assert ask(count(960, 900), 990, 600, True) is Guess.ALL, "the count of the call before"
    counts[0] = -1
    assert ask(count(1, 1), 9, 600, True) is Guess.ALL and (counts[0] == -1).all(), "under way: none is sent after it"
    counts[0, 0] = 960
    assert ask(count(1, 1), 9, 600, True) is Guess.ALL, "half of it has arrived"
    counts[0, 1] = 900
    assert ask(count(1024, 769), 1024, 1e9, True) is Guess.ALL, "960 and 900 of 990 are four clusters of rows"
    assert ask(count(512, 300, 512, 400), 1024, 1e9, True) is Guess.ALL, "1024 and 769 too"
    assert ask(count(512, 300, 512, 400), 1024, 4800, True) is Guess.SINGLE, "one of four"
    assert ask(count(512, 300, 512, 400), 1024, 4799, True) is Guess.ALL, "fewer channels"
    assert ask(count(512, 300, 512, 400), 1024, 256, False) is Guess.SINGLE, "dz need not move"
    assert ask(count(0, 0), 1024, 255, False) is Guess.ALL
    assert ask(count(0, 0), 1024, 1e9, False) is Guess.GROUPS
    for number in (count(), count(*[1] * 10)):
        ask(number, 5, 600, True)
    assert not ask._tokens, "none that does not fit"
    assert scoring.guess(rand(9, 8), count(9, 3), 2.0, True) is Guess.GROUPS, "not on a GPU"


def test_weight_gradients_go_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "WGRAD_TOKENS", 32)
    seen: list[tuple[int, bool]] = []

    def chunk(grad: Tensor, dy: Tensor, x: Tensor, fresh: bool) -> None:
        seen.append((dy.shape[0], fresh))
        assert grad.dtype == torch.float32 or dy.shape[0] <= 32
        total = dy.float().t() @ x.float()
        grad.copy_(total if fresh else grad + total)

    monkeypatch.setattr(cuda.wgrad_chunk, "call", chunk)
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


@pytest.mark.usefixtures("cache")
def test_a_chunk_of_tokens_without_memory_is_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def plain(grad: Tensor, dy: Tensor, x: Tensor, fresh: bool) -> None:
        grad.copy_(dy.float().t() @ x.float() + (0 if fresh else grad))

    def full(grad: Tensor, dy: Tensor, x: Tensor, fresh: bool) -> None:
        if bound and next(calls):
            raise LaunchError("cublasLtMatmul: the resource allocation failed (status 3)")
        plain(grad, dy, x, fresh)

    bound: list[bool] = []
    planted = (Schedule("planted", lambda key: full),)
    made = dataclasses.replace(cuda.wgrad_chunk.family, anchor=plain, schedules=planted, kinds=("normal",))
    monkeypatch.setattr(cuda, "wgrad_chunk", op := ScheduledOp(made))
    monkeypatch.setattr(cuda, "WGRAD_TOKENS", 32)
    dy, x, grad = torch.randint(-4, 5, (80, 16)).bfloat16(), torch.randint(-4, 5, (80, 24)).bfloat16(), None
    for tokens in (16, 32):
        assert op.chosen(torch.ones(16, 24), dy[:tokens], x[:tokens], False) == "planted"
    bound.append(True)
    with pytest.warns(RuntimeWarning, match="planted met LaunchError: .*allocation failed"):
        cuda.linear_wgrad_(grad := torch.ones(16, 24), dy, x)
    assert_bitwise(grad, dy.float().t() @ x.float() + 1, "each chunk once")


def no_memory(*_: Any, **__: Any) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_a_workspace_that_cannot_be_had_is_a_launch_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "_function", lambda *_: lambda *_: pytest.fail("launched"))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    run, out = cublaslt.launcher(0, cublaslt.Plan(0, 64, "algorithm 66")), torch.zeros(1)
    monkeypatch.setattr(torch, "empty", no_memory)
    with pytest.raises(LaunchError, match=r"no memory for the workspace .*algorithm 66: CUDA out") as raised:
        run(3, 4, 0, 0, None, False, out)
    assert schedule.is_circumstance(raised.value)


def test_chunks_side_by_side_without_memory_are_a_launch_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed by the anchor in the kernel's name, certification would compare the anchor with itself."""
    monkeypatch.setattr(hopper, "LOGPROB_DGRAD_CHUNK", 16)
    monkeypatch.setattr(scoring.anchor, "dhidden_block", lambda *given: pytest.fail("the anchor ran"))
    for name in ("tensor_map", "kernel", "_launch"):
        monkeypatch.setattr(hopper, name, lambda *_, **__: None)
    given = (torch.zeros(9, 64), rand(9, 48), at(0, 48, 64), False, MOST)
    monkeypatch.setattr(torch, "empty", no_memory)
    with pytest.raises(LaunchError, match="no memory for the sums of 3 chunks: CUDA out of memory") as raised:
        hopper.dhidden_block(*given)
    assert schedule.is_circumstance(raised.value)


@pytest.mark.parametrize(
    ("missing", "message"),
    (((4, 5, 48), "4 partial sums"), ((2, 5, 48), "sums of partial sums"), ((5, 24), "a head's")),
)
def test_sums_of_linear_without_memory_are_a_launch_refused(
    missing: tuple[int, ...], message: str, asked: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The anchor may add them in registers, and goes without."""
    empty = torch.empty
    refuse = lambda size, *rest, **how: (no_memory if tuple(size) == missing else empty)(size, *rest, **how)
    monkeypatch.setattr(shapes, "DGRAD_WHOLE", 64)
    monkeypatch.setattr(cuda, "DGRAD_CHUNK", 32)
    monkeypatch.setattr(cuda.anchor, "fold_partials", lambda *_: refuse((2, 5, 48)))
    x, w, dy, head = (whole_numbers(*size) for size in ((5, 64), (48, 64), (5, 80), (80, 24)))
    product, _ = cuda._product(shapes.shape_of((0, *shapes.linear_key(x, w, None, 4, 1, None)[1:])), 0)
    onto, _ = cuda._head(shapes.shape_of((0, *shapes.dgrad_key(dy, head, 1)[1:])), 0)
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(LaunchError, match=f"no memory for .*{message}.*: CUDA out of memory") as raised:
        onto(dy, head) if len(missing) == 2 else product(x, w)
    assert schedule.is_circumstance(raised.value)


def test_what_a_schedule_held_is_free_when_its_anchor_runs(asked: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    """An error holds the frames that it came through, and these the partial sums."""
    x, w = whole_numbers(5, 64), whole_numbers(48, 64)
    product, _ = cuda._product(shapes.shape_of((0, *shapes.linear_key(x, w, None, 4, 1, None)[1:])), 0)
    held: list[weakref.ref[Tensor]] = []

    def fold(partials: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        held.append(weakref.ref(partials))
        return no_memory()

    def anchor(*_: Any) -> Tensor:
        assert held[0]() is None, "the partial sums"
        return torch.zeros(5, 48)

    monkeypatch.setattr(cuda.anchor, "fold_partials", fold)
    monkeypatch.setattr(cuda.linear, "family", dataclasses.replace(cuda.linear.family, anchor=anchor))
    call = shapes.linear_warm({}, lambda *_: lambda x, w, *_: product(x, w), cuda.linear._instead)
    with pytest.warns(RuntimeWarning, match="ran its anchor in a call .* no memory for sums of partial sums"):
        assert not call(x, w, None, 4, 1, None).any()


def test_a_weight_gradient_without_memory_for_its_sum_is_the_anchors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "WGRAD_TOKENS", 8)
    monkeypatch.setattr(cuda.linear_grad, "wgrad_", lambda grad, dy, x, fresh: grad.copy_(dy.t() @ x) if fresh else 1)
    monkeypatch.setattr(torch, "empty_like", no_memory)
    dy, x = whole_numbers(20, 8), whole_numbers(20, 16)
    with pytest.warns(RuntimeWarning, match="linear_wgrad ran its anchor in a call, .*: CUDA out of memory"):
        assert_bitwise(cuda.linear_wgrad(dy, x), dy.t() @ x, "the anchor's")


@pytest.mark.parametrize("vocab", (40, 256, 300, 904, 901))
@pytest.mark.parametrize("tokens", (5, 8, 9, 20))
@pytest.mark.parametrize(("main", "kept"), ((True, 0), (False, 0), (True, 512)))
def test_a_backward_meets_all_its_classes_before_it_launches(
    tokens: int, vocab: int, main: bool, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What refuses a class then finds nothing added to `main_grad`."""
    loop = scored.loop
    monkeypatch.setattr(loop, "WGRAD_TOKENS", 8)
    monkeypatch.setattr(loop, "LOGPROB_DGRAD_CHUNK", 16)
    monkeypatch.setattr(loop, "logits_block", lambda *_: None)
    keep_order(monkeypatch)
    keys = scored.dz_key, scored.dhidden_key, scored.dweight_key
    met: set[tuple] = set()
    launched: list[tuple] = []

    def takes(into: Any, *products: int) -> list[Callable[..., None]]:
        return [lambda *given, i=i: into((i, *keys[i](*given))) for i in products]

    def before(call: Any, meet: Callable[..., None]) -> None:
        hash(call)
        assert not launched
        meet(*takes(met.add, 0, 1, 2))

    products = loop.Products(*takes(launched.append, 0, 1, 2), lambda *_: Guess.ALL, before)
    hidden, weight = whole_numbers(tokens, 16), whole_numbers(vocab, 16)
    y, g = torch.zeros(tokens, dtype=torch.int64), torch.ones(tokens)
    logits = torch.zeros(tokens, min(kept, vocab)) if kept else None
    rest = (y, None, None, torch.zeros(tokens, 2), g, g, None, None, None, logits, True, True)
    loop.gradients(products, torch.zeros(vocab, 16) if main else None, hidden, weight, *rest)
    assert launched and set(launched) == met


def test_classes_are_settled_before_once_and_anew_behind_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[str] = []
    ops, stays = (scoring._dz, scoring._dhidden, scoring._dweight), [True]
    for op in ops:
        monkeypatch.setattr(op, "met", set())
        settle = lambda *given, name=op.family.op: (settled.append(name), (None, stays[0]))[1]
        monkeypatch.setattr(op, "_settle_with_others", settle)
    before = scoring.linear_logprob_grad_.args[0].before
    meet = lambda *products: [product() for product in products]
    for _ in range(2):
        before("a", meet)
    assert settled == [op.family.op for op in ops]
    with schedule.strict():
        before("a", meet)
    assert len(settled) == 6

    def refuse(*_: Any) -> None:
        raise schedule.UncertifiedError

    for _ in range(2):
        with pytest.raises(schedule.UncertifiedError):
            before("b", refuse)
    stays[0] = False  # as under graph capture
    before("c", meet)
    assert len(settled) == 9 and not any({"b", "c"} & op.met for op in ops)


def test_a_backward_has_its_memory_before_it_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of tokens behind the first take none."""
    loop = scored.loop
    monkeypatch.setattr(loop, "WGRAD_TOKENS", 8)
    keep_order(monkeypatch)

    def dz(out: Tensor, *_: Any) -> None:
        out.fill_(1)
        monkeypatch.setattr(torch, "empty", no_memory)

    products = loop.Products(dz, dhidden, dweight, lambda *_: Guess.GROUPS)
    hidden, weight, grad = whole_numbers(20, 16), whole_numbers(40, 16), torch.ones(40, 16)
    y, g = torch.zeros(20, dtype=torch.int64), torch.ones(20)
    rest = (y, None, None, torch.zeros(20, 2), g, g, None, None, None, None, True, True)
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
            assert min(lengths) >= most // 2 - 7, "never below the lowest count compared"


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
    for limit, m in ((1 << 40, 200), (40 * k * 2, 57)):  # the last bucket is open, and a limit on bytes
        monkeypatch.setattr(shapes, "SAMPLE_BYTES", limit)
        a, w = whole(m, k), whole(k, 24)
        s = shapes.shape_of((0, *shapes.dgrad_key(a, w, 1)[1:]))
        assert s.is_head == (kind == "head")
        found, _ = cuda._head(s, 0) if s.is_head else cuda._product(s, 0)
        got, expected = found(a, w), a.float() @ w.float()
        assert_bitwise(got, expected.bfloat16(), kind)
        pieces = seen[:: 3 if s.is_head else 1]  # a launch a chunk
        assert sum(pieces) == m and max(seen) <= shapes.most_rows(s) == shapes.rows_of(tuple(s))[-1] == asked[-1][1]
        seen.clear()


# ---- linear_logprob: chunks of dhidden ------------------------------------------------------


def test_chunks_of_dhidden_are_added_ascending_by_cublaslt(asked: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    """One behind the other; behind a launch that fails the anchor does the rest, and the call says so."""
    monkeypatch.setattr(scoring.orders, "LOGPROB_DGRAD_CHUNK", 32)
    monkeypatch.setattr(
        scoring.anchor, "dhidden_block", lambda *given: (anchored.append(len(given[2])), dhidden(*given))
    )
    anchored: list[int] = []
    dz, weight = torch.randint(-4, 5, (5, 104)).bfloat16()[:, :100], torch.randint(-4, 5, (100, 24)).bfloat16()
    start, product = torch.randint(-9, 9, (5, 24)).float(), dz.float() @ weight.float()
    plain, some = cublaslt.launcher, MOST._replace(row=104)

    def failing(device: int, which: cublaslt.Plan) -> Callable[..., None]:
        run, calls = plain(device, which), itertools.count()

        def launch(*given: Any) -> None:
            if next(calls) == fails:
                raise LaunchError("status 13")
            run(*given)

        return launch

    monkeypatch.setattr(cublaslt, "launcher", failing)
    for fresh, fails in itertools.product((True, False), (-1, 0, 1, 3)):
        running = start.clone()
        key = (0, *scored.dhidden_key(running, dz, weight, fresh, some)[1:])
        run = scoring._cublaslt(0, False).bind(key)
        if fails == -1:
            run(running, dz, weight, fresh, some)
        else:
            with pytest.raises(FinishedError if fails else LaunchError, match="status 13"):
                run(running, dz, weight, fresh, some)
        if fails == 0:
            assert_bitwise(running, start, "nothing was written")
            continue
        total = product + (0 if fresh else start)
        assert_bitwise(running, total, f"fresh {fresh}, {fails}")
        assert anchored == ([] if fails == -1 else [100 - 32 * fails])
        anchored.clear()


@pytest.mark.parametrize("c", (16, 520, 1024, 2048, 4096, 5120, 8192, 16384))
def test_as_many_chunks_are_side_by_side_as_fill_a_gpu_and_no_more_than_were_compared(c: int) -> None:
    loop = scored.loop
    for tokens in (1, 77, 256, 257, 410, 512, 513, 1000, 1024, 1025, 2048, 2049, 4096, 8192):
        beside = loop.chunks_beside(tokens, c)
        assert beside & (beside - 1) == 0 and 1 <= beside <= loop.MOST_BESIDE
        assert beside == loop.MOST_BESIDE or max(256, tokens) * max(512, c) * beside * 2 > loop.FILLED, (
            "a GPU is filled"
        )
        assert beside == 1 or max(256, tokens) * c * beside <= loop.FILLED, "and the sums stay small"
        assert tokens * beside <= 8192, "and dz"
        s = GRAD._replace(c=c, row=0, few=beside > 1)
        rows = scored.rows_of_dhidden(tuple(s))
        assert tokens <= max(rows) <= scored.WGRAD_TOKENS
        assert all((loop.chunks_beside(m, c) > 1) == s.few for m in rows) and min(rows) <= max(77, tokens)
        assert loop.chunks_beside(min(rows), c) >= beside, "compared with as many"
        row = scored.SAMPLE_BLOCK * beside
        timed = scored.rows_of_dhidden(tuple(s._replace(row=row)))[-1]
        assert not s.few or loop.chunks_beside(timed, c) == beside, "timed as calls come"


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
        s = GRAD._replace(c=c, row=row, few=few, whole=whole)
        rows, seen = scored.rows_of_dhidden(tuple(s)), []
        for m in rows:
            scored.dhidden_sample(tuple(s), m, "normal", torch.Generator())
            entries = drawn.pop()
            assert (entries % 8 == 0) == whole and entries <= (row or entries)
            assert max(m, c) * entries * 2 <= scored.SAMPLE_BYTES
            seen.append(-(-entries // chunk))
            if m in (min(rows), rows[-1]):
                asked = scored.loop.chunks_beside(m, c) if few else 1
                assert seen[-1] == min(asked, -(-(row or chunk * asked) // chunk)), "as many chunks as are side by side"
        assert 1 in seen, "one alone, as a block's last call has"
