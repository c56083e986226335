"""The checks of the GPU tests can fail: a schedule that does not run is seen, and only what was compared is counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu.gpu_checks import faster_schedule
from torch import Tensor

from rlkernel.kernels import clock, schedule
from rlkernel.kernels.certification import Family, Schedule
from rlkernel.kernels.schedule import ScheduledOp

Times = dict[str, float]


@pytest.fixture
def op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Times], ScheduledOp]:
    """An op of two schedules that takes the times given for those of its candidates."""
    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(schedule, "_ops", {})

    def make(times: Times) -> ScheduledOp:
        monkeypatch.setattr(
            clock, "milliseconds", lambda candidates, device: {name: times[name] for name in candidates}
        )
        bind = lambda key: lambda x: x + 1
        return ScheduledOp(Family(
            "fake", lambda x: x + 1, lambda x: (-1, x.dtype), lambda key: {"dtype": str(key[1])},
            lambda key: torch.device("cpu"), lambda key: [3],
            lambda key, m, kind, generator: (torch.randn(m, generator=generator),),
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
