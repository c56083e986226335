"""Shape classes of linear's CUDA schedules, and doctor's table, without a GPU."""

from __future__ import annotations

import ctypes
import importlib
import io
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rlkernel.cli import doctor
from rlkernel.contract import assert_bitwise
from rlkernel.kernels.cuda import linear as cuda
from rlkernel.kernels.cuda import linear_logprob as scoring
from rlkernel.kernels.schedule import ScheduledOp
from rlkernel.kernels.triton.linear_logprob_backward import Active


def key(x: Tensor, w: Tensor, bias: Tensor | None = None, chunks: int = 1, out: torch.dtype | None = None) -> tuple:
    return (0, *cuda._linear_key(x, w, bias, chunks, 1, out)[1:])


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(dtype)


def test_buckets_hold_their_rows() -> None:
    ms = [*range(0, 300), 511, 512, 513, 8192, 8193, 16384]
    buckets = [cuda.bucket(m) for m in ms]
    assert all(b >= m for m, b in zip(ms, buckets, strict=True)) and buckets == sorted(buckets)
    assert cuda.bucket(10**6) == cuda.BUCKETS[-1] and set(buckets) <= set(cuda.BUCKETS)
    for m in (1, 9, 40, 65, 150, 250, 5000):
        rows = cuda._rows(key(rand(1, 64).expand(m, 64).contiguous(), rand(48, 64)))
        assert {cuda.bucket(r) for r in rows} == {cuda.bucket(m)} and rows[-1] == cuda.bucket(m)


def test_one_class_per_kernel_choice() -> None:
    w = rand(48, 64)
    assert key(rand(2, 64), w) == key(rand(16, 64), w) != key(rand(17, 64), w)
    assert cuda._describe(key(rand(2, 64), w)) == cuda._describe(key(rand(2, 64), w, None, 1, torch.bfloat16))
    dgrad = cuda._shape(cuda._dgrad_key(rand(2, 48), w, 1))
    assert (dgrad.n, dgrad.k) == (64, 48)


def test_what_cublaslt_is_asked_for() -> None:
    w = rand(48, 64)
    assert cuda._cublaslt_supports(key(rand(2, 64), w))
    assert cuda._cublaslt_supports(key(rand(2, 64), w, rand(48), 8, torch.float32))
    for x, weight, chunks in (
        (rand(2, 128)[:, :64], w, 1),  # rows are not dense
        (rand(0, 64), w, 1),
        (rand(2, 64), rand(44, 64), 1),  # N is no multiple of 8
        (rand(2, 64), w, 16),  # a chunk is no multiple of 8
        (rand(2, 64, dtype=torch.float32), w.float(), 1),
    ):
        assert not cuda._cublaslt_supports(key(x, weight, None, chunks))
    assert not cuda._cublaslt_supports(cuda._linear_key(rand(2, 64), w, None, 1, 1, None)), "a CPU tensor"


def test_what_the_kernel_for_few_rows_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    offered = {s.name: s.supports for s in cuda.linear_dgrad.family.schedules if s.name.startswith("rows.")}
    on = lambda name, dy, w, chunks=1: offered[name]((0, *cuda._dgrad_key(dy, w, chunks)[1:]))
    w = rand(48, 1024)
    assert all(on(name, rand(m, 48), w) for name in offered for m in (1, 16))
    for dy, weight, chunks in (
        (rand(17, 48), w, 1),
        (rand(0, 48), w, 1),
        (rand(2, 48), w, 2),
        (rand(2, 44), rand(44, 1024), 1),  # rows at no 16-byte address
        (rand(2, 48, dtype=torch.float32), w.float(), 1),
        (rand(1, cuda.DGRAD_WHOLE + 8), rand(cuda.DGRAD_WHOLE + 8, 16), 1),  # a head has chunks
    ):
        assert not any(on(name, dy, weight, chunks) for name in offered)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not any(on(name, rand(1, 48), w) for name in offered)


