"""Shape classes of linear's CUDA schedules, and doctor's table, without a GPU."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.fake_schedules import classes_of
from kernels.linear_checks import MOST, NONE, forward_shape, keep_order, offers, rand

from rlkernel.cli import doctor
from rlkernel.kernels import certification
from rlkernel.kernels.cuda import linear as cuda
from rlkernel.kernels.cuda import linear_logprob as scoring
from rlkernel.kernels.cuda import linear_logprob_shapes as scored
from rlkernel.kernels.cuda import linear_shapes as shapes
from rlkernel.kernels.scheduled_op import ScheduledOp
from rlkernel.kernels.triton import matrix
from rlkernel.kernels.triton.linear_logprob_rows import Active


def test_buckets_hold_their_rows() -> None:
    ms = [*range(0, 300), 511, 512, 513, 8192, 8193, 16384]
    buckets = [shapes.bucket(m) for m in ms]
    assert all(b >= m for m, b in zip(ms, buckets, strict=True)) and buckets == sorted(buckets)
    assert shapes.bucket(10**6) == shapes.BUCKETS[-1] and set(buckets) <= set(shapes.BUCKETS)
    for m in (1, 9, 40, 65, 150, 250, 5000):
        rows = shapes.rows_of(forward_shape(rand(1, 64).expand(m, 64).contiguous(), rand(48, 64)))
        assert {shapes.bucket(r) for r in rows} == {shapes.bucket(m)} and rows[-1] == shapes.bucket(m)


def test_one_class_per_kernel_choice() -> None:
    w = rand(48, 64)
    assert forward_shape(rand(2, 64), w) == forward_shape(rand(16, 64), w) != forward_shape(rand(17, 64), w)
    assert forward_shape(rand(2, 64), w).describe() == forward_shape(rand(2, 64), w, None, 1, torch.bfloat16).describe()
    dgrad = shapes.dgrad_shape(rand(2, 48), w, 1)
    assert (dgrad.n, dgrad.k) == (64, 48)


def test_classes_that_cublaslt_supports() -> None:
    w = rand(48, 64)
    assert cuda._cublaslt_supports(forward_shape(rand(2, 64), w))
    assert cuda._cublaslt_supports(forward_shape(rand(2, 64), w, rand(48), 8, torch.float32))
    for x, weight, chunks in (
        (rand(2, 128)[:, :64], w, 1),  # strided rows
        (rand(0, 64), w, 1),
        (rand(2, 64), rand(44, 64), 1),  # N is not a multiple of 8
        (rand(2, 64), w, 16),  # a chunk is not a multiple of 8
        (rand(2, 64, dtype=torch.float32), w.float(), 1),
    ):
        assert not cuda._cublaslt_supports(forward_shape(x, weight, None, chunks))
    assert not cuda._cublaslt_supports(shapes.linear_shape(rand(2, 64), w, None, 1, 1, None)), "a CPU tensor"


def test_empty_operands_run_the_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    """[48, 0] and [40, 0] have the same call key, so the cached choice must be right for both."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for op, arguments, full in (
        (cuda.linear, (rand(2, 0), rand(48, 0), None, 1, 1, None), (rand(2, 64), rand(48, 64), None, 1, 1, None)),
        (cuda.linear_dgrad, (rand(2, 0), rand(0, 64), 1), (rand(2, 48), rand(48, 64), 1)),
        (cuda.wgrad_chunk, (torch.zeros(0, 64), rand(2, 0), rand(2, 64), False),
         (torch.zeros(48, 64), rand(2, 48), rand(2, 64), False)),
    ):  # fmt: skip
        offered = lambda given, op=op: offers(op, op.spec.shape(*given)._replace(device=0))
        assert offered(full) and not offered(arguments), op.spec.name


def test_the_gradients_of_one_class() -> None:
    grad, dy, x = torch.zeros(48, 64), rand(100, 48), rand(100, 64)
    s = shapes.wgrad_shape(grad, dy, x, False)
    assert (s.rows, s.n, s.k, s.out, s.fresh) == (128, 64, 128, torch.float32, False)
    assert s.describe()["T"] == 128
    on = lambda s: cuda._cublaslt_supports(s._replace(device=0))
    assert on(shapes.wgrad_shape(grad, dy, x, False)) and on(shapes.wgrad_shape(grad.bfloat16(), dy, x, True))
    assert not on(shapes.wgrad_shape(grad.bfloat16(), dy, x, False)), "a running sum is fp32"
    assert not on(shapes.wgrad_shape(grad.t().contiguous().t(), dy, x, False))
    weight = torch.Size((shapes.DGRAD_WHOLE + 8, 64))
    head = shapes.LinearShape(0, 16, weight, torch.bfloat16, None, False, 1, True, "dgrad")
    assert head.is_head and not head._replace(chunks=2).is_head and not head._replace(form="forward").is_head


