"""benchmarks/run.py: one after the other, or one a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import run


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of benchmarks: one says what it got, one fails, one does not end; and the figures."""
    says = "import os, sys\nprint(sys.argv[1:], 'on', os.environ.get('CUDA_VISIBLE_DEVICES'))\n"
    for name, text in {
        "bench_says": says, "bench_fails": "raise SystemExit(3)", "bench_hangs": "import time; time.sleep(60)",
        "figures": "print('figures')",
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


def test_benchmarks_run_one_after_the_other(
    scripts: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    status, out = ran(monkeypatch, capfd, "says --rounds 3", "says")
    assert status == 0 and out.index("['--rounds', '3'] on None") < out.index("[] on None") < out.index("figures")
    status, out = ran(monkeypatch, capfd, "fails", "says")
    assert status == 1 and "[] on None" in out and "failed: fails (exit status 3)" in out
    with pytest.raises(SystemExit):
        ran(monkeypatch, capfd, "nothing")
    assert "no benchmark nothing; there are fails, hangs, says" in capfd.readouterr().err


def test_benchmarks_run_one_a_gpu(
    scripts: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two GPUs: while one benchmark hangs, the other GPU takes all the rest."""
    status, out = ran(monkeypatch, capfd, "--gpus", "2,5", "--limit", "4", "hangs", "says", "says a", "fails")
    assert status == 1 and "failed: hangs (stopped after 4 s), fails (exit status 3)" in out
    logs = {path.name: path.read_text() for path in (scripts / "logs").iterdir()}
    other = logs["1-says.log"].split()[-1]
    assert logs["1-says.log"] == f"[] on {other}\n" and logs["2-says.log"] == f"['a'] on {other}\n"
    assert f"hangs, GPU {'25'.replace(other, '')}, " in out and str(scripts / "logs" / "3-fails.log") in out
