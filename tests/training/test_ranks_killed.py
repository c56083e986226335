"""kill -9 of a rank under torchrun: the other rank ends too, at once, and names it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from training.tiny import settings_of
from training.torchrun import torchrun

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
    with open(tmp_path / "out", "w") as out, torchrun(2, settings, tmp_path, out) as agent:
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
    if rank == 1:
        assert f"rank 1 (process {victim}) has died" in json.loads((tmp_path / "run" / "run.json").read_text())["error"]
    assert not is_alive(other) and time.monotonic() - killed < 20, text
