"""Fixtures of the tests of schedules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels.fake_schedules import milliseconds

from rlkernel.kernels import certification, clock, schedule


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The verdict folder of an empty cache; times are fixed, small samples are not repeated, new ops are removed."""
    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(clock, "milliseconds", milliseconds)
    monkeypatch.setattr(certification, "ENOUGH", 1)
    monkeypatch.setattr(certification, "LEAST", 1)
    before = dict(schedule._ops)
    yield tmp_path / "schedules"
    schedule._ops.clear()
    schedule._ops.update(before)
