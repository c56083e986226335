"""`benchmarks/sanitize.py`: which reports pass, which races count separately, and that calls reach every schedule.

Controls: an error, a missing verdict, a tool that misses its planted error and a kernel that never ran must all fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks")]

import sanitize


def test_a_report_passes_only_with_a_verdict() -> None:
    good = {"what": "linear", "errors": 0, "exit_status": 0}
    assert sanitize.passed(good)
    for bad in ({"errors": 3}, {"errors": None}, {"exit_status": 1}, {"exit_status": None}):
        assert not sanitize.passed({**good, **bad})
    planted = {"what": "planted error", "errors": 2, "exit_status": 1}
    assert sanitize.passed(planted)
    assert not sanitize.passed({**planted, "errors": 0}) and not sanitize.passed({**planted, "errors": None})
    stores = {"what": sanitize.COPY, "errors": 64, "exit_status": 0}
    assert sanitize.passed(stores) and sanitize.passed({**stores, "errors": 0})
    assert not sanitize.passed({**stores, "errors": None})


@pytest.mark.parametrize(
    "output,errors",
    (
        ("========= ERROR SUMMARY: 0 errors", 0),
        ("========= ERROR SUMMARY: 66 errors", 66),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)", 3),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0),
        ("========= Error: Unable to launch", None),
    ),
)
def test_sanitizer_summaries(output: str, errors: int | None) -> None:
    found = sanitize.SUMMARY.findall(output)
    assert (int(found[-1]) if found else None) == errors


def test_races_inside_cublas_are_counted_separately() -> None:
    report = (
        "========= Error: Race reported between Write access at {}+0x10\n"
        "=========     and Read access at {}+0x20 [8 hazards]\n"
    )
    ours, theirs = "void gemm_kernel(int)", "nvjet_sm90_tst_64x8_64x16_4x2_h_bz_NNT"
    text = "".join(report.format(a, b) for a, b in ((theirs, theirs), (ours, ours), (theirs, ours), (theirs, theirs)))
    assert sanitize.races_in_cublas(text) == 2
    assert sanitize.races_in_cublas("========= RACECHECK SUMMARY: 0 hazards displayed") == 0
    assert sanitize.races_in_cublas("========= Error: Race reported between something else") == 0


def test_the_anchor_runs_first_then_every_schedule_on_its_own_memory() -> None:
    code = """
import torch, sanitize
from collections import namedtuple
from dataclasses import replace
from rlkernel.kernels.certification import OpSpec, Schedule
from rlkernel.kernels.scheduled_op import ScheduledOp
names = sanitize.every_schedule()
seen = []
def anchor(grad, x, fresh):
    grad.copy_(x)
def run(grad, x, fresh):
    seen.append((grad.clone(), torch.empty(3)))
Shape = namedtuple("Shape", "device")
spec = OpSpec("fake", anchor, lambda *_: Shape(-1), lambda s: [1], lambda *_: (),
    [Schedule("cublaslt.0", lambda s: run), Schedule("other", lambda s: run)], mutates=(0,))
op, grad, x = ScheduledOp(spec), torch.zeros(3), torch.ones(3)
op(grad, x, False)
op(grad, x, True)
assert names == {"fake:cublaslt.0", "fake:other"} and torch.equal(grad, x)
assert torch.equal(seen[0][0], x) and torch.equal(seen[1][0], x), "the mutated argument holds the anchor's result"
assert seen[0][1].isnan().all() and seen[2][1].isnan().all(), "fresh memory is filled for schedules that store by TMA"
def fails(grad, x, fresh):
    raise ValueError("status 13")
try:
    ScheduledOp(replace(spec, schedules=[Schedule("other", lambda s: fails)], mutates=()))(grad, x, False)
except ValueError as error:
    assert "status 13" in str(error)
else:
    raise AssertionError("a schedule's error was hidden")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "benchmarks", capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_sanitizer_calls_run() -> None:
    for name, call in sanitize.calls("cpu", torch.float32, large=False).items():
        call()
        assert name


