"""benchmarks/run.py runs scripts one after the other, or one per GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import run


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of benchmarks: one prints its arguments, one fails, one hangs; and figures.py."""
    says = "import os, sys\nprint(sys.argv[1:], 'on', os.environ.get('CUDA_VISIBLE_DEVICES'))\n"
    for name, text in {
        "bench_says": says, "bench_tells": says, "bench_vllm": says, "bench_vllm_exact": says,
        "bench_fails": "raise SystemExit(3)", "bench_hangs": "import time; time.sleep(60)",
        "figures": "import sys; print(sys.argv[1:])",
    }.items():  # fmt: skip
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(run, "LOGS", tmp_path / "logs")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def ran(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    status = run.main()
    return status, capfd.readouterr().out


def test_benchmarks_run_sequentially(
    scripts: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    status, out = ran(monkeypatch, capfd, "says --rounds 3", "tells")
    assert status == 0 and out.index("['--rounds', '3'] on None") < out.index("[] on None") < out.index("['--here']")
    status, out = ran(monkeypatch, capfd, "fails", "says")
    assert status == 1 and "[] on None" in out and "failed: fails (exit status 3)" in out
    with pytest.raises(SystemExit):
        ran(monkeypatch, capfd, "nothing")
    assert (
        "unknown benchmark nothing; choose from fails, hangs, says, tells, vllm, vllm_exact" in capfd.readouterr().err
    )


def test_benchmarks_run_one_per_gpu(
    scripts: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two GPUs: while one benchmark hangs, the other GPU takes all the rest."""
    status, out = ran(monkeypatch, capfd, "--gpus", "2,5", "--limit", "4", "hangs", "says", "tells a", "fails")
    assert status == 1 and "failed: hangs (stopped after 4 s), fails (exit status 3)" in out
    logs = {path.name: path.read_text() for path in (scripts / "logs").iterdir()}
    other = logs["1-says.log"].split()[-1]
    assert logs["1-says.log"] == f"[] on {other}\n" and logs["2-tells.log"] == f"['a'] on {other}\n"
    assert f"hangs, GPU {'25'.replace(other, '')}, " in out and str(scripts / "logs" / "3-fails.log") in out


def test_gpus_are_indices_into_the_allocation(
    scripts: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5")
    status, out = ran(monkeypatch, capfd, "--gpus", "1", "says")
    assert status == 0 and (scripts / "logs" / "0-says.log").read_text() == "[] on GPU-5\n" and "says, GPU GPU-5" in out
    for gpus, message in (
        ("0,", "--gpus: expected comma-separated numbers such as 0,1, got '0,'"),
        ("x", "--gpus: expected comma-separated numbers such as 0,1, got 'x'"),
        ("0,2", "--gpus: 0,2, but CUDA_VISIBLE_DEVICES='4,GPU-5' has 2, counted from 0"),
    ):
        with pytest.raises(SystemExit):
            ran(monkeypatch, capfd, "--gpus", gpus, "says")
        assert message in capfd.readouterr().err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit):
        ran(monkeypatch, capfd, "--gpus", "0", "says")
    assert "CUDA_VISIBLE_DEVICES='' has 0" in capfd.readouterr().err


def test_two_runs_with_the_same_result_file_are_refused(
    scripts: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    small, large = "vllm --preset qwen3-0.6b", "vllm --preset qwen3-8b"
    for one, other, file in (
        ("says", "says --rounds 9", "bench_says"),
        (small, small, "bench_vllm_qwen3-0.6b"),
        (small, f"{small} --rounds 9", "bench_vllm_qwen3-0.6b"),
        ("vllm", "vllm --arms rlkernel 'vllm default'", "bench_vllm"),
        ("vllm_exact", "vllm_exact --arms 'vllm default' rlkernel", "bench_vllm_exact"),
    ):
        with pytest.raises(SystemExit):
            ran(monkeypatch, capfd, one, "tells", other)
        assert f"{one} and {other} would write the same result file, {file}.json" in capfd.readouterr().err
    assert ran(monkeypatch, capfd, small, large, f"{small} --workload long", "vllm_exact")[0] == 0
    with pytest.raises(SystemExit):
        ran(monkeypatch, capfd, "says", "vllm --preset nothing")
    out, err = capfd.readouterr()
    assert "bench_vllm.py: error: argument --preset: invalid choice: 'nothing'" in err and "bench_says" not in out


CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(os.environ["CHILD"], "w").write(f"{child.pid}\\n")
time.sleep(60)
"""


def ended(path: Path) -> bool:
    """Whether the process whose pid is in the file ends within ten seconds; a zombie counts as ended."""
    state = Path("/proc") / path.read_text().strip() / "stat"
    for _ in range(100):
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


def test_a_benchmark_that_is_stopped_leaves_no_process(
    scripts: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (scripts / "bench_hangs.py").write_text(CHILD)
    monkeypatch.setenv("CHILD", str(scripts / "child"))
    assert ran(monkeypatch, capfd, "--limit", "3", "hangs")[0] == 1
    assert ended(scripts / "child")


@pytest.mark.parametrize("limit", ((), ("--limit", "60")))
@pytest.mark.parametrize("status", (0, 3))
def test_a_benchmark_that_exits_leaves_no_process(
    status: int,
    limit: tuple[str, ...],
    scripts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (scripts / "bench_fails.py").write_text(CHILD.replace("\ntime.sleep(60)\n", f"\nraise SystemExit({status})\n"))
    monkeypatch.setenv("CHILD", str(scripts / "child"))
    found, out = ran(monkeypatch, capfd, *limit, "fails")
    assert found == bool(status) and ("failed: fails (exit status 3)" in out) == bool(status)
    assert ended(scripts / "child")


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
def test_an_interrupted_run_leaves_no_process_and_starts_none(scripts: Path, number: int) -> None:
    (scripts / "bench_hangs.py").write_text(CHILD)
    for name in ("run.py", "processes.py"):
        (scripts / name).write_text(Path(run.__file__).with_name(name).read_text())
    command = [sys.executable, str(scripts / "run.py"), "hangs", "says"]
    process = subprocess.Popen(
        command, env={**os.environ, "CHILD": str(scripts / "child")}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    for _ in range(200):
        if (scripts / "child").exists() and (scripts / "child").read_text().endswith("\n"):
            break
        time.sleep(0.1)
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert process.returncode != 0 and b"on None" not in out and b"--here" not in out
    assert ended(scripts / "child")
