"""The main job on CUDA: the embedded default, shortened, with every sampled token compared at every step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlkernel.kernels.verdicts import ANCHOR

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

ROOT = Path(__file__).parents[2]


RUN = """
import json, sys
from rlkernel.cli.main import main
status = main(sys.argv[1:])
from rlkernel.kernels import schedule
of = {op.family.op: [verdict.fastest() for verdict in op.verdicts()] for op in schedule.scheduled_ops()}
print("schedules", json.dumps(of))
sys.exit(status)
"""


def test_embedded_default_is_exact_and_learns_on_the_fast_path(tmp_path: Path, record: Callable[..., None]) -> None:
    words = ["train", "grpo", "--device", "cuda", "--output", tmp_path / "run", "train.steps=40"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", RUN, *map(str, words)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in steps if "exact_frac" in row]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "bfloat16" in summary["model"]
    tokens, mismatches = (sum(row[name] for row in steps) for name in ("tokens", "mismatch_tokens"))
    record(cases=len(steps), tokens=tokens, mismatches=mismatches, model="embedded default", dtype="bfloat16")
    assert all(row["exact_frac"] == 1.0 for row in steps)
    assert mismatches == 0
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.2, summary
    said = next(line for line in done.stdout.splitlines() if line.startswith("schedules "))
    ran = json.loads(said.removeprefix("schedules "))
    assert any(name != ANCHOR for name in ran["linear"]), f"the anchor computes every linear: {ran}"
