"""Runs `tests/gpu` on this machine's GPU and writes `benchmarks/results/<gpu>/test_gpu.json` with what was compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]


def main() -> int:
    """Exit status of pytest; 1 where torch sees no GPU (a run that compares nothing is never a pass)."""
    import torch
    from results_io import write_result

    if not torch.cuda.is_available():
        print("test-gpu: torch sees no CUDA GPU; run it on a machine that has one")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        rows_file, report = Path(folder) / "rows.json", Path(folder) / "report.xml"
        status = subprocess.run(
            [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", f"--junitxml={report}", *sys.argv[1:]],
            cwd=ROOT,
            env={
                **os.environ,
                "RLKERNEL_RECORD": str(rows_file),
                "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            },
        ).returncode
        rows = json.loads(rows_file.read_text()) if rows_file.exists() else []
        import xml.etree.ElementTree as ElementTree

        suite = ElementTree.parse(report).getroot().find("testsuite") if report.exists() else None
        counts = (
            {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
            if suite is not None
            else {}
        )
    path = write_result("test_gpu", rows, pytest=counts, exit_status=status)
    print(f"wrote {path}")
    return status


if __name__ == "__main__":
    sys.exit(main())
