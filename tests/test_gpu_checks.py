"""The checks of the GPU tests can fail: a schedule that does not run is seen, and only what was compared is counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from gpu.gpu_checks import Compared, assert_rows_alone, faster_schedule, refusal, slices
from torch import Tensor

from rlkernel.kernels import clock, schedule
from rlkernel.kernels.certification import Family, Schedule
from rlkernel.kernels.schedule import ScheduledOp

Times = dict[str, float]


class Shape(NamedTuple):
    """Shape class of the fake op."""

    device: int
    dtype: torch.dtype


@pytest.fixture
def op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Times], ScheduledOp]:
    """An op of two schedules that takes the times given for those of its candidates."""
    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(schedule, "_ops", {})

    def make(times: Times) -> ScheduledOp:
        monkeypatch.setattr(
            clock, "milliseconds", lambda candidates, device: {name: times[name] for name in candidates}
        )
        bind = lambda s: lambda x: x + 1
        return ScheduledOp(Family(
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
def test_a_faster_schedule_that_does_not_run_is_seen(
    op: Callable[[Times], ScheduledOp], without: tuple[str, ...]
) -> None:
    made, x = op({"anchor": 3.0, "one": 1.0, "two": 2.0}), torch.zeros(2)

    def run() -> Tensor:
        return made(x)

    with schedule.without(*without), pytest.raises(AssertionError, match="ran"):
        faster_schedule(made, run)


def test_an_anchor_that_is_the_fastest_is_seen(op: Callable[[Times], ScheduledOp]) -> None:
    made, x = op({"anchor": 1.0, "one": 2.0, "two": 2.0}), torch.zeros(2)
    with pytest.raises(AssertionError, match="the anchor ran"):
        faster_schedule(made, lambda: made(x))


def test_what_was_compared_is_counted() -> None:
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


def test_what_differs_fails_and_is_counted() -> None:
    x, seen = torch.zeros(4, 2), Compared()
    with pytest.raises(AssertionError, match="some rows, tensor 1: 2 of 8 elements differ"):
        seen.rows([x, x], [x, torch.tensor([[0.0, 1]] * 2 + [[0.0, 0]] * 2)], "some rows")
    assert seen.mismatches == 2 and seen.cases == 0
    with pytest.raises(AssertionError, match="rows 0:1 alone"):
        assert_rows_alone(lambda x: x + len(x), (x,), "what knows its batch")
    with pytest.raises(ValueError):
        seen.rows([x], [x, x], "fewer outputs")


def test_a_refusal_is_recorded_as_one() -> None:
    first = {"index": [0, 1], "elements": 64, "mismatches": 60}
    assert refusal(first) == {"cases": 1, "elements": 64, "mismatches": 60, "refused": True}
    assert refusal(None) == {"cases": 1, "elements": 0, "mismatches": 0, "refused": True}
