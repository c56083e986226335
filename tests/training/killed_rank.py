"""The command `rlkernel` under torchrun, in which one rank gets SIGKILL in the middle of a phase of its second step.

`python -m training.killed_rank PHASE RANK ARGUMENTS...`; ARGUMENTS are those of the command.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch

from rlkernel.cli.main import main
from rlkernel.engine.runner import Runner
from rlkernel.training import checkpoint
from rlkernel.training.grpo import GRPOTrainer

STEP = 2


def place(phase: str, rank: int) -> tuple[Any, str, int]:
    """(owner, name, number): the rank is killed at this call of `owner.name` in step `STEP`."""
    if phase == "saving":  # rank 0 writes; the others send their part and go on
        return (checkpoint, "_flush", 2) if rank == 0 else (checkpoint.Saver, "save", 1)
    return {"rollout": (Runner, "launch", 3), "backward": (torch.Tensor, "backward", 2)}[phase]


def kill_at(owner: Any, name: str, number: int) -> None:
    calls = {"step": 0, name: 0}
    step, real = GRPOTrainer.step, getattr(owner, name)

    def counted_step(*args: Any) -> Any:
        calls["step"] += 1
        return step(*args)

    def fatal(*args: Any, **kwargs: Any) -> Any:
        calls[name] += calls["step"] == STEP
        if calls[name] == number:
            print(f"killed at {time.time()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    GRPOTrainer.step = counted_step  # type: ignore[method-assign]
    setattr(owner, name, fatal)


if __name__ == "__main__":
    phase, rank, *arguments = sys.argv[1:]
    if os.environ["RANK"] == rank:
        kill_at(*place(phase, int(rank)))
    sys.exit(main(arguments))
