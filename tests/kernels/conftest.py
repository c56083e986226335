"""What tests of schedules share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels.fake_schedules import milliseconds

from rlkernel.kernels import certification, clock, schedule


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, a clock that nothing bends, no sample twice, and afterwards the ops that there were before."""
    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(clock, "milliseconds", milliseconds)
    monkeypatch.setattr(certification, "ENOUGH", 1)
    monkeypatch.setattr(certification, "LEAST", 1)
    before = dict(schedule._ops)
    yield tmp_path / "schedules"
    schedule._ops.clear()
    schedule._ops.update(before)