def test_the_gradients_of_one_class() -> None:
    grad, dy, x = torch.zeros(48, 64), rand(100, 48), rand(100, 64)
    s = cuda._shape(cuda._wgrad_key(grad, dy, x, False))
    assert (s.rows, s.n, s.k, s.out, s.fresh) == (128, 64, 128, torch.float32, False)
    assert cuda._describe(cuda._wgrad_key(grad, dy, x, False))["T"] == 128
    on = lambda key: cuda._cublaslt_supports((0, *key[1:]))
    assert on(cuda._wgrad_key(grad, dy, x, False)) and on(cuda._wgrad_key(grad.bfloat16(), dy, x, True))
    assert not on(cuda._wgrad_key(grad.bfloat16(), dy, x, False)), "a sum that goes on is fp32"
    assert not on(cuda._wgrad_key(grad.t().contiguous().t(), dy, x, False))
    head = cuda._shape((0, 16, torch.Size((cuda.DGRAD_WHOLE + 8, 64)), torch.bfloat16, None, False, 1, True, "dgrad"))
    assert head.is_head and not head._replace(chunks=2).is_head and not head._replace(form="forward").is_head


NONE = Active(*[torch.zeros(1, dtype=torch.int32)] * 3)
MOST = NONE._replace(row=48)


def calls() -> list[tuple[ScheduledOp, tuple]]:
    """Every op with arguments in many shapes and places."""
    w, wide, odd = rand(48, 64), rand(48, 128), rand(130)[2:].view(2, 64)
    found: list[tuple[ScheduledOp, tuple]] = []
    xs = (rand(1, 64), rand(2, 64), rand(16, 64), rand(17, 64), rand(2, 128)[:, :64], odd, rand(2, 64).half())
    for x, bias, chunks, out in itertools.product(xs, (None, rand(48), rand(96)[::2]), (1, 2), (None, torch.float32)):
        found.append((cuda.linear, (x, w.to(x.dtype), bias, chunks, 1, out)))
    for dy, weight, chunks in itertools.product((rand(1, 48), rand(16, 48), rand(2, 96)[:, :48]), (w, wide), (1, 2)):
        found.append((cuda.linear_dgrad, (dy, weight, chunks)))
    for t, fresh, dtype in itertools.product((1, 2, 16, 40), (False, True), (torch.float32, torch.bfloat16)):
        grad = torch.zeros(48, 64, dtype=dtype)
        for to in (grad, grad.t().contiguous().t()):
            found.append((cuda.wgrad_chunk, (to, rand(t, 48), rand(t, 64), fresh)))
    hidden, head, y = rand(130, 64), rand(80, 64), torch.zeros(130, dtype=torch.int64)
    inverse, kept = torch.ones(130), torch.zeros(130, 3, dtype=torch.int32)
    hiddens = (hidden, rand(3, 64), rand(130, 128)[:, :64], rand(130 * 64 + 1)[1:].view(130, 64), hidden.half())
    for x, weight, t, k, keep in itertools.product(
        hiddens, (head, rand(84, 64), rand(80, 128)[:, 64:]), (None, inverse), (None, kept), (False, True)
    ):
        found.append((scoring._forward, (x, weight, y, t, k, keep, 0)))
        found.append((scoring._forward, (x, weight, y, t, k, keep, 256)))
        for (g, h), row in itertools.product(((inverse, None), (None, inverse), (inverse, inverse)), (84, 88)):
            dz = rand(len(x), row)[:, : len(weight)]
            found.append((scoring._dz, (dz, x, weight, y, t, k, inverse, inverse, g, h, NONE, 0, 80)))
    for v, c, fresh, shift, some in itertools.product((80, 84), (64, 68), (False, True), (0, 1), (NONE, MOST)):
        running, dz, weights = torch.zeros(16, c), rand(16, 88)[:, :v], rand(v * c + 1)
        for weight in (weights[shift : v * c + shift].view(v, c), rand(v, 2 * c)[:, c:]):
            for rounded in (None, rand(16, c)):
                found.append((scoring._dhidden, (running, rounded, dz, weight, fresh, some)))
        for dtype, rows in itertools.product((torch.float32, torch.bfloat16), (rand(16, c), rand(16, 2 * c)[:, c:])):
            grad = torch.zeros(v * c + 1, dtype=dtype)[shift : v * c + shift].view(v, c)
            found.append((scoring._dweight, (grad, dz, rows, fresh, some)))
            found.append((scoring._dweight, (torch.zeros(v, 2 * c, dtype=dtype)[:, :c], dz, rows, fresh, some)))
    return found


