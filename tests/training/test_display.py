"""What a run prints of its progress."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rlkernel.training import display


def test_the_first_step_builds_kernels_and_foretells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
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
