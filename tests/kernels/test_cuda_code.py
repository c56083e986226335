"""Launchers match their sources, and a verdict depends on the machine code: another compiler's code voids it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.fake_schedules import Launches, arguments, counted, equal, spec

pytest.importorskip("triton")

from rlkernel.kernels import build, verdicts
from rlkernel.kernels.certification import Schedule
from rlkernel.kernels.cuda import (
    attention,
    attention_prefill_sm90,
    driver,
    linear_logprob,
    linear_logprob_sm90,
)
from rlkernel.kernels.cuda import linear_logprob_shapes as scored
from rlkernel.kernels.scheduled_op import ScheduledOp

BF16, FP32 = torch.bfloat16, torch.float32
GRAD = scored.GradShape(0, 64, BF16, FP32, True, True, False, 0)
MADE: dict[str, tuple[Any, ScheduledOp[Any], Any]] = {
    "attention": (
        attention_prefill_sm90, attention.prefill,
        attention.AttentionShape(0, BF16, 8, 8, 64, 2048, True, False, 8192),
    ),
    "forward": (
        linear_logprob_sm90, linear_logprob._forward,
        scored.LinearLogprobShape(0, True, 64, BF16, True, False, False, False, False, False, False),
    ),
    "dz": (
        linear_logprob_sm90, linear_logprob._dz,
        scored.LinearLogprobShape(0, True, 64, BF16, True, False, False, False, False, True, False),
    ),
    "dhidden": (linear_logprob_sm90, linear_logprob._dhidden, GRAD),
    "dweight": (linear_logprob_sm90, linear_logprob._dweight, GRAD),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_notes_of_schedules_name_their_machine_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, op, key = MADE[name]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(driver, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(driver, "Kernel", lambda cubin, *_: Launches([], code=build.digest(cubin)))
    monkeypatch.setattr(module, "load", driver.load.__wrapped__)
    if module is linear_logprob_sm90:
        monkeypatch.setattr(module, "kernel", module.kernel.__wrapped__)
    notes = []
    for patch in (b"13.0.48", b"13.0.88", b"13.0.88"):
        monkeypatch.setattr(driver, "compile_cuda", lambda *_, patch=patch: patch)
        own = [s for s in op.spec.schedules if s.supports(key) and s.name.split(".")[0] == "hopper"]
        assert own
        notes.append([s.bind(key).note for s in own])  # type: ignore[attr-defined]
        assert all(build.digest(patch) in note for note in notes[-1])
    assert notes[0] != notes[1] == notes[2]


LAUNCHERS = (attention_prefill_sm90, linear_logprob_sm90)


@pytest.mark.parametrize("module", LAUNCHERS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_arguments_are_those_of_the_source(module: Any) -> None:
    """A missing, additional or misplaced field would be read as another one."""
    text = (build.source_dir() / "cuda" / module.SOURCE).read_text()
    body = text.split("struct Arguments {", 1)[1].split("};", 1)[0]
    named = []
    for line in body.splitlines():
        statement = line.split("//")[0].split(";", 1)[0].replace("const", "").replace("*", "").split()
        named += [x.strip(",") for x in statement[1:]]
    assert named == [name for name, *_ in module.Arguments._fields_]


@pytest.mark.usefixtures("cache")
def test_other_machine_code_is_certified_anew() -> None:
    code, calls = ["first"], []

    def bind(key: Any) -> Callable[..., Any]:
        return driver.note_code(lambda *given: equal(*given), Launches([], code=code[0]))  # type: ignore[arg-type]

    made = replace(spec(anchor=counted(calls)), schedules=(Schedule("fake.built", bind),))
    offer = lambda: ScheduledOp(made)
    x, w = arguments()
    offer()(x, w)
    certified = len(calls)
    assert certified and offer().chosen(x, w) == "fake.built" and len(calls) == certified
    code[0] = "second"
    assert offer().chosen(x, w) == "fake.built" and len(calls) == 2 * certified


def test_the_assembler_of_tritons_kernels_is_part_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda", 0)
    from triton.backends.nvidia.compiler import get_ptxas_version

    get_ptxas_version.cache_clear()
    bundled = verdicts._ptxas(device)
    assert bundled and bundled.startswith("cuda_"), "the build"
    get_ptxas_version.cache_clear()
    other = tmp_path / "ptxas"
    other.write_text('#!/bin/sh\necho "Cuda compilation tools, release 13.0, V13.0.88"\n')
    other.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(other))
    assert verdicts._ptxas(device) == "V13.0.88"
    get_ptxas_version.cache_clear()
    other.unlink()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: 1 // 0)
    assert verdicts._ptxas(device) is None
    assert "ptxas" not in verdicts.machine(torch.device("cpu"))