def run_with(
    start: Callable[..., tuple[str, int | None, float]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    capability: tuple[int, int] = (9, 0),
) -> tuple[int, dict[str, Any]]:
    """Exit status and result file of the runner, with `start` in place of its processes."""
    monkeypatch.setattr(sanitize, "start", start)
    monkeypatch.setattr(sanitize, "sanitizer", lambda: "compute-sanitizer")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(sys, "argv", ["sanitize.py", *arguments])
    monkeypatch.setenv("RLKERNEL_RESULTS", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    status = sanitize.main()
    return status, json.loads((tmp_path / "some-gpu" / "sanitize.json").read_text())


def sanitizer_run(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    seen: dict[str, str],
    kernels: list[str],
    arguments: list[str],
    unlaunched: tuple[str, ...] = (),
    capability: tuple[int, int] = (9, 0),
) -> tuple[int, dict[str, Any]]:
    """Exit status and result file of the runner; `seen` gives the number of errors per tool or call."""
    import aot

    def start(given: list[str], limit: float, tool: tuple[str, ...] = ()) -> tuple[str, int | None, float]:
        if not tool:
            ran = {
                "kernels": kernels or [v.kernel.fn.__name__ for v in aot.variants()],
                "schedules": sorted(sanitize.offered((9, 0)) - set(unlaunched)),
            }
            return sanitize.RAN + json.dumps(ran), 0, 1.0
        found = seen.get(given[-1], "3" if given[0] == "--plant" else "0")
        return f"========= ERROR SUMMARY: {found} errors", 0, 1.0

    return run_with(start, monkeypatch, tmp_path, arguments, capability)


def test_sanitizer_runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    run = lambda seen, kernels=(), arguments=(), *more: sanitizer_run(
        monkeypatch, tmp_path, seen, list(kernels), list(arguments), *more
    )
    status, data = run({})
    assert status == 0 and data["passed"] and set(data["schedules"]) == sanitize.offered((9, 0))
    unlaunched = ("linear_dgrad:triton.head.128x128x64", "linear_logprob_dhidden:cublaslt.3")
    status, data = run({}, (), (), unlaunched)
    assert status == 1 and not data["passed"] and data["not_launched"] == list(unlaunched), "offered but never launched"
    groups = ("hopper",)
    of_hopper = [name for name in sanitize.offered((9, 0)) if name.split(":")[1].split(".")[0] in groups]
    assert len(of_hopper) == 6 and run({}, (), (), tuple(of_hopper))[0] == 1
    assert run({}, (), (), tuple(of_hopper), (8, 0))[0] == 0, "not offered on that GPU"
    spelt = "linear:cublaslt.spelt out"
    assert spelt in sanitize.offered((9, 0)) and spelt not in sanitize.offered((8, 0))
    assert run({}, (), (), (spelt,))[0] == 1
    assert sanitize.SPELT.sub(sanitize.ONE, "linear:cublaslt.64x80.1x2") == spelt
    assert sanitize.SPELT.sub(sanitize.ONE, "linear:cublaslt.3") == "linear:cublaslt.3"
    calls = sanitize.calls("cpu", torch.float32, large=False)
    assert {(row["tool"], row["what"]) for row in data["rows"]} == {
        (tool, what) for tool in sanitize.TOOLS for what in (sanitize.PLANT, *calls)
    } | {("initcheck", sanitize.COPY)}
    assert run({"linear": "1"})[0] == 1, "an error in one call"
    assert run({"racecheck": "0"})[0] == 1, "a tool that misses its planted error"
    status, data = run({}, kernels=["rope_kernel"])
    assert status == 1 and "gemm_kernel" in data["not_launched"], "kernels that no call launches"
    assert run({}, kernels=["rope_kernel"], arguments=["--only", "pointwise"])[0] == 0


def test_a_call_without_a_verdict_is_tried_once_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A call with errors is not repeated, and there is no third try."""
    pytest.importorskip("triton")
    tries: list[tuple[str, str]] = []
    seen = {"rope": "2"}

    def start(given: list[str], limit: float, tool: tuple[str, ...] = ()) -> tuple[str, int | None, float]:
        if not tool:
            return sanitize.RAN + json.dumps({"kernels": [], "schedules": []}), 0, 1.0
        tries.append((tool[2], given[-1]))
        again = tries.count(tries[-1]) > 1
        if (tries[-1] == ("memcheck", "linear") and not again) or tries[-1] == ("racecheck", "linear"):
            return "========= Error: No attachable process found", None if again else 1, 1.0
        return f"========= ERROR SUMMARY: {seen.get(given[-1], '3' if given[0] == '--plant' else '0')} errors", 0, 1.0

    status, data = run_with(start, monkeypatch, tmp_path, ["--only", "linear", "rope"])
    assert status == 1 and not data["passed"]
    found = {(row["tool"], row["what"]): (row["errors"], row.get("tries")) for row in data["rows"]}
    assert found["memcheck", "linear"] == (0, 2) and found["racecheck", "linear"] == (None, 2)
    assert found["initcheck", "linear"] == (0, None) and found["memcheck", "rope"] == (2, None)
    assert tries.count(("racecheck", "linear")) == 2 and tries.count(("memcheck", "rope")) == 1


def test_a_tool_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    alive = tmp_path / "pid"
    tool = ("sh", "-c", f"sleep 20 & echo $! > {alive}; echo started; wait", "tool")
    output, status, seconds = sanitize.start(["x"], 2.0, tool)
    assert (output, status) == ("started\n", None) and seconds < 15
    state = Path(f"/proc/{alive.read_text().strip()}/stat")
    for _ in range(100):  # a killed process remains a zombie until its parent waits for it
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] in "ZX":
            return
        time.sleep(0.05)
    raise AssertionError("still alive")


def test_the_sanitizers_calls_reach_every_schedule_of_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops run on the CPU; `supports` of each schedule gets their shapes as on a Hopper GPU."""
    pytest.importorskip("triton")
    from torch.utils._python_dispatch import TorchDispatchMode

    from rlkernel.kernels.cuda import linear

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    found: set[str] = set()

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            if "rlkernel" in str(func) and name in ("linear", "linear_dgrad", "linear_wgrad", "linear_wgrad_"):
                op = linear.wgrad_chunk if "wgrad" in name else getattr(linear, name)
                if name == "linear_wgrad":
                    dy, x = args
                    args_of_op = (torch.empty(dy.shape[1], x.shape[1], dtype=dy.dtype), dy, x, True)
                else:
                    args_of_op = (*args, False) if name == "linear_wgrad_" else args
                shape = op.spec.shape(*args_of_op)._replace(device=0)
                found.update(f"{op.spec.name}:{s.name}" for s in op.spec.schedules if s.supports(shape))
            return func(*args, **(kwargs or {}))

    for large in (False, True):
        made = sanitize.calls("cpu", torch.bfloat16, large=large)
        with Shapes():
            for name in made:
                if name.startswith("linear") and not name.startswith("linear_logprob"):
                    made[name]()
    linears = ("linear:", "linear_dgrad:", "linear_wgrad:")
    assert {name for name in sanitize.offered((9, 0)) if name.startswith(linears)} == {
        sanitize.SPELT.sub(sanitize.ONE, name) for name in found
    }
