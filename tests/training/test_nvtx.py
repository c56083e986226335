"""NVTX ranges: a training step opens those that CONTRIBUTING.md names, in pairs, and none unless asked for."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from training.tiny import settings_of, trainer_of

from rlkernel import nvtx

PAGE = Path(__file__).resolve().parent.parent.parent / "CONTRIBUTING.md"


@pytest.mark.parametrize("on", (False, True))
def test_ranges_of_a_training_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
    opened: list[str] = []
    open_now: list[str] = []

    @contextlib.contextmanager
    def record(name: str) -> Iterator[None]:
        opened.append(name)
        open_now.append(name)
        yield
        assert open_now.pop() == name

    monkeypatch.setattr(torch.cuda.nvtx, "range", record)
    monkeypatch.setattr(nvtx, "_on", on)
    trainer, run = trainer_of(settings_of(tmp_path, "train.epochs=2"), tmp_path)
    with run:
        trainer.step(1)
    phases = {"rollout", "reward", "score", "forward", "backward", "optimizer"}
    engine = {"engine.schedule", "engine.run", "engine.commit"}
    assert set(opened) == (phases | engine if on else set()) and not open_now
    assert phases | engine <= set(re.findall(r"`([\w.]+)`", PAGE.read_text()))


def test_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLKERNEL_NVTX", raising=False)
    assert not nvtx._wanted()
    for value, built, found in (("0", False, False), ("1", True, True)):
        monkeypatch.setenv("RLKERNEL_NVTX", value)
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda built=built: built)
        assert nvtx._wanted() is found
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(RuntimeError, match="RLKERNEL_NVTX=1 needs a CUDA build"):
        nvtx._wanted()
    monkeypatch.setenv("RLKERNEL_NVTX", "yes")
    with pytest.raises(ValueError, match="'yes'; expected 1"):
        nvtx._wanted()
