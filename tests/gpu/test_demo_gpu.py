"""The default GRPO and PPO runs on CUDA: all log-probabilities of rollout and trainer are equal, the reward rises.

Control: on Hopper the run must have used certified schedules, because a comparison of anchors alone shows less.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu.gpu_checks import HOPPER

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

ROOT = Path(__file__).parents[2]


RUN = """
import json, sys
from rlkernel.cli.main import main
status = main(sys.argv[1:])
from rlkernel.kernels import scheduled_op
from rlkernel.kernels.verdicts import ANCHOR
for op in scheduled_op.scheduled_ops():
    certified = sum(trial.certified for verdict in op.verdicts() for trial in verdict.trials)
    ran = [verdict.fastest() for verdict in op.verdicts()]
    print("certified", json.dumps([op.spec.name, certified, op.failures(), ran.count(ANCHOR), len(ran)]))
sys.exit(status)
"""


@pytest.mark.parametrize(("algorithm", "count"), (("grpo", 40), ("ppo", 15)))
def test_embedded_default_is_exact_and_learns_with_fast_kernels(
    algorithm: str, count: int, tmp_path: Path, record: Callable[..., None]
) -> None:
    words = ["train", algorithm, "--device", "cuda", "--output", tmp_path / "run", f"train.steps={count}"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", RUN, *map(str, words)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in steps if "exact_frac" in row]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "bfloat16" in summary["model"]
    tokens, mismatches = (sum(row[name] for row in steps) for name in ("tokens", "mismatch_tokens"))
    lines = [line.removeprefix("certified ") for line in done.stdout.splitlines() if line.startswith("certified ")]
    found = {op: rest for op, *rest in map(json.loads, lines)}
    classes = sum(count for *_, count in found.values())
    fast = classes - sum(anchors for *_, anchors, _ in found.values())
    record(
        cases=len(steps), tokens=tokens, mismatches=mismatches, model=f"embedded {algorithm}", dtype="bfloat16",
        shape_classes=classes, on_schedules=fast,
    )  # fmt: skip
    assert all(row["exact_frac"] == 1.0 for row in steps)
    assert mismatches == 0
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.2, summary
    # At these sizes timings differ by microseconds, so no single op must choose a schedule, but some op must.
    assert not HOPPER or (found["linear"][0] > 0 and not found["linear"][1] and fast > 0), found
