"""A model directory for the whole session, and a way to run the command line as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e.tiny_model import make_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rlkernel(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `rlkernel WORDS` in the test's folder, on one thread, offline."""

    def run(*words: Any, status: int = 0) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "rlkernel.cli.main", *map(str, words)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == status, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done

    return run
