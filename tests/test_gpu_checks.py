"""The helpers of the GPU tests can fail: they detect a schedule that does not run, and count only what they compared.

Also without a GPU: the order in which workers get the tests, and how a test waits for memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from gpu.gpu_checks import Compared, assert_rows_alone, faster_schedule, refusal, same_bits, slices
from gpu.workers import LONG, chunks, long_first, require_memory, rotated
from torch import Tensor

from rlkernel.kernels import clock, scheduled_op
from rlkernel.kernels.certification import OpSpec, Schedule
from rlkernel.kernels.scheduled_op import ScheduledOp

Times = dict[str, float]


class Shape(NamedTuple):
    """Shape class of the fake op."""

    device: int
    dtype: torch.dtype


@pytest.fixture
def op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Times], ScheduledOp]:
    """Makes an op with two schedules whose candidates take the given times."""
    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(scheduled_op, "_ops", {})

    def make(times: Times) -> ScheduledOp:
        monkeypatch.setattr(
            clock, "milliseconds", lambda candidates, device: {name: times[name] for name in candidates}
        )
        bind = lambda s: lambda x: x + 1
        return ScheduledOp(OpSpec(
            "fake", lambda x: x + 1, lambda x: Shape(-1, x.dtype), lambda s: [3],
            lambda s, m, kind, generator: (torch.randn(m, generator=generator),),
            (Schedule("one", bind), Schedule("two", bind)),
        ))  # fmt: skip

    return make


@pytest.mark.parametrize("one,two,ran", ((1.0, 2.0, "one"), (2.9, 2.8, "two")))
def test_a_faster_schedule_runs(op: Callable[[Times], ScheduledOp], one: float, two: float, ran: str) -> None:
    made, x = op({"anchor": 3.0, "one": one, "two": two}), torch.zeros(2)
    assert faster_schedule(made, lambda: made(x)) == ran


@pytest.mark.parametrize("without", ((), ("one",)), ids=("all off", "the fastest off"))
def test_a_faster_schedule_that_does_not_run_is_detected(
    op: Callable[[Times], ScheduledOp], without: tuple[str, ...]
) -> None:
    made, x = op({"anchor": 3.0, "one": 1.0, "two": 2.0}), torch.zeros(2)

    def run() -> Tensor:
        return made(x)

    with scheduled_op.without(*without), pytest.raises(AssertionError, match="ran"):
        faster_schedule(made, run)


def test_an_anchor_that_is_the_fastest_is_detected(op: Callable[[Times], ScheduledOp]) -> None:
    made, x = op({"anchor": 1.0, "one": 2.0, "two": 2.0}), torch.zeros(2)
    with pytest.raises(AssertionError, match="the anchor ran"):
        faster_schedule(made, lambda: made(x))


def test_comparisons_are_counted() -> None:
    x, w = torch.randn(40, 8), torch.randn(8, 8)
    seen = assert_rows_alone(lambda x, y, z: (x * 2, z, y[:, :3]), (x, x, None), "twice")
    assert (seen.cases, seen.tokens, seen.elements) == (len(slices(40)), sum(s.stop - s.start for s in slices(40)), 0)
    more = Compared()
    more.rows([x, None, x[:, 0]], [x, None, x[:, 0]], "rows")
    more.whole([w, w[0]], [w, w[0]], "whole")
    more.add(tokens=5)
    seen += more
    assert vars(more) == {"cases": 3, "tokens": 45, "elements": 72, "mismatches": 0}
    assert (seen.cases, seen.tokens) == (len(slices(40)) + 3, sum(s.stop - s.start for s in slices(40)) + 45)


def test_differences_fail_and_are_counted() -> None:
    x, seen = torch.zeros(4, 2), Compared()
    with pytest.raises(AssertionError, match="some rows, tensor 1: 2 of 8 elements differ"):
        seen.rows([x, x], [x, torch.tensor([[0.0, 1]] * 2 + [[0.0, 0]] * 2)], "some rows")
    assert seen.mismatches == 2 and seen.cases == 0
    with pytest.raises(AssertionError, match="rows 0:1 alone"):
        assert_rows_alone(lambda x: x + len(x), (x,), "an op that depends on the batch")
    with pytest.raises(ValueError):
        seen.rows([x], [x, x], "fewer outputs")
    with pytest.raises(AssertionError, match="8 of 8 elements differ"):
        seen.rows([x], [-x], "the sign of zero")


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.int32, torch.bool))
def test_same_bits(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, 0.0, 3.0], [0.0, 5.0, 6.0]]).to(dtype)
    other = x.clone()
    other[1, 2] = 0
    assert same_bits(x, x.clone()) and same_bits(x.t(), x.t().contiguous()) and not same_bits(x, other)
    assert not same_bits(x, x[:1]) and not same_bits(x, x.to(torch.float16)) and same_bits(x[0, 0], x[0, 0].clone())
    if dtype.is_floating_point:
        nan = torch.full_like(x, torch.nan)
        assert same_bits(nan, nan.clone()) and not same_bits(0 * x, -0.0 * x)


def test_a_refusal_is_recorded_as_one() -> None:
    first = {"index": [0, 1], "elements": 64, "mismatches": 60}
    assert refusal(first) == {"cases": 1, "elements": 64, "mismatches": 60, "refused": True}
    assert refusal(None) == {"cases": 1, "elements": 0, "mismatches": 0, "refused": True}


# ---- workers.py ------------------------------------------------------------------------------------------------------


def test_long_tests_are_the_first_of_each_chunk() -> None:
    item = lambda file, marker=None: SimpleNamespace(path=Path(file), get_closest_marker=lambda name: marker)
    short = [item(f"test_{i}.py") for i in range(17)]
    long: list[Any] = [item(LONG[0]), item(LONG[0]), item("test_9.py", "gpu_memory"), item(LONG[2])]
    ordered = long_first([*short[:5], *long, *short[5:]], 3)
    assert chunks(21, 3) == [7, 7, 7] and chunks(23, 3) == [7, 8, 8]
    assert [ordered[i] for i in (0, 1, 7, 14)] == [long[0], long[3], long[1], long[2]]
    assert [x for x in ordered if x not in long] == short
    assert long_first(long, 3) != [] and set(map(id, long_first(long, 9))) == set(map(id, long)), "none is lost"
    assert rotated(["0", "1", "2"], "gw4") == ["1", "2", "0"]


@pytest.mark.parametrize(
    "free,reason",
    (([80, 80], None), ([10, 20, 40], None), ([10] * 9, "needs 32 GiB of free"), ([8], "needs 32 GiB of GPU memory")),
)
def test_a_test_waits_for_memory_or_is_skipped(
    monkeypatch: pytest.MonkeyPatch, free: list[int], reason: str | None
) -> None:
    total, now = 80 if len(free) > 1 else 16, [0.0]
    found = iter(free)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(found) << 30, total << 30))
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    if reason is None:
        require_memory(32, patience=3.0)
    else:
        with pytest.raises(pytest.skip.Exception, match=reason):
            require_memory(32, patience=3.0)
