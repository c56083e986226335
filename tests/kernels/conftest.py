"""Fixtures of the tests of schedules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels.fake_schedules import milliseconds

from rlkernel.kernels import certification, clock, scheduled_op


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The verdict folder of an empty cache; times are fixed, small samples are not repeated, new ops are removed."""
    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(clock, "milliseconds", milliseconds)
    monkeypatch.setattr(certification, "ENOUGH_ELEMENTS", 1)
    monkeypatch.setattr(certification, "MIN_ELEMENTS", 1)
    before = dict(scheduled_op._ops)
    yield tmp_path / "schedules"
    scheduled_op._ops.clear()
    scheduled_op._ops.update(before)