ROOT = Path(__file__).resolve().parents[2]


def calls() -> list[tuple[ScheduledOp, tuple]]:
    """Every op with arguments of many shapes and layouts."""
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
            found.append((scoring._dhidden, (running, dz, weight, fresh, some)))
        rows = rand(16, c)
        for dtype in (torch.float32, torch.bfloat16):
            grad = torch.zeros(v * c + 1, dtype=dtype)[shift : v * c + shift].view(v, c)
            found.append((scoring._dweight, (grad, dz, rows, fresh, some)))
            found.append((scoring._dweight, (torch.zeros(v, 2 * c, dtype=dtype)[:, :c], dz, rows, fresh, some)))
    return found


def test_what_decides_a_call_decides_its_class() -> None:
    by_op: dict[ScheduledOp[Any], list[tuple[Any, ...]]] = {}
    for op, given in calls():
        by_op.setdefault(op, []).append(given)
    assert len(by_op) == 7 and sum(len(classes_of(op.spec, given)) for op, given in by_op.items()) > 150


def test_offers_have_names_of_their_own_and_fit_shared_memory() -> None:
    for op in (cuda.linear, cuda.linear_dgrad, cuda.wgrad_chunk):
        names = [schedule.name for schedule in op.spec.schedules]
        assert len(set(names)) == len(names)
    for offer in (*cuda.OFFERS, *cuda.HEAD_OFFERS):
        fitted = matrix.fit(offer.tile, 1 << 20, 2, 232448)
        assert fitted == offer.tile, "the tile fits in shared memory"
        assert {offer.least - 1, offer.most} <= {*shapes.BUCKETS, cuda.ANY}, "whole buckets"
    for offer in cuda.ALGORITHM_OFFERS:
        assert {offer.least - 1, offer.most} <= {*shapes.BUCKETS, cuda.ANY}, "whole buckets"
    algorithms = {(offer.name, offer.which) for offer in cuda.ALGORITHM_OFFERS}
    assert len(algorithms) == len({name for name, _ in algorithms})


SHAPE = shapes.LinearShape(0, 32, torch.Size((1024, 512)), torch.bfloat16, None, False, 1, True, "forward")


def offered_for(s: shapes.LinearShape) -> list[str]:
    op = {"forward": cuda.linear, "dgrad": cuda.linear_dgrad, "wgrad": cuda.wgrad_chunk}[s.form]
    return offers(op, s)


def explicit_for(s: shapes.LinearShape) -> list[str]:
    """Names of the explicit cuBLASLt algorithms for a class."""
    return [name.removeprefix("cublaslt.") for name in offered_for(s) if re.match(r"cublaslt\.\d+x", name)]


def tiles_of(m: int, n: int) -> list[str]:
    """Names of the tiles offered for a bucket of rows and a width."""
    offered = offered_for(SHAPE._replace(rows=m, weight=torch.Size((n, 512))))
    return [name.removeprefix("triton.") for name in offered if name.startswith("triton.")]


