"""A real vLLM server with the plugin, through TRL's own client: what it is asked, and its log-probabilities.

vLLM on a CPU cannot receive weights, so a whole run in server mode needs a GPU.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.tiny_model import make_model
from trl_side import VLLM_ENVIRONMENT, make_trainer

from rlkernel.contract import compare_bitwise
from rlkernel_trl import ExactnessLostError

PROMPTS = [[265, 278, 287], [5, 6], [285, 288, 265, 40, 41, 42]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), head_dim=32)


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[Any]:
    from trl.generation.vllm_client import VLLMClient

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--max-model-len", "96", "--dtype", "bfloat16", "--logprobs-mode", "processed_logprobs"]
    flag = ["--additional-config", '{"use_rl_kernel_backend": true}']
    module = "vllm.entrypoints.openai.api_server"  # `vllm serve` asks for a distribution called vllm
    server = subprocess.Popen(
        [sys.executable, "-m", module, "--model", str(model), "--port", str(port), *options, *flag],
        env={**os.environ, **VLLM_ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield VLLMClient(base_url=f"http://127.0.0.1:{port}", connection_timeout=240)
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.slow
def test_server(model: Path, client: Any) -> None:
    from rlkernel_trl.vllm import check_server

    trainer = make_trainer("GRPO", model, engine=True, temperature=0.8, top_p=0.9)
    backend = trainer._rl_kernel
    check_server(backend, client)
    backend.dtype = torch.float32
    with pytest.raises(ExactnessLostError, match="the trainer in float32; start it with: VLLM_SERVER_DEV_MODE=1 vllm"):
        check_server(backend, client)

    found = client.generate(PROMPTS, n=2, max_tokens=12, temperature=0.8, top_p=0.9, logprobs=0)
    prompts = [prompt for prompt in found["prompt_ids"] for _ in range(2)]
    compared = 0
    for prompt, completion, logprobs in zip(prompts, found["completion_ids"], found["logprobs"], strict=True):
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            scored = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, torch.ones_like(ids), len(completion)
            )[0][0]
        server = torch.tensor([row[0] for row in logprobs])
        assert compare_bitwise(server, scored).mismatches == 0
        compared += len(completion)
    assert compared > 30
