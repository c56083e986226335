"""Starts `torchrun -m rlkernel train` in tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import yaml

from rlkernel.training.config import Settings


def torchrun(
    ranks: int, settings: Settings, folder: Path, output: IO[str], module: tuple[str, ...] = ("rlkernel",)
) -> subprocess.Popen[bytes]:
    """The agent of a run with these settings; both streams of all ranks go to `output`.

    Args:
        module: the module that runs the command, and its own arguments.
    """
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", *module, "train", settings.algorithm, "--config", str(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=folder)
