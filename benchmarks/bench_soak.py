"""2,000 GRPO steps on a CPU with a checkpoint every 20: memory and file handles must not grow.

The resident memory and the open files of the training process are read every 20 steps. Growth is the difference of
their medians over the last and the second fifth of the run (the first fifth fills caches). Writes `cpu/soak.json`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
EVERY = 20
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command line sets it
MOST_MIB = 16.0


def resident_mib() -> float:
    """Resident memory of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def open_files() -> int:
    """Number of this process's file handles."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def main() -> int:
    """Trains, prints a line every 100 steps and writes the record; returns 1 if memory or handles have grown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()

    from results_io import write_result

    from rlkernel.training.config import resolve
    from rlkernel.training.display import Display
    from rlkernel.training.session import run_training

    found: list[dict[str, Any]] = []
    started = time.perf_counter()

    class Watch(Display):
        def step(self, step: int, values: dict[str, str]) -> None:
            if step % EVERY == 0:
                found.append({"step": step, "resident_mib": round(resident_mib(), 1), "open_files": open_files()})
            if step % 100 == 0:
                print(f"[{time.perf_counter() - started:5.0f} s] {found[-1]}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        options = {
            "run.output": f"{folder}/run", "run.device": "cpu", "run.probe_rollouts": 0, "train.steps": args.steps,
            "train.save_every": EVERY, "warmup.steps": 5, "warmup.examples": 256, "rollout.prompts": 4,
            "rollout.group_size": 4, "eval.every": 100, "eval.rows": 16,
        }  # fmt: skip
        run_training(resolve("grpo", options=options), Watch())
    fifth = len(found) // 5
    row: dict[str, Any] = {"op": "soak, GRPO on a CPU", "steps": args.steps, "checkpoints": args.steps // EVERY}
    for name in ("resident_mib", "open_files"):
        early = statistics.median(one[name] for one in found[fifth : 2 * fifth])
        late = statistics.median(one[name] for one in found[-fifth:])
        row |= {f"{name}_early": early, f"{name}_late": late}
    row["seconds"] = time.perf_counter() - started
    print(row)
    if args.steps >= 2000:
        print(f"wrote {write_result('soak', [row], folder='cpu')}")
    grown = row["resident_mib_late"] - row["resident_mib_early"] > MOST_MIB
    return int(grown or row["open_files_late"] > row["open_files_early"])


if __name__ == "__main__":
    sys.exit(main())