def test_what_decides_a_call_decides_its_class() -> None:
    classes: dict[tuple, tuple] = {}
    for op, arguments in calls():
        asked: list[tuple] = []

        def first(call: tuple, *given: Any, asked: list = asked, arguments: tuple = arguments) -> Callable[..., Any]:
            assert all(a is b for a, b in zip(given, arguments, strict=True))
            asked.append(call)
            return lambda *run_with: run_with

        got = op.family.dispatcher({}, first)(*arguments)
        assert got is None or all(a is b for a, b in zip(got, arguments, strict=True)), "passed on as they came"
        decided, found = (op.family.op, *asked), (op.family.op, *op.family.key(*arguments))
        assert classes.setdefault(decided, found) == found
    assert len(set(classes.values())) > 150 and len({op for op, *_ in classes}) == 7


def test_a_warm_call_asks_once() -> None:
    for op, arguments in calls():
        runs: dict = {}
        ran: list[tuple] = []
        run = lambda *given, ran=ran: ran.append(given)
        call = op.family.dispatcher(runs, lambda decided, *_, run=run, runs=runs: runs.setdefault(decided, run))
        call(*arguments)
        call(*arguments)
        assert len(ran) == 2 and len(runs) == 1, op.family.op


def test_offers_have_names_of_their_own_and_fit_shared_memory() -> None:
    for op in (cuda.linear, cuda.linear_dgrad, cuda.wgrad_chunk):
        names = [schedule.name for schedule in op.family.schedules]
        assert len(set(names)) == len(names)
    for offer in (*cuda.OFFERS, *cuda.HEAD_OFFERS):
        fitted = cuda.matrix.fit(offer.tile, 1 << 20, 2, 232448)
        assert fitted == offer.tile, "smaller than it says"
        assert {offer.least - 1, offer.most} <= {*cuda.BUCKETS, cuda.ANY}, "a bucket in part"


def tiles_of(m: int, n: int) -> list[str]:
    """Names of the tiles offered for a product of a bucket of rows and a width."""
    s = cuda.Shape(0, m, torch.Size((n, 512)), torch.bfloat16, None, False, 1, True, "forward")
    offered = [schedule.name for schedule in cuda.linear.family.schedules if schedule.supports(tuple(s))]
    return [name.removeprefix("triton.") for name in offered if name.startswith("triton.")]


def test_every_class_of_few_rows_has_tiles_but_not_many() -> None:
    for n, m in itertools.product((1024, 4096, 6144, 24576), cuda.BUCKETS[1:12]):
        offered = tiles_of(m, n)
        assert 1 <= len(offered) <= 4 and not any("head" in name for name in offered), (n, m)
    assert tiles_of(96, 4096) == tiles_of(128, 4096) == ["64x64x128", "128x32x128", "128x32x64", "64x128x64"]
    assert tiles_of(160, 4096) == tiles_of(192, 4096) == ["128x64x64", "64x128x64"]
    assert tiles_of(96, 6144) == ["128x64x64", "64x128x64"] and tiles_of(224, 4096) == ["64x128x64"]
    assert tiles_of(96, 1024) == ["64x16x256", "64x32x128"] and tiles_of(256, 1024) == ["64x32x128"]
    assert tiles_of(512, 4096) == []


def memory(address: int, size: int, dtype: torch.dtype) -> Tensor:
    """A tensor over memory that is not its own."""
    bytes_ = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(address)
    return torch.frombuffer(bytes_, dtype=dtype)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """cuBLASLt's place taken by torch on whole numbers; what its heuristic was asked for."""
    found: list[tuple] = []
    monkeypatch.setattr(cuda, "plan", lambda *args: (found.append(args), cuda.Plan(0, 0, "torch"))[1])

    def launcher(device: int, which: cuda.Plan) -> Callable[..., None]:
        _, _, n, _, _, a_row, b_row, a_by_k, _, dtype, out_dtype, _, _ = found[-1]

        def run(m: int, k: int, a: int, b: int, bias: None, add: bool, out: Tensor) -> None:
            rows, width = (k, m) if a_by_k else (m, k)
            left = memory(a, (rows - 1) * a_row + width, dtype)
            left = left.as_strided((m, k), (1, a_row) if a_by_k else (a_row, 1))
            right = memory(b, k * b_row, dtype).as_strided((k, n), (b_row, 1))
            total = left.float() @ right.float() + (out.float() if add else 0)
            out.copy_(total.to(out_dtype))

        return run

    monkeypatch.setattr(cuda, "launcher", launcher)
    return found


