"""CPU time of every `rlkernel-drift demo`: a fresh process each, imports included; wall time depends on what else runs.

`python benchmarks/drift_demos.py` writes benchmarks/results/cpu/drift_demos.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "consistency")]

from results_io import write_result

from rlkernel_drift.cli.planted import DEMOS


def run(name: str) -> dict[str, str | float]:
    """One demo: CPU and wall seconds, and the cause that it names."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "verdict.json"
        command = [sys.executable, "-m", "rlkernel_drift.cli.main", "demo", name, "--json", str(out)]
        done = subprocess.run(
            command, capture_output=True, cwd=folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[:3])}
        )
        after, end = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        named = json.loads(out.read_text())["diagnosis"]["cause"]
    return {
        "demo": name,
        "named": named,
        "exit_status": done.returncode,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "wall_seconds": end - start,
    }


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = []
    for name in DEMOS:
        rows.append(run(name))
        print(" ".join(f"{v:.1f}" if isinstance(v, float) else str(v) for v in rows[-1].values()), flush=True)
    write_result("drift_demos", rows, folder="cpu", wall_means="beside other processes on the same two cores")
    return 0


if __name__ == "__main__":
    sys.exit(main())