def test_classes_of_few_rows_have_one_to_four_explicit_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    few = [rows for rows in shapes.BUCKETS if 16 < rows <= 256]
    for n, m in itertools.product((8, 1024, 2048, 2056, 4096, 6144, 8192), few):
        found = explicit_for(SHAPE._replace(rows=m, weight=torch.Size((n, 512))))
        assert 1 <= len(found) <= 4, (n, m)
        assert found == explicit_for(SHAPE._replace(rows=m, weight=torch.Size((512, n)), form="dgrad"))
        for name in found:
            features, tokens = map(int, name.split(".")[0].split("x"))
            assert -(-n // features) * -(-m // tokens) <= 132, "one wave on an H200"
    wide = SHAPE._replace(weight=torch.Size((4096, 512)))
    assert explicit_for(wide._replace(rows=160)) == ["64x80.1x2", "128x40.2x1", "128x40.1x2"]
    assert explicit_for(wide._replace(rows=256)) == ["64x128.1x2", "128x64.2x1", "128x64.1x2", "128x64.1x1"]
    head = SHAPE._replace(weight=torch.Size((151936, 1024)), form="dgrad")
    assert explicit_for(head._replace(rows=2048)) == ["128x128.1x2"] and not explicit_for(head._replace(rows=64))
    for s in (
        SHAPE._replace(rows=16), SHAPE._replace(rows=512), wide._replace(rows=2048), SHAPE._replace(chunks=2),
        SHAPE._replace(weight=torch.Size((24576, 512))), SHAPE._replace(form="wgrad"),
    ):  # fmt: skip
        assert not explicit_for(s) and "cublaslt.0" in offered_for(s), s
    for capability in ((8, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert not explicit_for(wide) and "cublaslt.0" in offered_for(wide)


def test_classes_of_few_rows_have_one_to_four_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for n, m in itertools.product((1024, 4096, 6144, 24576), shapes.BUCKETS[1:12]):
        offered = tiles_of(m, n)
        assert 1 <= len(offered) <= 4 and not any("head" in name for name in offered), (n, m)
    assert tiles_of(96, 4096) == tiles_of(128, 4096) == ["64x64x128", "128x32x128", "128x32x64", "64x128x64"]
    assert tiles_of(160, 4096) == tiles_of(192, 4096) == ["128x64x64", "64x128x64"]
    assert tiles_of(96, 6144) == ["128x64x64", "64x128x64"] and tiles_of(224, 4096) == ["64x128x64"]
    assert tiles_of(96, 1024) == ["64x16x256", "64x32x128"] and tiles_of(256, 1024) == ["64x32x128"]
    assert tiles_of(512, 4096) == []


def test_doctor_prints_verdicts_and_the_first_differing_element() -> None:
    shape = {"M": 1, "N": 48, "bias": False}
    first = {"kind": "wide", "rows": 1, "index": [0, 7], "actual": "1.5", "expected": "1.25", "mismatches": 3,
             "elements": 48, "ulps": 2}  # fmt: skip
    common = {"op": "linear", "shape": shape, "ms": 0.5, "chosen": True, "first": None}
    rows = [
        {**common, "schedule": "cublaslt.0", "certified": True, "reason": "equal in 9 elements", "speed": 2.0},
        {**common, "schedule": "planted", "certified": False, "reason": "bits differ", "first": first, "ms": None,
         "speed": None, "chosen": False},
    ]  # fmt: skip
    found = {"unavailable": "no compiler", "uncertified": [{"op": "o", "shape": shape, "reason": "full"}],
             "unsupported": [{"op": "p", "shape": shape, "schedules": ["hopper"]}], "rows": rows,
             "verdicts": "here"}  # fmt: skip
    text = "\n".join(doctor._schedule_lines(found))
    for part in ("cuBLASLt's schedules are off: no compiler", "not certified: o",
                 "p M=1, N=48: anchor; not for this GPU or shape: hopper", "M=1, N=48", "certified, chosen",
                 "2.00x", "refused", "schedules: verdicts in here",
                 "wide, 1 rows: at [0, 7] 1.5, anchor 1.25, 3 of 48 differ"):  # fmt: skip
        assert part in text, part


def dtypes(arguments: tuple) -> list[torch.dtype | None]:
    """Dtypes of every tensor in a sample's arguments, including those of an `Active`."""
    flat = [x for a in arguments for x in (a if isinstance(a, Active) else (a,))]
    return [x.dtype if isinstance(x, Tensor) else None for x in flat]


@pytest.mark.parametrize("many, probs", ((True, False), (False, False), (False, True)))
def test_what_is_no_part_of_a_class_of_scoring_differs_between_its_samples(many: bool, probs: bool) -> None:
    s = scored.LinearLogprobShape(-1, many, 16, torch.bfloat16, True, False, True, probs, not probs, False, False)
    given = [scored.forward_sample(s, m, "normal", torch.Generator().manual_seed(0)) for m in scored.rows_of(s)]
    for (hidden, weight, targets, _, kept, _, width), m in zip(given, scored.rows_of(s), strict=True):
        assert scored.forward_shape(hidden, weight, targets, None, kept, probs, width) == s
        assert len(hidden) == m and kept.shape == (m, -(-len(weight) // 32)) and width % 256 == 0
        assert m < 3 or (targets[1] == -1 and targets[2] >= len(weight))
    assert len({x[1].stride() for x in given}) == len({x[0].stride() for x in given}) == 2, (
        "contiguous and strided rows"
    )
    assert len({x[6] for x in given}) == (1 if probs else 3), "number of stored logits"
    assert {len(x[1]) % 8 for x in given} == ({0} if probs else {0, 5}), (
        "vocabularies that are and are not multiples of 8"
    )


@pytest.mark.parametrize("many", (False, True))
def test_a_block_of_dz_has_any_width_and_keeps_its_rows_apart(many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_order(monkeypatch)
    monkeypatch.setattr(scored.anchor, "forward", lambda hidden, *_: (None, hidden[:, 0], None, hidden[:, :2]))
    s = scored.LinearLogprobShape(-1, many, 16, torch.bfloat16, True, False, False, False, False, True, False)
    widths = []
    for m in scored.rows_of(s):
        given = scored.dz_sample(s, m, "normal", torch.Generator().manual_seed(0))
        dz, _, weight, *_, first, vocab = given
        assert scored.dz_shape(*given) == s and vocab - first == len(weight) == dz.shape[1]
        (copy,) = certification.results(lambda dz, *_: None, given, (0,))
        assert copy.stride() == dz.stride() and dz.stride(0) % 8 == 0 and copy.isnan().all()
        widths.append(dz.shape[1])
    assert {n % 8 for n in widths} == {0, 5}


def test_samples_do_not_follow_the_users_default_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels get addresses, so a sample with another dtype would be accessed out of bounds."""
    monkeypatch.setattr(scored, "SAMPLE_ENTRIES", 80)
    monkeypatch.setattr(scored, "VOCAB_TILE", 8)
    monkeypatch.setattr(
        scoring.anchor, "forward", lambda hidden, *_: (None, hidden[:, 0].float(), None, hidden.float())
    )
    keep_order(monkeypatch)
    w, x = rand(48, 64), rand(9, 64)
    gradient = shapes.wgrad_shape(torch.zeros(48, 64), rand(9, 48), x, False)
    grads = [
        scored.GradShape(-1, 64, torch.bfloat16, torch.float32, True, fresh, row, whole)
        for fresh, row, whole in ((True, 0, True), (False, 88, False))
    ]
    whole = scored.LinearLogprobShape(-1, False, 64, torch.bfloat16, True, True, True, False, False, True, True)
    monkeypatch.setattr(scored, "SAMPLE_BLOCK", 64)
    monkeypatch.setattr(scored, "SAMPLE_BYTES", 1 << 14)
    samples = (
        lambda g: shapes.linear_sample(shapes.linear_shape(x, w, rand(48), 1, 1, None), 9, "wide", g),
        lambda g: shapes.dgrad_sample(shapes.dgrad_shape(rand(9, 48), w, 1), 9, "zeros", g),
        lambda g: shapes.wgrad_sample(gradient, 9, "wide", g),
        lambda g: scored.forward_sample(whole, 9, "normal", g),
        lambda g: scored.dz_sample(whole, 9, "normal", g),
        *(lambda g, s=s: scored.dhidden_sample(s, 9, "zeros", g) for s in grads),
        *(lambda g, s=s: scored.dweight_sample(s, 9, "zeros", g) for s in grads),
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


def test_a_bias_costs_dispatch_nothing() -> None:
    """All biases share one class: a schedule gets the bias laid out as it was compared."""
    x, w = rand(2, 64), rand(48, 64)
    biases = (rand(48), rand(96)[::2], rand(49)[1:])
    assert len({shapes.linear_call(x, w, bias, 1, 1, None) for bias in (None, *biases)}) == 2
    for bias in biases:
        placed = cuda._placed(bias)
        assert placed.is_contiguous() and not placed.data_ptr() & 15 and torch.equal(placed, bias)
        assert (placed is bias) == (bias is biases[0])


def test_bench_dispatch_measures_a_linear_with_a_bias(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    benchmarks = Path(__file__).resolve().parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(str(benchmarks))
    bench = importlib.import_module("bench_dispatch")
    rows: list[dict[str, Any]] = []
    monkeypatch.setattr(bench, "write_result", lambda name, found: rows.extend(found))
    monkeypatch.setattr(sys, "argv", ["bench_dispatch.py", "--device", "cpu", "--rounds", "1"])
    bench.main()
    named = {row["op"] for row in rows}
    assert "dispatch linear, bias" in named and {f"dispatch {op.spec.name}" for op, _ in calls()} <= named


@pytest.mark.parametrize("out", (None, torch.float32), ids=("bf16", "fp32"))
@pytest.mark.parametrize("c", (1024, 4096))
@pytest.mark.parametrize("form", ("forward", "dgrad", "wgrad"))
def test_heads_are_compared_at_their_fewest_and_most_rows(form: str, c: int, out: torch.dtype | None) -> None:
    n = 151936
    for low, high in itertools.pairwise(shapes.BUCKETS):
        if form == "wgrad" and high > cuda.WGRAD_TOKENS:
            continue
        s = shapes.LinearShape(0, high, torch.Size((n, c)), torch.bfloat16, out, False, 1, True, form)
        rows, width = shapes.rows_of(s), n * (2 if out is None or form != "forward" else 4)
        assert rows == sorted(set(rows)) and rows[-1] == shapes.max_rows(s) <= 16384
        if high * width <= shapes.SAMPLE_BYTES or form == "wgrad":
            assert rows[0] == low + 1 and rows[-1] == high
        else:
            assert len(rows) == 2 and 0.95 * shapes.SAMPLE_BYTES < rows[-1] * width <= shapes.SAMPLE_BYTES
            assert rows[0] == min(low + 1, rows[-1] // 2 - 7), "the smallest piece"
    s = shapes.LinearShape(0, 16384, torch.Size((4096, 4096)), torch.bfloat16, None, False, 1, True, "forward")
    assert shapes.rows_of(s) == [8185, 12285, 16384]
