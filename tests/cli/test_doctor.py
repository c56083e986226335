"""`rlkernel doctor` on machines that lack a fast path: the anchor runs, and doctor says so."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import rlkernel
from rlkernel.cli.main import main
from rlkernel.kernels import build, scheduled_op, select
from rlkernel.kernels.cuda import cublaslt, fa3_library, linear_logprob
from rlkernel.kernels.triton import common, launch, matrix
from rlkernel.ops import report

CHIPS = {(8, 0): "ampere", (9, 0): "hopper", (10, 0): "blackwell"}


@pytest.fixture
def chip(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """Makes torch report a GPU of a compute capability; nothing can be launched on it."""
    name = f"GPU of {request.param}"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: request.param)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    monkeypatch.setattr(scheduled_op, "_ops", dict(scheduled_op._ops))
    caches = (common._capability, matrix._has_tma)
    for cache in caches:
        cache.cache_clear()
    yield request.param
    for cache in caches:
        cache.cache_clear()


def on_gpu(op: scheduled_op.ScheduledOp) -> scheduled_op.ScheduledOp:
    """The op, which takes CPU tensors for tensors of GPU 0."""
    shape = op.spec.shape
    on_gpu = dataclasses.replace(op.spec, shape=lambda *args: shape(*args)._replace(device=0))
    return scheduled_op.ScheduledOp(on_gpu)


def test_on_a_cpu_doctor_lists_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["capability"] is None and found["attention_fa3"]["unavailable"]
    assert {row["implementation"] for row in found["ops"]} <= {"cpu", "reference"}
    if not torch.cuda.is_available():
        assert found["schedules"]["unavailable"] == "no CUDA GPU"
    assert main(["doctor", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "attention variant fa3: not available" in text
    assert f"no certified schedules: {found['schedules']['unavailable']}" in text


@pytest.mark.parametrize("version,known", (("3.6.0", True), ("3.9.0", False), ("3.6.1", False)))
def test_doctor_names_the_measured_triton(
    version: str, known: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.setattr(launch, "KNOWN", known)
    assert main(["doctor", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert ("Triton 3.9.0 is not the measured 3.6: direct launches" in text) == (version == "3.9.0")
    assert ("pip install 'triton==3.6.*'" in text) == (version == "3.9.0")
    assert ("calls cost the host more: Triton's launcher is known for CUDA only" in text) == (version == "3.6.1")


def test_the_triton_installed_is_the_measured_one() -> None:
    needed = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"][
        "dependencies"
    ]
    major, minor = map(int, launch.MEASURED.split("."))
    assert [d.split(";")[0] for d in needed if d.startswith("triton")] == [
        f"triton>={launch.MEASURED},<{major}.{minor + 1}"
    ]


@pytest.mark.parametrize("case", ("well", "no compiler", "broken compiler", "wrong CXX"))
def test_the_first_line_sums_up(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build.build_cpu()
    monkeypatch.setattr(select, "_chosen", {})
    monkeypatch.setattr(select, "_no_compiler", select._no_compiler.__wrapped__)
    monkeypatch.setattr(build, "_load_cpu_library", build._load_cpu_library.__wrapped__)
    if case != "well":
        monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("CXX", {"no compiler": "", "broken compiler": "false", "wrong CXX": "absent-g++"}[case])
    if case == "no compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
    capsys.readouterr()
    assert main(["doctor", "--device", "cpu"]) == int(case in ("broken compiler", "wrong CXX"))
    captured = capsys.readouterr()
    first, count = captured.out.splitlines()[0], len(select.declared())
    name = f"rlkernel {rlkernel.__version__}: "
    assert first.startswith(name)
    if case == "well":
        assert first == f"{name}all {count} ops run compiled C++ kernels on this CPU; nothing to do."
    if case == "no compiler":
        assert first.startswith(
            f"{name}{count} of {count} ops run the readable reference on this CPU, about a thousand"
        )
        assert first.endswith("install g++ or set CXX")
    if case == "broken compiler":
        assert "ops cannot run on this CPU: building rlkernel_cpu-" in first
        assert first.endswith(".log); name another compiler in CXX")
        assert set(captured.err.splitlines()) == {f"rlkernel: compiling rlkernel_cpu, once, into {tmp_path / 'cache'}"}
    else:
        assert captured.err == ""
    if case == "wrong CXX":
        assert first.endswith("CXX='absent-g++': 'absent-g++' is not a program here; correct or unset CXX")


def test_a_closed_pipe_is_not_an_error() -> None:
    build.build_cpu()
    command = [sys.executable, "-m", "rlkernel.cli.main", "doctor", "--device", "cpu", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 141


@pytest.mark.parametrize("chip", CHIPS, indirect=True)
def test_gpu_family_and_tma_follow_the_compute_capability(chip: tuple[int, int]) -> None:
    class OnGpu:
        is_cuda, device = True, torch.device("cuda", 0)

    assert common.family(OnGpu()) == CHIPS[chip]  # type: ignore[arg-type]
    assert matrix._has_tma(0) == (chip >= (9, 0))


@pytest.mark.parametrize("chip", CHIPS, indirect=True)
def test_doctor_names_what_the_gpu_lacks(
    chip: tuple[int, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hopper = chip == (9, 0)
    hidden, weight = (torch.zeros(n, 64, dtype=torch.bfloat16) for n in (256, 128))
    arguments = (hidden, weight, torch.zeros(256, dtype=torch.int64), None, None, False, 0)
    scoring = on_gpu(linear_logprob._forward)
    supported = [s.supports(scoring.spec.shape(*arguments)) for s in scoring.spec.schedules]
    assert supported == [hopper]
    monkeypatch.setattr(cublaslt, "unavailable", lambda: "no cuBLASLt in this test")
    monkeypatch.setattr(report, "_train_a_head", lambda: None if hopper else scoring.verdict(*arguments))
    monkeypatch.setattr(scheduled_op, "report", lambda device: [])
    library = fa3_library.Library(dense=lambda: None, paged=lambda: None, versions={})  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(fa3_library, "find", lambda: library)
    monkeypatch.setattr(report, "_HEADS", ())
    monkeypatch.setattr(report, "_SHAPES", ())
    monkeypatch.setattr(report, "_PREFILLS", ())
    if not hopper:
        assert scoring.chosen(*arguments) == scheduled_op.ANCHOR
    assert main(["doctor", "--device", "cuda"]) == 0
    text = capsys.readouterr().out
    assert f"compute capability {chip[0]}.{chip[1]}" in " ".join(text.split())
    assert "cuBLASLt's schedules are off: no cuBLASLt" in text
    assert (
        "attention variant fa3: not available: FlashAttention-3 is for GPUs of compute capability 9" in text
    ) != hopper
    assert ("linear_logprob" in text and "anchor; not for this GPU or shape: hopper" in text) != hopper
