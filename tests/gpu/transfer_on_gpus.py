"""A vLLM server with the plugin, and a trainer that sends it weights: `python transfer_on_gpus.py nccl|ipc FOLDER`.

The trainer runs on the GPU that this process sees, the server on SERVER_DEVICE. Prints one line of JSON.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT / part) for part in (".", "integrations", "benchmarks", "tests", "tests/integrations/trl")]
sys.path[:0] = PATHS

PROMPTS = [[265, 278, 287], [5, 6], [285, 288, 265, 40, 41, 42]]


def post(url: str, body: dict[str, Any]) -> Any:
    data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, kind), timeout=300) as answer:
        text = answer.read()
    return json.loads(text) if text else None


@contextlib.contextmanager
def server(model: Path, backend: str, folder: Path) -> Iterator[str]:
    """Starts a server; yields its address once it answers."""
    from vllm_arms import entry_point

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--max-model-len", "128", "--dtype", "bfloat16", "--logprobs-mode", "processed_logprobs"]
    command += ["--enforce-eager"]  # CUDA graphs cost a minute and are tested in test_vllm_gpu.py
    command += ["--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(1 << 30)]
    command += ["--additional-config", '{"use_rl_kernel_backend": true}']
    command += ["--weight-transfer-config", json.dumps({"backend": backend})]
    path = os.pathsep.join([str(entry_point(folder)), str(folder / "stubs"), *PATHS, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": os.environ["SERVER_DEVICE"]}
    environment |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_NO_USAGE_STATS": "1"}
    log = folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(960):
            with contextlib.suppress(OSError, urllib.error.URLError):
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            if process.poll() is not None:
                break
            time.sleep(0.5)
        else:
            process.kill()
        if process.poll() is not None:
            raise RuntimeError(f"the server did not start: {log.read_text()[-5000:]}")
        print(f"{backend}: the server is up", flush=True)
        yield url
    except Exception:
        print(f"{log.read_text()[-3000:]}\nthe server's exit status: {process.poll()}", flush=True)
        raise
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()


def fingerprints_at(url: str) -> dict[str, str]:
    """Fingerprints of the server's weights."""
    (found,) = post(f"{url}/collective_rpc", {"method": "rlkernel_fingerprints"})["results"]
    return found if isinstance(found, dict) else dict(json.loads(found.replace("'", '"')))


def over_nccl(model: Path, folder: Path) -> dict[str, Any]:
    from trl_side import history, make_trainer

    import rlkernel_vllm

    with server(model, "nccl", folder) as url:
        changes: dict[str, Any] = {"use_cpu": False, "use_vllm": True, "vllm_mode": "server", "max_steps": 4}
        trainer = make_trainer("GRPO", model, vllm_server_base_url=url, **changes)
        trainer.train()
        rows = history(trainer)
        trained = rlkernel_vllm.fingerprints(trainer.model)
        behind = rlkernel_vllm.compare(fingerprints_at(url), trained)  # the last step's weights were not sent
        trainer.vllm_generation.sync_weights()
        return {
            "exact": [row["rlkernel/exact_frac"] for row in rows],
            "mismatches": sum(row["rlkernel/mismatch_tokens"] for row in rows),
            "tokens": int(sum(row["completions/mean_length"] * 4 for row in rows)),
            "grad_norm": [row["grad_norm"] for row in rows],
            "behind": len(behind),
            "after": rlkernel_vllm.compare(fingerprints_at(url), trained),
        }


def over_ipc(model: Path, folder: Path) -> dict[str, Any]:
    stub_ray(folder)
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    import rlkernel_vllm
    from rlkernel.models import PackedBatch, load_model
    from rlkernel.models.checkpoint import hf_tensors

    decoder = load_model(model, device="cuda", dtype=torch.bfloat16)
    result: dict[str, Any] = {"pairs": {}, "behind": [], "after": []}
    with server(model, "ipc", folder) as url:
        post(f"{url}/init_weight_transfer_engine", {"init_info": {}})
        for name, packed in (("in one message", False), ("in chunks", True)):
            with torch.no_grad():
                for p in decoder.parameters():
                    p.mul_(1.0 + torch.rand_like(p) / 4)
            ours = rlkernel_vllm.fingerprints(dict(hf_tensors(decoder)))
            result["behind"].append(len(rlkernel_vllm.compare(fingerprints_at(url), ours)))
            post(f"{url}/start_weight_update", {})
            IPCWeightTransferEngine.trainer_send_weights(
                iter(hf_tensors(decoder)), {"send_mode": "http", "url": url, "packed": packed}
            )
            post(f"{url}/finish_weight_update", {})
            urllib.request.urlopen(urllib.request.Request(f"{url}/reset_prefix_cache", b""), timeout=60).close()
            result["after"].append(rlkernel_vllm.compare(fingerprints_at(url), ours))
            result["pairs"][name] = compared(decoder, PackedBatch, url, str(model))
    return result


def compared(decoder: Any, batch: Any, url: str, model: str) -> list[int]:
    """[differing, numbers] of sampled log-probabilities."""
    differing = numbers = 0
    for prompt in PROMPTS:
        asked = {"prompt": prompt, "max_tokens": 24, "temperature": 1.0, "seed": 1, "logprobs": 0, "ignore_eos": True}
        (choice,) = post(f"{url}/v1/completions", {"model": model, "return_token_ids": True, **asked})["choices"]
        ids = prompt + choice["token_ids"]
        with torch.no_grad():
            hidden = decoder(batch.from_sequences([ids], device="cuda"))[:-1]
            expected = decoder.logprob(hidden, torch.tensor(ids[1:], device="cuda")).logp.tolist()[len(prompt) - 1 :]
        found = choice["logprobs"]["token_logprobs"]
        differing += sum(a != b for a, b in zip(found, expected, strict=True))
        numbers += len(found)
    return [differing, numbers]


def stub_ray(folder: Path) -> None:
    """Puts an empty module `ray` on the path: vLLM 0.26 imports Ray for a transfer over HTTP, which does not use it."""
    if importlib.util.find_spec("ray") is None:
        (folder / "stubs").mkdir()
        (folder / "stubs" / "ray.py").write_text("")
        sys.path.append(str(folder / "stubs"))


def main() -> None:
    from e2e.tiny_model import make_model

    backend, folder = sys.argv[1], Path(sys.argv[2])
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 64}
    model = make_model(folder / "model", **sizes)
    print("RESULT " + json.dumps({"nccl": over_nccl, "ipc": over_ipc}[backend](model, folder)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
