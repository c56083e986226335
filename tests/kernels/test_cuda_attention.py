"""Schedules of long prefill without a GPU: shape classes, samples, the choice, and a schedule that does not build."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.fake_schedules import Launches, classes_of, milliseconds
from torch import Tensor

pytest.importorskip("triton")

from rlkernel.contract import assert_bitwise, orders
from rlkernel.kernels import clock, scheduled_op
from rlkernel.kernels.certification import Schedule, describe
from rlkernel.kernels.cuda import attention as cuda
from rlkernel.kernels.cuda import attention_prefill_sm90, driver
from rlkernel.kernels.errors import BuildError
from rlkernel.kernels.samples import KINDS, NONFINITE, SCALES
from rlkernel.kernels.scheduled_op import ScheduledOp, UncertifiedError
from rlkernel.kernels.triton import attention as anchor
from rlkernel.kernels.verdicts import ANCHOR

SHAPE = cuda.AttentionShape(-1, torch.bfloat16, 2, 1, 64, 128, True, False, 2048)
CLASSES = [
    SHAPE._replace(split=split, several=several, padded=padded, span=span)
    for split, several, span in ((128, True, 2048), (128, False, 2048), (2048, True, 8192), (2048, True, 16384),
                                 (2048, False, 2048), (4096, False, 8192))
    for padded in (False, True)
]  # fmt: skip


@pytest.mark.parametrize("shape", CLASSES, ids=str)
def test_a_sample_is_of_its_class(shape: cuda.AttentionShape) -> None:
    small = shape._replace(heads=1, d=16)
    for rows in cuda.rows_of(small):
        given = cuda.sample(small, rows, "normal", torch.Generator().manual_seed(0))
        _, k, v, cu_q, lens, max_q, max_k, *_, capacity, out, lse = given
        assert cuda.shape_of(*given) == small
        queries, keys = cuda.lengths(small, rows)
        assert cu_q.diff().tolist() == queries and all(n <= m for n, m in zip(queries, keys, strict=True))
        assert (
            (max_q > max(queries)) == (rows == sum(cuda.RAGGED))
            and max_k == max(keys)
            and out.isnan().all()
            and lse.isnan().all()
        )
        assert (lens if capacity else lens.diff()).tolist() == keys
        first = [i * capacity for i in range(len(keys))] if capacity else lens[:-1].tolist()
        inside = torch.zeros(len(k), dtype=torch.bool)
        for begin, n in zip(first, keys, strict=True):
            inside[begin : begin + n] = True
        for x in (k, v):
            assert x[inside].isfinite().all() and x[~inside].isnan().all()
        assert not capacity or len(k) - 64 == capacity * len(keys)


def test_what_is_no_part_of_a_class_differs_between_its_samples() -> None:
    given = [
        cuda.sample(SHAPE, rows, kind, torch.Generator().manual_seed(0))
        for kind in (*KINDS, NONFINITE)
        for rows in cuda.rows_of(SHAPE)[:: 1 if kind == "normal" else -2]
    ]
    scales = {scale for *_, scale, _, _, _, _ in given}
    assert len(scales) == len(SCALES) and any(math.frexp(scale)[0] != 0.5 for scale in scales)
    assert given[1][7] == 64**-0.5, "the timed sample"
    for i in range(3):
        assert {x[i].is_contiguous() for x in given} == {True, False}, "contiguous and strided rows"
    assert not given[0][0].is_contiguous() and given[0][10].is_contiguous()


@pytest.mark.parametrize("heads", ((64, 8), (28, 4), (32, 32), (16, 8), (40, 8), (32, 4), (128, 128), (14, 2)), ids=str)
def test_both_orders_of_tiles_are_compared(heads: tuple[int, int]) -> None:
    """The kernel orders its tiles in one of two ways, depending on the longest sequence's queries."""
    group = heads[0] // heads[1]
    for shape in CLASSES:
        s = shape._replace(heads=heads[0], kv_heads=heads[1])
        tiles = [-(-max(cuda.lengths(s, rows)[0]) * group // 128) for rows in cuda.rows_of(s)]
        most = s.span if s.several else min(s.span, s.split)
        assert tiles[0] <= attention_prefill_sm90.INTERLEAVED_TILES
        assert (tiles[1] > attention_prefill_sm90.INTERLEAVED_TILES) == (most * group > 4096), (
            "wherever calls have them"
        )


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_compared_is_finite(kind: str) -> None:
    """Comparing NaN with NaN would prove little."""
    q, k, v, *_ = cuda.sample(SHAPE, 775, kind, torch.Generator().manual_seed(1))
    assert (q.double() @ k[: len(k) - 64, 0].double().T).abs().max() * 64**-0.5 * 1.45 < 2**24
    assert v[: len(v) - 64].isfinite().all()


def test_infinities_and_nans_are_where_the_op_defines_their_effect() -> None:
    """A tile may multiply a masked key's value by zero, so values are finite; queries and some keys are not."""
    shape = SHAPE._replace(heads=4, kv_heads=2)
    q, k, v, *_ = cuda.sample(shape, 775, NONFINITE, torch.Generator().manual_seed(1))
    total = len(k) - 64
    assert q.isnan().any() and q.isinf().any() and q.isfinite().all(-1).float().mean() > 0.9
    assert v[:total].isfinite().all() and (~k[:total].isfinite()).sum(dim=(0, 2)).tolist() == [1, 0]
    assert NONFINITE in cuda.prefill.spec.kinds


def test_classes_follow_from_the_arguments() -> None:
    spans = {2048: 2048, 2049: 8192, 8192: 8192, 8193: 16384, 10**6: 16384}
    q, k = torch.zeros(1, 4, 64), torch.zeros(1, 2, 64)
    for keys, span in spans.items():
        found = cuda.shape_of(q, k, k, q, q, 700, keys, 0.1, 2048, 0, q, q)
        assert (found.span, found.several, found.heads, found.kv_heads) == (span, keys > 2048, 4, 2)


def test_classes_of_an_engine_are_those_of_its_calls() -> None:
    """The classes certified at startup are those that paged calls use later."""

    def spans(tokens: int, longest: int) -> list[int]:
        return [s.span for s in cuda.paged_classes(0, torch.bfloat16, 4, 2, 128, tokens, longest)]

    assert spans(8192, 4095) == spans(511, 40960) == []
    assert spans(512, 4096) == spans(8192, 8192) == [8192] and spans(8192, 8193) == spans(8192, 131072) == [8192, 16384]
    q, k = torch.zeros(700, 4, 128, dtype=torch.bfloat16), torch.zeros(8, 2, 128, dtype=torch.bfloat16)
    (settled,) = cuda.paged_classes(-1, torch.bfloat16, 4, 2, 128, 8192, 5000)
    assert settled == cuda.shape_of(q, k, k, q, q, 700, 5000, 0.1, orders.ATTENTION_SPLIT, 5056, q, q)


def test_calls_of_one_class_have_one_call_key() -> None:
    def call(keys: int, heads: int = 4, split: int = 2048, capacity: int = 0, dtype: torch.dtype = torch.bfloat16):
        q, k = torch.zeros(3, heads, 64, dtype=dtype), torch.zeros(1, 2, 64, dtype=dtype)
        return q, k, k, q, q, 600, keys, 0.1, split, capacity, q, q

    calls = [
        call(keys, **more)
        for more in ({}, {"heads": 8}, {"split": 64}, {"capacity": 704}, {"dtype": torch.float16})
        for keys in (1, 64, 65, 2048, 2049, 8192, 8193, 16384, 99999)
    ]
    spec = cuda.prefill.spec
    assert len(classes_of(spec, calls)) == len({spec.call_key(*given) for given in calls}), "one call key per class"


@pytest.mark.parametrize("chip", ((9, 0), (8, 0), (10, 0)))
def test_schedules_offered_to_each_class_and_gpu(chip: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: chip)

    def names(**more: Any) -> list[str]:
        key = SHAPE._replace(**{"device": 0, "d": 128, "split": 2048, "span": 8192, **more})
        return [s.name for s in cuda.prefill.spec.schedules if s.supports(key)]

    hopper = ["hopper", "hopper.skip"] if chip == (9, 0) else []
    assert names() == names(padded=True) == names(dtype=torch.float16) == names(d=64) == names(several=False) == hopper
    assert names(d=80) == names(d=256) == names(dtype=torch.float32) == names(device=-1) == names(split=8192) == []


@pytest.fixture
def op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the op on a CPU with an anchor that only fills its outputs."""
    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(clock, "milliseconds", milliseconds)
    monkeypatch.setattr(cuda, "TIMED", 600)
    monkeypatch.setattr(scheduled_op, "_ops", dict(scheduled_op._ops))

    def make(*schedules: Schedule) -> ScheduledOp:
        return ScheduledOp(dataclasses.replace(cuda.prefill.spec, anchor=mark, schedules=schedules))

    return make


def mark(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, lens: Tensor, *rest: Any) -> None:
    *_, out, lse = rest
    out.copy_(q + 1)
    lse.copy_(q.float().sum(-1))


def wrong(*given: Any) -> None:
    mark(*given)
    given[-1][-1] += 1


def writes_half(*given: Any) -> None:
    mark(*(x[:300] if i in (0, 10, 11) else x for i, x in enumerate(given)))


def test_without_a_compiler_the_anchor_runs_with_a_warning(op: Any) -> None:
    def unbuilt(key: Any) -> Any:
        raise BuildError("attention_prefill_sm90.cu needs NVRTC")

    made = op(Schedule("hopper", unbuilt), Schedule("hopper.skip", lambda key: lambda *given: mark(*given)))
    given = cuda.sample(SHAPE, 600, "normal", torch.Generator().manual_seed(2))
    with pytest.warns(RuntimeWarning, match=r"attention_prefill .* runs without hopper: .*needs NVRTC"):
        made(*given)
    assert_bitwise(given[10], given[0] + 1, "out")
    assert made.chosen(*given) == "hopper.skip"
    rows = {
        row["schedule"]: row for row in scheduled_op.report(torch.device("cpu")) if row["op"] == "attention_prefill"
    }
    assert (
        rows["hopper.skip"]["chosen"] and not rows["hopper"]["certified"] and "needs NVRTC" in rows["hopper"]["reason"]
    )
    with scheduled_op.strict(), pytest.raises(UncertifiedError, match=r"attention_prefill .*needs NVRTC"):
        made(*given)


def test_kernels_that_differ_are_refused(op: Any) -> None:
    made = op(Schedule("hopper", lambda key: wrong), Schedule("hopper.skip", lambda key: writes_half))
    given = cuda.sample(SHAPE, 600, "normal", torch.Generator().manual_seed(3))
    verdict = made.verdict(*given)
    assert [t.certified for t in verdict.trials] == [False, False] and made.chosen(*given) == ANCHOR
    assert verdict.trials[0].first["result"] == 1, "the log-sum-exp"
    assert "nan" in verdict.trials[1].first["actual"], "unwritten output"


@pytest.mark.parametrize("what", ("fits", "q", "out", "stride", "tiles"))
def test_what_the_kernel_cannot_read_runs_the_anchor(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    same = contextlib.nullcontext()
    monkeypatch.setattr(attention_prefill_sm90.common, "on_device", lambda t: same)
    monkeypatch.setattr(driver, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(attention_prefill_sm90, "load", lambda *_, **variant: Launches(ran))
    monkeypatch.setattr(attention_prefill_sm90, "tensor_map", lambda x, rows, columns: tuple(x.shape))
    monkeypatch.setattr(anchor, "prefill", lambda *given: ran.append("anchor"))
    run = attention_prefill_sm90.launcher(0, torch.bfloat16, 64, False, True)
    given = list(cuda.sample(SHAPE, 775, "normal", torch.Generator().manual_seed(4)))
    shifted = lambda x: torch.empty(x.numel() + 8, dtype=x.dtype)[1 : 1 + x.numel()].view(x.shape)
    if what in ("q", "out"):
        at = 0 if what == "q" else 10
        given[at] = shifted(given[at])
    elif what == "stride":
        given[0] = torch.empty(775, 2 * 64 + 4, dtype=torch.bfloat16)[:, :128].unflatten(1, (2, 64))
    elif what == "tiles":
        given[5] = 1 << 36
    run(*given)
    if what != "fits":
        assert ran == ["anchor"]
        return
    ((blocks, threads, *maps, arguments),) = ran
    assert (blocks, threads, maps) == (52, 384, [(len(given[1]), 64)] * 2)
    found = {name: getattr(arguments, name) for name, _ in arguments._fields_}
    q, k, _, cu_q, lens, *_, out, lse = given
    where = {"q": q, "cu_q": cu_q, "lens": lens, "out": out, "lse": lse}
    assert all(found[name] == x.data_ptr() for name, x in where.items())
    numbers = {"q_stride": 256, "tiles": 13, "hk": 1, "group": 2, "batch": 4, "capacity": 0, "split": 128,
               "interleave": 1, "tokens": 775, "keys": len(k)}  # fmt: skip
    assert {name: found[name] for name in numbers} == numbers
    given[1:3] = (x.repeat(1, 2, 1) for x in given[1:3])
    for queries, interleave in ((4096, 2), (4097, 1)):
        given[5] = queries
        run(*given)
        assert ran[-1][-1].interleave == interleave and ran[-1][-1].tiles == -(-queries // 128)


def test_the_ops_are_the_anchors_with_the_choice() -> None:
    for name in ("attention", "paged_attention"):
        found = getattr(cuda, name)
        assert found.func is getattr(anchor, name) and found.keywords == {"long": cuda.prefill}
    plain = describe(SHAPE)
    assert plain["dtype"] == "bfloat16" and "device" not in plain