def test_the_products_of_linear_logprob_through_cublaslt(asked: list[tuple]) -> None:
    """A block of dz whose rows are longer than it is: dhidden onto a sum and rounded, dweight onto one and fresh."""
    whole = lambda *shape: torch.randint(-4, 5, shape).bfloat16()
    dz, weight, hidden = whole(6, 48)[:, :40], whole(40, 24), whole(6, 24)
    running, rounded = torch.randint(-9, 9, (6, 24)).float(), torch.empty(6, 24, dtype=torch.bfloat16)
    expected = running + dz.float() @ weight.float()
    run = scoring._cublaslt(0, False).bind((0, *scoring._dhidden_key(running, rounded, dz, weight, False, MOST)[1:]))
    run(running, rounded, dz, weight, False, MOST)
    assert_bitwise(running, expected, "dhidden, added")
    assert_bitwise(rounded, expected.bfloat16(), "dhidden, rounded")
    for fresh, out in ((True, torch.float32), (True, torch.bfloat16), (False, torch.float32)):
        grad = torch.ones(40, 24, dtype=out)
        key = (0, *scoring._dweight_key(grad, dz, hidden, fresh, MOST)[1:])
        scoring._cublaslt(1, True).bind(key)(grad, dz, hidden, fresh, MOST)
        assert_bitwise(grad, (dz.float().t() @ hidden.float() + (not fresh)).to(out), f"dweight, {fresh}, {out}")
        assert asked[-1][2:3] + asked[-1][5:9] == (24, 48, 24, True, False) and asked[-1][-1] == 1
    assert not scoring._cublaslt(0, True).supports((0, *scoring._dweight_key(grad, dz, hidden, False, NONE)[1:]))


