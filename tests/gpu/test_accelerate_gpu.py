"""`accelerate launch` on 2 and 4 GPUs over NCCL: after ten updates the weights of one GPU, under DDP and FSDP2.

transformers' Trainer, and TRL's GRPO with rlkernel's engine and with vLLM in each process. Control: the stock Trainer.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.tiny_model import make_model

GPUS = torch.cuda.device_count()
MISSING = [name for name in ("trl", "accelerate") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
]

ROOT = Path(__file__).parents[2]
FOLDERS = [str(ROOT / part) for part in ("", "integrations", "tests", "tests/integrations/trl")]
PATH = os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")])
SCRIPT = Path(__file__).with_name("accelerate_on_gpus.py")
COMMON = ("--mixed_precision", "no", "--num_machines", "1", "--dynamo_backend", "no")
PAGE = (ROOT / "docs/integrations/transformers.md").read_text()
FSDP2 = PAGE[PAGE.index("# fsdp2.yaml") :].partition("```")[0]
RUNS = ("trainer", "grpo", *(["vllm"] if importlib.util.find_spec("vllm") else []))


def launch(folder: Path, model: Path, processes: int, options: tuple[str, ...], names: tuple[str, ...]) -> Any:
    """What the script wrote."""
    results = folder / f"{processes}{len(options)}.json"
    with socket.socket() as free:  # because two of these tests may run at a time
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes), *COMMON, *options]
    command += ["--main_process_port", port]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS)))).split(",")[:processes]
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(visible), "OMP_NUM_THREADS": "4", "PYTHONPATH": PATH}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # of vLLM in one process, else 29500
    done = subprocess.run(
        [*command, str(SCRIPT), str(model), str(results), *names],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(results.read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 3}
    return make_model(tmp_path_factory.mktemp("model"), **sizes)


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return launch(tmp_path_factory.mktemp("one"), model, 1, (), (*RUNS, "stock"))


@pytest.mark.parametrize("sharding", ["DDP", "FSDP2"])
@pytest.mark.parametrize("gpus", [2, pytest.param(4, marks=pytest.mark.skipif(GPUS < 4, reason="needs 4 GPUs"))])
def test_the_weights_of_one_gpu(
    gpus: int, sharding: str, alone: Any, model: Path, tmp_path: Path, record: Callable[..., None]
) -> None:
    (tmp_path / "fsdp2.yaml").write_text(FSDP2)  # as on the page
    options = ("--config_file", str(tmp_path / "fsdp2.yaml")) if sharding == "FSDP2" else ("--multi_gpu",)
    names = (*RUNS, "stock") if sharding == "DDP" else RUNS
    found = launch(tmp_path, model, gpus, options, names)
    for name in RUNS:
        assert found[f"{name} parameters"] == ("DTensor" if sharding == "FSDP2" else "Parameter")
        assert found[name] == alone[name], name
    if sharding == "DDP":
        assert found["stock"] != alone["stock"]
    record(cases=len(RUNS), tokens=0, elements=0, mismatches=0)
