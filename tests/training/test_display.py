"""Progress output of a run."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.console import Console

from rlkernel.training import display


def test_the_first_step_builds_kernels_and_gives_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((40.0, 42.0, 44.0))
    monkeypatch.setattr(display.time, "perf_counter", lambda: next(clock))
    out = io.StringIO()
    shown = display.Display(Console(file=out, width=100), plain_every=0.0)
    shown.start("warm-up", 500)
    for step in (1, 2, 3):
        shown.step(step, {"loss": f"{step}.0"})
    first, second, third = out.getvalue().splitlines()
    assert first == "warm-up 1/500  loss 1.0"
    assert second.endswith("left 16:36") and third.endswith("left 16:34")


@pytest.mark.parametrize("width", (40, 60, 80, 120))
def test_a_narrow_line_keeps_step_bar_and_time_left(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    clock = iter((40.0, 42.0, 44.0))
    monkeypatch.setattr(display.time, "perf_counter", lambda: next(clock))
    out = io.StringIO()
    shown = display.Display(Console(file=out, width=width, force_terminal=True, color_system=None, soft_wrap=True))
    shown.start("grpo", 4)
    values = {"reward": "0.123", "length": "12.3", "KL": "0.0012", "exact": "1", "tok/s": "7.22k", "mem": "12345 MiB"}
    for step in (1, 2, 3):
        shown.step(step, values)
    shown.stop()
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()))
    last = [line for line in lines if line.strip()][-1]
    assert len(last) <= width and last.startswith("grpo ") and "3/4" in last and "left 0:02" in last
    assert last.count("\u2501") >= 8, "the bar"
    assert ("reward 0.123" in last) == (width >= 60) and ("mem 12345 MiB" in last) == (width >= 120)


def test_a_closed_pipe_silences_a_run_and_ends_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(BrokenPipeError):  # which the command line answers with status 141; rich would exit with 1
        display.Screen().print("text")
    shown = display.Display()
    shown.say("text")
    shown.start("grpo", 2)
    shown.step(1, {"reward": "1"})