def test_the_products_of_a_head_and_of_a_chunk_of_tokens(asked: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses, lengths and the sums."""
    monkeypatch.setattr(cuda, "DGRAD_CHUNK", 32)
    monkeypatch.setattr(cuda, "DGRAD_WHOLE", 64)
    whole = lambda *shape: torch.randint(-4, 5, shape).bfloat16()
    dy, w, x = whole(5, 80), whole(80, 24), whole(5, 24)
    s = cuda._shape((0, *cuda._dgrad_key(dy, w, 1)[1:]))
    head, _ = cuda._head(s, 0)
    assert_bitwise(head(dy, w), (dy.float() @ w.float()).bfloat16(), "three chunks, the last shorter")
    assert asked[-1][1:8] == (16, 24, 32, 1, 80, 24, False)
    start = torch.randint(-9, 9, (80, 24)).float()
    for fresh, out in ((True, torch.float32), (True, torch.bfloat16), (False, torch.float32)):
        grad = start.to(out, copy=True)
        onto, _ = cuda._wgrad(cuda._shape((0, *cuda._wgrad_key(grad, dy, x, fresh)[1:])), 0)
        onto(grad, dy, x, fresh)
        assert_bitwise(grad, (dy.float().t() @ x.float() + (0 if fresh else start)).to(out), f"tokens, {fresh}, {out}")


def at(shift: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Small whole numbers at `shift` elements behind a 16-byte address."""
    return torch.randint(-4, 5, (shift + math.prod(shape),)).to(dtype)[shift:].view(shape)


def test_a_misaligned_operand_of_linear_runs_the_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses are no part of a class: every schedule asks for them itself."""
    ran: list[str] = []
    tiles: list[Any] = []
    monkeypatch.setattr(cuda, "plan", lambda *args: cuda.Plan(0, 0, "none"))
    monkeypatch.setattr(cuda, "launcher", lambda device, which: lambda *_: ran.append("schedule"))
    monkeypatch.setattr(cuda.linear_rows, "launcher", lambda *_: lambda *_: ran.append("schedule"))
    monkeypatch.setattr(cuda, "DGRAD_WHOLE", 64)
    for module, name in (
        (cuda.anchor, "gemm"), (cuda.anchor, "linear_dgrad"), (cuda.linear_grad, "ascending"),
        (cuda.linear_grad, "wgrad_"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *_, tile=None, **rest: (ran.append("anchor"), tiles.append(tile)))
    tile = lambda offer, dgrad, head=False: cuda._tile(offer.tile, dgrad, head).bind
    forward = lambda x, w: (cuda._linear_key(x, w, None, 1, 1, None), (x, w, None, 1, 1, None))
    dgrad = lambda dy, w: (cuda._dgrad_key(dy, w, 1), (dy, w, 1))
    wgrad = lambda grad, dy, x: (cuda._wgrad_key(grad, dy, x, True), (grad, dy, x, True))
    (few, *_), (head, *_) = cuda.OFFERS, cuda.HEAD_OFFERS
    for bind, call, shapes, tiled in (
        (cuda._cublaslt(0, "forward").bind, forward, ((9, 64), (48, 64)), False),
        (cuda._cublaslt(0, "dgrad").bind, dgrad, ((9, 48), (48, 64)), False),
        (cuda._cublaslt(0, "dgrad").bind, dgrad, ((9, 72), (72, 64)), False),
        (cuda._cublaslt(0, "wgrad").bind, wgrad, ((48, 64), (9, 48), (9, 64)), False),
        (cuda._few_rows(16).bind, dgrad, ((9, 48), (48, 64)), False),
        (tile(few, False), forward, ((9, 64), (48, 64)), True),
        (tile(few, True), dgrad, ((9, 48), (48, 64)), True),
        (tile(head, True, True), dgrad, ((9, 72), (72, 64)), True),
    ):
        for shifted in range(-1, len(shapes)):
            key, arguments = call(*(at(i == shifted, *shape) for i, shape in enumerate(shapes)))
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
    monkeypatch.setattr(scoring, "tensor_map", lambda *_: None)
    monkeypatch.setattr(scoring, "_kernel", lambda *_: None)
    monkeypatch.setattr(scoring, "_launch", lambda *_, **__: ran.append("schedule"))
    monkeypatch.setattr(scoring.cublaslt, "launcher", lambda *_: lambda *_: ran.append("schedule"))
    x, w, dz, y = (9, 64), (48, 64), rand(9, 48), torch.zeros(9, dtype=torch.int64)
    buffers = scoring.TileBuffers(9, 48, torch.device("cpu"))
    sums, ones, rows = torch.zeros(9, 64), torch.ones(9), scoring._cublaslt(0, False).bind
    dhidden = (0, *scoring._dhidden_key(sums, None, dz, rand(*w), True, MOST)[1:])
    dweight = (0, *scoring._dweight_key(rand(*w), dz, rand(*x), True, MOST)[1:])
    tokens = scoring._cublaslt(0, True).bind
    for run, shapes in (
        (lambda x, w: scoring._statistics(buffers, x, w, y, None, None, None, None), (x, w)),
        (lambda x, w: scoring._dz_block(dz, x, w, y, None, None, ones, ones, ones, None, MOST, 0, 48), (x, w)),
        (lambda w: scoring._dhidden_block(sums, None, dz, w, True, MOST), (w,)),
        (lambda w: rows(dhidden)(sums, None, dz, w, True, MOST), (w,)),
        (lambda grad, x: scoring._dweight_block(grad, dz, x, True, MOST), (w, x)),
        (lambda grad, x: tokens(dweight)(grad, dz, x, True, MOST), (w, x)),
    ):
        for shifted in range(-1, len(shapes)):
            run(*(at(i == shifted, *shape) for i, shape in enumerate(shapes)))
            assert ran.pop() == ("anchor" if shifted >= 0 else "schedule") and not ran


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


def test_doctor_prints_verdicts_and_the_first_differing_element() -> None:
    from rich.console import Console

    shape = {"M": 1, "N": 48, "bias": False}
    first = {"kind": "wide", "rows": 1, "index": [0, 7], "actual": "1.5", "expected": "1.25", "mismatches": 3,
             "elements": 48, "ulps": 2}  # fmt: skip
    common = {"op": "linear", "shape": shape, "ms": 0.5, "chosen": True, "first": None}
    rows = [
        {**common, "schedule": "cublaslt.0", "certified": True, "reason": "equal in 9 elements", "speed": 2.0},
        {**common, "schedule": "planted", "certified": False, "reason": "bits differ", "first": first, "ms": None,
         "speed": None, "chosen": False},
    ]  # fmt: skip
    out = io.StringIO()
    found = {"unavailable": "no compiler", "uncertified": [{"op": "o", "shape": shape, "reason": "full"}],
             "unsupported": [{"op": "p", "shape": shape, "schedules": ["hopper"]}], "rows": rows,
             "verdicts": {"made": 1, "read": 2, "folder": "here"}}  # fmt: skip
    doctor._print_schedules(Console(file=out, width=200), found)
    text = out.getvalue()
    for part in ("cuBLASLt's schedules are off: no compiler", "not certified: o",
                 "p M=1, N=48: anchor; not for this GPU or shape: hopper", "M=1, N=48", "certified, chosen",
                 "2.00x", "refused", "1 verdicts made now, 2 read from here",
                 "wide, 1 rows: at [0, 7] 1.5, anchor 1.25, 3 of 48 differ"):  # fmt: skip
        assert part in text, part


def dtypes(arguments: tuple) -> list[torch.dtype | None]:
    """Of every tensor among a sample's arguments, those of an `Active` included."""
    flat = [x for a in arguments for x in (a if isinstance(a, Active) else (a,))]
    return [x.dtype if isinstance(x, Tensor) else None for x in flat]


def test_samples_do_not_follow_the_users_default_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels get addresses: a sample of another dtype would be read and written past its end."""
    monkeypatch.setattr(scoring, "SAMPLE_ENTRIES", 80)
    monkeypatch.setattr(scoring, "VOCAB_TILE", 8)
    monkeypatch.setattr(
        scoring.anchor, "forward", lambda hidden, *_: (None, hidden[:, 0].float(), None, hidden.float())
    )
    ones = lambda *_: (torch.ones(1, 1, dtype=torch.int32),) * 2 + (torch.ones(1, dtype=torch.int32),)
    monkeypatch.setattr(scoring.loop, "active_blocks", ones)
    w, x = rand(48, 64), rand(9, 64)
    gradient = cuda._wgrad_key(torch.zeros(48, 64), rand(9, 48), x, False)
    grads = [
        scoring.GradShape(-1, 64, torch.bfloat16, torch.float32, True, fresh, True, row)
        for fresh, row in ((True, 0), (False, 88))
    ]
    scored = scoring.Shape(-1, False, 64, torch.bfloat16, True, True, True, False, False, True, True)
    monkeypatch.setattr(scoring, "SAMPLE_BLOCK", 64)
    samples = (
        lambda g: cuda._linear_sample(cuda._linear_key(x, w, rand(48), 1, 1, None), 9, "wide", g),
        lambda g: cuda._dgrad_sample(cuda._dgrad_key(rand(9, 48), w, 1), 9, "zeros", g),
        lambda g: cuda._wgrad_sample(gradient, 9, "wide", g),
        lambda g: scoring._forward_sample(tuple(scored), 9, "normal", g),
        lambda g: scoring._dz_sample(tuple(scored), 9, "normal", g),
        *(lambda g, s=s: scoring._dhidden_sample(tuple(s), 9, "zeros", g) for s in grads),
        *(lambda g, s=s: scoring._dweight_sample(tuple(s), 9, "zeros", g) for s in grads),
    )  # fmt: skip
    for make in samples:
        found = []
        for default in (torch.float32, torch.bfloat16, torch.float64):
            torch.set_default_dtype(default)
            try:
                found.append(dtypes(make(torch.Generator().manual_seed(0))))
            finally:
                torch.set_default_dtype(torch.float32)
        assert found[0] == found[1] == found[2], found


def test_a_bias_costs_dispatch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatch costs as much with a bias as without: what a schedule gets is placed where it was compared."""
    monkeypatch.setattr(cuda, "_contiguous", lambda *_: pytest.fail("a generator in a warm call"))
    x, w, decided = rand(2, 64), rand(48, 64), []
    nothing = lambda call, *_: (decided.append(call), lambda *_: None)[1]
    call = cuda.linear.family.dispatcher({}, nothing)
    biases = (rand(48), rand(96)[::2], rand(49)[1:])
    for bias in (None, *biases):
        call(x, w, bias, 1, 1, None)
    assert len(set(decided)) == 2
    for bias in biases:
        placed = cuda._placed(bias)
        assert placed.is_contiguous() and not placed.data_ptr() & 15 and torch.equal(placed, bias)
        assert (placed is bias) == (bias is biases[0])


def test_the_bench_of_dispatch_has_a_line_with_a_bias(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    benchmarks = Path(__file__).resolve().parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(str(benchmarks))
    bench = importlib.import_module("bench_dispatch")
    rows: list[dict[str, Any]] = []
    monkeypatch.setattr(bench, "write_result", lambda name, found: rows.extend(found))
    monkeypatch.setattr(sys, "argv", ["bench_dispatch.py", "--device", "cpu", "--rounds", "1"])
    bench.main()
    assert {"dispatch linear", "dispatch linear, bias"} <= {row["op"] for row in rows} and len(rows) == 8


def test_calls_are_cut_evenly_into_what_was_compared() -> None:
    for most, m in itertools.product((8, 16, 7064, 16384), (17, 100, 7065, 8193, 16385, 100_003, 1_000_000)):
        pieces = cuda.cut(m, most)
        lengths = [piece.stop - piece.start for piece in pieces]
        assert sum(lengths) == m and len(lengths) == -(-m // most) and max(lengths) <= most
        assert all(a.stop == b.start and b.start % 8 == 0 for a, b in itertools.pairwise(pieces))
        if m > most > 16:
            assert min(lengths) >= most // 2 - 7, "never below the lowest count compared"


@pytest.mark.parametrize("out", (None, torch.float32), ids=("bf16", "fp32"))
@pytest.mark.parametrize("c", (1024, 4096))
@pytest.mark.parametrize("form", ("forward", "dgrad", "wgrad"))
def test_heads_are_compared_at_both_ends_of_what_they_get(form: str, c: int, out: torch.dtype | None) -> None:
    n = 151936
    for low, high in itertools.pairwise(cuda.BUCKETS):
        if form == "wgrad" and high > cuda.WGRAD_TOKENS:
            continue
        s = cuda.Shape(0, high, torch.Size((n, c)), torch.bfloat16, out, False, 1, True, form)
        rows, width = cuda._rows(tuple(s)), n * (2 if out is None or form != "forward" else 4)
        assert rows == sorted(set(rows)) and rows[-1] == cuda.most_rows(s) <= 16384
        if high * width <= cuda.SAMPLE_BYTES or form == "wgrad":
            assert rows[0] == low + 1 and rows[-1] == high
        else:
            assert len(rows) == 2 and 0.95 * cuda.SAMPLE_BYTES < rows[-1] * width <= cuda.SAMPLE_BYTES
            assert rows[0] == min(low + 1, rows[-1] // 2 - 7), "the fewest of a piece"
    s = cuda.Shape(0, 16384, torch.Size((4096, 4096)), torch.bfloat16, None, False, 1, True, "forward")
    assert cuda._rows(tuple(s)) == [8185, 12285, 16384]


@pytest.mark.parametrize("kind", ("product", "head"))
def test_no_schedule_gets_more_rows_than_were_compared(
    kind: str, asked: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "DGRAD_CHUNK", 32)
    monkeypatch.setattr(cuda, "DGRAD_WHOLE", 64)
    monkeypatch.setattr(cuda, "BUCKETS", (0, 16, 64))
    seen: list[int] = []
    plain = cuda.launcher

    def launcher(device: int, which: cuda.Plan) -> Callable[..., None]:
        run = plain(device, which)
        return lambda m, *rest: (seen.append(m), run(m, *rest))[1]

    monkeypatch.setattr(cuda, "launcher", launcher)
    whole = lambda *shape: torch.randint(-4, 5, shape).bfloat16()
    k = 80 if kind == "head" else 48
    for limit, m in ((1 << 40, 200), (40 * k * 2, 57)):  # the last bucket is open, and a limit on bytes
        monkeypatch.setattr(cuda, "SAMPLE_BYTES", limit)
        a, w = whole(m, k), whole(k, 24)
        s = cuda._shape((0, *cuda._dgrad_key(a, w, 1)[1:]))
        assert s.is_head == (kind == "head")
        found, _ = cuda._head(s, 0) if s.is_head else cuda._product(s, 0)
        got, expected = found(a, w), a.float() @ w.float()
        assert_bitwise(got, expected.bfloat16(), kind)
        pieces = seen[:: 3 if s.is_head else 1]  # a launch a chunk
        assert sum(pieces) == m and max(seen) <= cuda.most_rows(s) == cuda._rows(tuple(s))[-1] == asked[-1][1]
        seen.clear()
