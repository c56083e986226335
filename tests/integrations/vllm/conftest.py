"""Fixtures of the vLLM tests: tiny models on disk, and `sides`, which runs scenarios of `vllm_side.py`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
Sides = Callable[..., list[dict[str, Any]]]


def environment(**changes: str) -> dict[str, str]:
    """Environment of a process that runs vLLM from this checkout."""
    paths = [str(ROOT), str(ROOT / "integrations"), str(ROOT / "consistency"), os.environ.get("PYTHONPATH", "")]
    settings = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_COMPILE_DISABLE": "1",  # of vLLM's sampler; the scenario that compiles the model sets it to 0
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "RLKERNEL_VLLM", "VLLM_"))}
    return {**inherited, **settings, **changes}


@pytest.fixture
def sides(tmp_path: Path) -> Sides:
    """Runs scenarios of `vllm_side.py` in one process; a job is (scenario, folder of a model, arguments)."""

    def run(*jobs: tuple[str, Path, dict[str, Any]], env: dict[str, str] | None = None) -> list[dict[str, Any]]:
        given = json.dumps([(name, str(folder), arguments) for name, folder, arguments in jobs])
        # Into files, because engines in other processes may hold a pipe open after this one has ended.
        outs = [tmp_path / f"{name}.log" for name in ("out", "errors")]
        with outs[0].open("w") as stdout, outs[1].open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "vllm_side.py"), given], env=environment(**(env or {})), stdout=stdout,
                stderr=stderr, cwd=tmp_path, start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(timeout=900)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        out, errors = (path.read_text(errors="replace") for path in outs)
        found = [line for line in out.splitlines() if line.startswith("RESULT ")]
        assert found, f"{[name for name, *_ in jobs]} failed\n{out[-3000:]}\n{errors[-6000:]}"
        result: list[dict[str, Any]] = json.loads(found[-1].removeprefix("RESULT "))
        return result

    return run
