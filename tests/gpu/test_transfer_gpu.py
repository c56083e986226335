"""After a trainer sends weights to a running vLLM server, over NCCL or CUDA IPC, the server's log-probabilities equal
the training forward's and the fingerprints of both sides agree.

Control: before each transfer the fingerprints differ.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("vllm", "trl")), reason="vLLM or TRL is not installed"
    ),
]


def _run(backend: str, folder: Path) -> dict[str, Any]:
    """Result of `transfer_on_gpus.py` with the trainer on the first visible GPU, the server (NCCL) on the last one."""
    count = torch.cuda.device_count()
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(str(i) for i in range(count))).split(",")
    command = [sys.executable, str(Path(__file__).with_name("transfer_on_gpus.py")), backend, str(folder)]
    devices = {"CUDA_VISIBLE_DEVICES": seen[0], "SERVER_DEVICE": seen[-1] if backend == "nccl" else seen[0]}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **devices})
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-3000:] + done.stderr[-6000:]
    return dict(json.loads(lines[-1].removeprefix("RESULT ")))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_weights_over_nccl(tmp_path: Path, record: Any, compat: Any) -> None:
    """TRL's trainer in server mode: weights go to the other GPU after every step."""
    found = _run("nccl", tmp_path)
    record(cases=len(found["exact"]), tokens=found["tokens"], mismatches=found["mismatches"])
    assert found["exact"] == [1.0] * 4 and found["mismatches"] == 0 < found["tokens"]
    assert max(found["grad_norm"]) > 0 and found["behind"] > 0 and found["after"] == {}
    compat.compared("TRL", "server on another GPU: weights sent over NCCL after every step", 0, found["tokens"])
    compat.exact("TRL", "server: fingerprints after a weight transfer over NCCL")


def test_weights_over_ipc(tmp_path: Path, record: Any, compat: Any) -> None:
    """Changed weights through vLLM's IPC engine, in one message and in chunks."""
    found = _run("ipc", tmp_path)
    pairs = found["pairs"]
    tokens, mismatches = sum(n for _, n in pairs.values()), sum(d for d, _ in pairs.values())
    record(cases=len(pairs), tokens=tokens, mismatches=mismatches)
    assert mismatches == 0 < tokens, pairs
    assert all(found["behind"]) and all(after == {} for after in found["after"])
    compat.compared("vLLM", "weights sent over CUDA IPC", mismatches, tokens)
    compat.exact("vLLM", "fingerprints after a weight transfer over CUDA IPC")
