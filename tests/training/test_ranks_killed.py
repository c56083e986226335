"""kill -9 of a rank under torchrun: the other rank ends too, at once, and names it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from training.tiny import settings_of

from rlkernel.parallel.launch import is_alive
from rlkernel.training.run_folder import read_jsonl

SECONDS = 60


def worker(agent: int, rank: int) -> int:
    """Process id of a rank that the agent has started."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (place / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == agent and f"RANK={rank}".encode() in variables:
            return int(place.name)
    raise LookupError(f"torchrun {agent} has no rank {rank}")


@pytest.mark.parametrize("rank", (0, 1))
def test_every_rank_ends(tmp_path: Path, rank: int) -> None:
    settings = settings_of(tmp_path, "train.steps=100000", "eval.every=0", "run.probe_rollouts=0", "train.leaves=8")
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "rlkernel", "train", "grpo", "--config", str(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with open(tmp_path / "out", "w") as out, subprocess.Popen(
        command, stdout=out, stderr=out, env=environment, cwd=tmp_path
    ) as agent:  # fmt: skip
        try:
            until = time.monotonic() + SECONDS
            while not read_jsonl(tmp_path / "run" / "metrics.jsonl") and time.monotonic() < until:
                time.sleep(0.1)
            victim, other = worker(agent.pid, rank), worker(agent.pid, 1 - rank)
            os.kill(victim, signal.SIGKILL)
            killed = time.monotonic()
            assert agent.wait(SECONDS) != 0
        finally:
            agent.kill()
    text = (tmp_path / "out").read_text()
    assert f"rank {rank} (process {victim}) has died without a message, as after kill -9" in text, text
    assert not is_alive(other) and time.monotonic() - killed < 20, text
