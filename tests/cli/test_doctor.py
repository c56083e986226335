"""`rlkernel doctor` on machines that lack a fast path: the anchor runs, and doctor says so."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from rlkernel.cli import doctor
from rlkernel.cli.main import main
from rlkernel.kernels import schedule
from rlkernel.kernels.cuda import attention_fa3, linear, linear_logprob
from rlkernel.kernels.triton import common, matrix

CHIPS = {(8, 0): "ampere", (9, 0): "hopper", (10, 0): "blackwell"}


@pytest.fixture
def chip(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """A GPU of some compute capability, as far as torch is asked about it; nothing can be launched."""
    name = f"GPU of {request.param}"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: request.param)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    monkeypatch.setattr(schedule, "_ops", dict(schedule._ops))
    caches = (common._capability, matrix._has_copy_engine)
    for cache in caches:
        cache.cache_clear()
    yield request.param
    for cache in caches:
        cache.cache_clear()


def on_gpu(op: schedule.ScheduledOp) -> schedule.ScheduledOp:
    """The op with CPU tensors taken for those of GPU 0."""
    key = op.family.key
    return schedule.ScheduledOp(dataclasses.replace(op.family, key=lambda *args: (0, *key(*args)[1:])))


def test_cpu_says_what_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["capability"] is None and found["attention_fa3"]["unavailable"]
    assert {row["implementation"] for row in found["ops"]} <= {"cpp", "reference"}
    assert main(["doctor", "--device", "cpu"]) == 0
    assert "attention variant fa3: not here" in capsys.readouterr().out


@pytest.mark.parametrize("chip", CHIPS, indirect=True)
def test_kernels_know_the_chip(chip: tuple[int, int]) -> None:
    class OnGpu:
        is_cuda, device = True, torch.device("cuda", 0)

    assert common.family(OnGpu()) == CHIPS[chip]  # type: ignore[arg-type]
    assert matrix._has_copy_engine(0) == (chip >= (9, 0))


@pytest.mark.parametrize("chip", CHIPS, indirect=True)
def test_doctor_names_what_the_chip_lacks(
    chip: tuple[int, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hopper = chip == (9, 0)
    hidden, weight = (torch.zeros(n, 64, dtype=torch.bfloat16) for n in (256, 128))
    arguments = (hidden, weight, torch.zeros(256, dtype=torch.int64), None, None, False, 0)
    scoring = on_gpu(linear_logprob._forward)
    supported = [s.supports(scoring.family.key(*arguments)) for s in scoring.family.schedules]
    assert supported == [hopper]
    monkeypatch.setattr(linear, "unavailable", lambda: "no cuBLASLt in this test")
    monkeypatch.setattr(doctor, "_train_a_head", lambda: None if hopper else scoring.verdict(*arguments))
    monkeypatch.setattr(schedule, "report", lambda device: [])
    library = attention_fa3.Library(dense=lambda: None, paged=lambda: None, versions={})  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(attention_fa3, "find", lambda: library)
    monkeypatch.setattr(doctor, "_HEADS", ())
    monkeypatch.setattr(doctor, "_SHAPES", ())
    if not hopper:
        assert scoring.chosen(*arguments) == schedule.ANCHOR
    assert main(["doctor", "--device", "cuda"]) == 0
    text = capsys.readouterr().out
    assert f"compute capability {chip[0]}.{chip[1]}" in " ".join(text.split())
    assert "cuBLASLt's schedules are off: no cuBLASLt" in text
    assert ("attention variant fa3: not here: FlashAttention-3 is for GPUs of compute capability 9" in text) != hopper
    assert ("linear_logprob" in text and "anchor; not for this GPU or shape: hopper" in text) != hopper
