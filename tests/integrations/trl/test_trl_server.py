"""A real vLLM server with the plugin: its log-probabilities over HTTP and through TRL's client, what it is asked, and
TRL's trainer in server mode on a CPU, with weights sent after every step and fingerprints of both sides.

TRL 1.16 sends weights through NCCL only, and its client says so. So `store_transfer` replaces NCCL here; requests, the
loading of weights, the cache's reset and the training are vLLM's and TRL's own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.tiny_model import make_model
from parallel.launched import accelerate_state, on_processes
from trl_side import VLLM_ENVIRONMENT, history, make_trainer  # skips this file where TRL or vLLM is missing

# isort: split
from store_transfer import on_cpu

import rlkernel_vllm
from rlkernel.contract import compare_bitwise
from rlkernel_trl import ExactnessLostError

PROMPTS = [[265, 278, 287], [5, 6], [285, 288, 265, 40, 41, 42]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), head_dim=32)


@pytest.fixture(scope="module")
def client(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from trl.generation.vllm_client import VLLMClient

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--max-model-len", "96", "--dtype", "bfloat16", "--logprobs-mode", "processed_logprobs"]
    options += ["--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20), "--block-size", "32"]
    flag = ["--additional-config", '{"use_rl_kernel_backend": true}']
    wire = ["--weight-transfer-config", '{"backend": "store"}', "--worker-extension-cls", "store_transfer.Extension"]
    module = "vllm.entrypoints.openai.api_server"  # `vllm serve` requires a distribution named vllm
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", module, "--model", str(model), "--port", str(port), *options, *flag, *wire],
            env={**os.environ, **VLLM_ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": path},
            stdout=out,
            stderr=out,
        )
    try:
        try:
            yield VLLMClient(base_url=f"http://127.0.0.1:{port}", connection_timeout=240)
        except ConnectionError:
            pytest.fail(log.read_text()[-5000:])
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.slow
def test_completions_over_http(model: Path, client: Any, compat: Any) -> None:
    from rlkernel.models import PackedBatch, load_model

    def post(path: str, **body: Any) -> Any:
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(client.base_url + path, data, kind), timeout=120) as answer:
            return json.load(answer)

    (status,) = post("/collective_rpc", method="rlkernel_status")["results"]
    status = status if isinstance(status, dict) else json.loads(status.replace("'", '"'))
    assert status["active"] and status["exact"]
    decoder, compared = load_model(model, dtype=torch.bfloat16), 0
    for length in (5, 40):
        prompt = [(7 * i + length) % 290 + 5 for i in range(length)]
        asked = {"prompt": prompt, "max_tokens": 16, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
        (choice,) = post("/v1/completions", model=str(model), return_token_ids=True, **asked)["choices"]
        ids = prompt + choice["token_ids"]
        with torch.no_grad():
            hidden = decoder(PackedBatch.from_sequences([ids]))[:-1]
            expected = decoder.logprob(hidden, torch.tensor(ids[1:])).logp.tolist()[length - 1 :]
        assert choice["logprobs"]["token_logprobs"] == expected
        compared += len(expected)
    compat.compared("vLLM", "OpenAI server over HTTP", 0, compared)


@pytest.mark.slow
def test_server(model: Path, client: Any, compat: Any) -> None:
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
    compat.compared("TRL", "server: its log-probabilities, temperature and top-p", 0, compared)


def of_server(client: Any) -> dict[str, str]:
    """Fingerprints of the server's weights."""
    (found,) = client._post(f"{client.base_url}/collective_rpc", json={"method": "rlkernel_fingerprints"})["results"]
    return found if isinstance(found, dict) else json.loads(found.replace("'", '"'))


def run_in_server_mode(argument: tuple[str, str, str]) -> dict[str, Any]:
    """One process of a run whose weights are sent after every step; FSDP2 on several processes."""
    algorithm, model, url = argument
    size = int(os.environ["WORLD_SIZE"])
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    if size > 1:
        torch.distributed.init_process_group("gloo")
    with on_cpu(), accelerate_state({} if size > 1 else None) as sharding:
        trainer = make_trainer(
            algorithm,
            Path(model),
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=url,
            max_steps=4,
            gradient_accumulation_steps=2 // size,
            rl_kernel_gradient_tree=True,
            **sharding,
        )
        trainer.train()
        trained = rlkernel_vllm.fingerprints(trainer.model, torch.bfloat16)
        before, after = {}, {}
        client = getattr(trainer.vllm_generation, "vllm_client", None)
        if client is not None:
            before = rlkernel_vllm.compare(of_server(client), trained)
        trainer.vllm_generation.sync_weights()
        if client is not None:
            after = rlkernel_vllm.compare(of_server(client), trained)
        rows = [{name: row[name] for name in ("rlkernel/exact_frac", "grad_norm")} for row in history(trainer)]
        return {"rows": rows, "weights": trained, "behind": len(before), "after": len(after)}


@pytest.mark.slow
def test_runs_in_server_mode(model: Path, client: Any, tmp_path: Path, compat: Any) -> None:
    """Weights are sent after every step; every token sampled then equals the training forward's. On two processes with
    FSDP2 the same weights as on one."""
    plan = [(size, (algorithm, str(model), client.base_url)) for algorithm, size in RUNS]
    alone, two, rloo = on_processes(run_in_server_mode, plan, tmp_path)
    for found in (*alone, *two, *rloo):
        assert len(found["rows"]) == 4 and all(row["rlkernel/exact_frac"] == 1.0 for row in found["rows"])
        assert sum(row["grad_norm"] > 0 for row in found["rows"]) > 1
    for main in (alone[0], two[0], rloo[0]):
        assert main["behind"] > len(main["weights"]) / 2  # the last step's weights were not sent
        assert main["after"] == 0
    assert alone[0]["weights"] == two[0]["weights"] == two[1]["weights"] != rloo[0]["weights"]
    for algorithm in ("GRPO", "RLOO"):
        compat.exact("TRL", f"server: {algorithm} with weights sent after every step")
    compat.exact("TRL", "server: fingerprints after a weight transfer")
    compat.exact("TRL", "server: GRPO on 2 processes with FSDP2: the weights of one process")


RUNS = (("GRPO", 1), ("GRPO", 2), ("RLOO", 1))


def test_trl_sends_weights_through_nccl_only(client: Any, compat: Any) -> None:
    """Why `store_transfer` exists: TRL's client refuses a trainer without CUDA."""
    with pytest.raises(NotImplementedError) as raised:
        client.init_communicator(device="cpu")
    compat.refused("TRL", "server: weights of a trainer on a CPU (by TRL)", raised.value, "NCCL.*needs a CUDA device")


def test_trl_vllm_serve_passes_the_flag_on() -> None:
    from trl.scripts.vllm_serve import build_command, make_parser

    flag = ["--additional-config", '{"use_rl_kernel_backend": true}']
    given = ["--model", "MODEL", "--dtype", "bfloat16", *flag]
    known, others = make_parser(prog="trl vllm-serve").parse_args_and_config(args=given, return_remaining_strings=True)
    command = build_command(known, others)
    assert command[-2:] == flag
    text = " ".join(command)
    for option in ("MODEL", "--dtype bfloat16", "--logprobs-mode processed_logprobs", '{"backend": "nccl"}'):
        assert option in text
