"""kill -9 of a rank under torchrun: all ranks end, at once, the reason is named, and the resumed run has equal bits."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path

import pytest
from training.test_ranks import digest
from training.tiny import settings_of
from training.torchrun import torchrun

from rlkernel.training.run_folder import read_jsonl
from rlkernel.training.session import run_training

SECONDS = 480


def read(place: Path) -> bytes:
    """A file of a process, empty once it has ended."""
    try:
        return place.read_bytes()
    except OSError:
        return b""


def check_kill(folder: Path, phase: str, rank: int, *words: str, told: bool = False) -> None:
    """Two ranks, one of which is killed in a phase of the second step; resumed in this process.

    Args:
        told: whether the surviving rank 0 must have written the reason down; one that waits inside NCCL only prints it.
    """
    whole, killed = (
        settings_of(folder / name, "eval.every=0", "run.probe_rollouts=0", "train.leaves=8", "train.steps=3",
                    "train.save_every=1", "rollout.prompts=4", *words)
        for name in ("whole", "killed")
    )  # fmt: skip
    log = folder / "out"
    with open(log, "w") as out:
        agent = torchrun(2, killed, folder, out, ("training.killed_rank", phase, str(rank)))
        try:
            status = agent.wait(SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {SECONDS} s:\n{log.read_text()}")
        finally:
            agent.terminate()  # which ends its ranks too
            agent.wait(SECONDS)
        ended = time.time()
    text, run = log.read_text(), folder / "killed" / "run"
    assert status != 0, text
    found = re.search(rf"rank {rank} \(process (\d+)\) has died without a message, as after kill -9", text)
    assert found, text
    at = re.search(r"killed at (\S+)", text)
    assert at and ended - float(at[1]) < 30, text  # torchrun needs a few seconds for its own exit
    if told:
        assert found[0] in json.loads((run / "run.json").read_text())["error"]
    assert not [place for place in Path("/proc").glob("[0-9]*/cmdline") if str(folder).encode() in read(place)], text
    first = read_jsonl(run / "metrics.jsonl")[0]
    assert digest(run_training(killed, resume=run)) == digest(run_training(whole))
    assert read_jsonl(run / "metrics.jsonl")[0] == first  # with its seconds, so the first step was not repeated


@pytest.mark.parametrize(("phase", "rank"), [("rollout", 1), ("saving", 0)])
def test_every_rank_ends(tmp_path: Path, phase: str, rank: int) -> None:
    check_kill(tmp_path, phase, rank, told=rank == 1)
