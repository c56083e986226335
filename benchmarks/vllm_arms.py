"""Arms of a vLLM benchmark: engines in separate processes that run at the same time and are measured alternately.

`python vllm_arms.py SETTINGS` is one arm: it builds an engine with these JSON settings, vLLM's or with the key "engine"
rlkernel's own, then answers each line of JSON on standard input with a line of JSON.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "integrations")]

LEAVES = "rlkernel tp_leaves=8"
BATCHED_TOKENS = 16384
"""Most tokens of a step of rlkernel's engine: vLLM's default for offline inference on GPUs of 70 GiB or more."""
ARMS: dict[str, dict[str, Any]] = {
    "vllm default": {},
    "vllm batch invariant": {
        "env": {"VLLM_BATCH_INVARIANT": "1"},
        "settings": {"attention_config": {"backend": "FLASH_ATTN"}},
    },
    "rlkernel": {"settings": {"additional_config": {"use_rl_kernel_backend": True}}},
    LEAVES: {"settings": {"additional_config": {"use_rl_kernel_backend": True, "tp_leaves": 8}}},
    "rlkernel fa3": {
        "settings": {"additional_config": {"use_rl_kernel_backend": True, "rl_kernel_attention": "fa3"}}
    },
    "engine": {"settings": {"engine": {}}},
    "engine unshared": {"settings": {"engine": {"shared_prefix": False}}},
}  # fmt: skip


def memory(cache: int) -> dict[str, Any]:
    """Settings of an engine with a KV cache of `cache` bytes that ignores the memory of other processes.

    vLLM refuses to start if less than its share of the GPU is free, even with a fixed number of bytes.
    """
    return {"kv_cache_memory_bytes": cache, "gpu_memory_utilization": 0.05}


def entry_point(folder: Path) -> Path:
    """A folder with the metadata by which vLLM finds the plugin if rlkernel is a checkout and not installed."""
    info = folder / "entry" / "rlkernel-0.0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlkernel\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nrlkernel = rlkernel_vllm:register\n")
    return info.parent


def draw_weights_(model: Any, device: str) -> None:
    """Matrices become N(0, 0.02), drawn on the device from seed 0, biases 0 and the weights of norms 1."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def make_model(config: Any, folder: Path) -> Path:
    """Saves a model with random weights; its logits have a standard deviation of about 3, so that sampling is not
    trivial.

    Args:
        config: a `ModelConfig`, or the name of a preset.
    """
    import torch

    from rlkernel.models import Decoder, save_model
    from rlkernel.models import preset as named

    with torch.device("cuda"):
        model = Decoder(named(config) if isinstance(config, str) else config)
    draw_weights_(model, "cuda")
    with torch.no_grad():
        model.norm.weight.fill_(5.0)
    out = save_model(model, folder / (config if isinstance(config, str) else config.model_type))
    del model
    torch.cuda.empty_cache()
    return out


def temporary_folder() -> str:
    """A folder in memory if possible, because several processes read models of 16 GB."""
    return tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


class Arm:
    """One engine in a process.

    Args:
        name: a key of `ARMS`.
        folder: for vLLM's caches; certification uses the user's cache.
        settings: arguments of `vllm.LLM` for all arms.
    """

    def __init__(self, name: str, folder: Path, settings: dict[str, Any]) -> None:
        arm = ARMS[name]
        env = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_CACHE_ROOT": str(folder / name.replace(" ", "_")),
            "PYTHONPATH": os.pathsep.join(
                [str(entry_point(folder)), str(ROOT), str(ROOT / "integrations"), os.environ.get("PYTHONPATH", "")]
            ),
            **arm.get("env", {}),
        }
        given = {**settings, **arm.get("settings", {})}
        command = [sys.executable, str(Path(__file__).resolve()), json.dumps(given)]
        self.name = name
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder
        )  # fmt: skip

    def __enter__(self) -> Arm:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self, **question: Any) -> dict[str, Any]:
        """Sends a question and waits for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next answer; other output is printed.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                found: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
                return found
            print(f"[{self.name}] {line}", end="", flush=True)
        raise RuntimeError(f"{self.name}: the engine's process ended with status {self._process.wait()}")


def requests(workload: dict[str, Any]) -> tuple[list[list[int]], list[int]]:
    """Prompts of random token ids, and the number of tokens to sample for each."""
    rng = random.Random(workload["seed"])
    draw = lambda limits: rng.randint(*limits)
    prompts = [
        [rng.randrange(3, workload["vocabulary"]) for _ in range(draw(workload["prompt"]))]
        for _ in range(workload["requests"])
    ]
    return prompts, [draw(workload["output"]) for _ in prompts]


Generate = Callable[[], list[Any]]
Prepare = Callable[[list[list[int]], list[int], dict[str, Any]], Generate]
"""Makes a call that samples counts[i] tokens after prompts[i]."""


def _vllm(settings: dict[str, Any]) -> Prepare:
    from vllm import LLM, SamplingParams

    llm = LLM(**settings)

    def prepare(prompts: list[list[int]], counts: list[int], sampling: dict[str, Any]) -> Generate:
        given = {"ignore_eos": True, "detokenize": False, **sampling}
        parameters = [SamplingParams(max_tokens=n, **given) for n in counts]
        return lambda: llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)

    return prepare


def _engine(settings: dict[str, Any]) -> Prepare:
    from rlkernel.engine import LLM, SamplingParams
    from rlkernel.models import KVCache, load_model

    model = load_model(settings["model"], device="cuda")
    llm = LLM(
        model, num_pages=settings["kv_cache_memory_bytes"] // KVCache.page_bytes(model.config, 16),
        max_num_seqs=settings["max_num_seqs"], max_model_len=settings["max_model_len"],
        prefix_caching=settings["enable_prefix_caching"], max_num_batched_tokens=BATCHED_TOKENS, **settings["engine"],
    )  # fmt: skip

    def prepare(prompts: list[list[int]], counts: list[int], sampling: dict[str, Any]) -> Generate:
        parameters = [SamplingParams(max_tokens=n, ignore_eos=True, **sampling) for n in counts]
        return lambda: llm.generate(prompts, parameters)

    return prepare


def _serve() -> None:
    """Main loop of the arm's process."""
    settings = json.loads(sys.argv[1])
    prepare = (_engine if "engine" in settings else _vllm)(settings)

    def reply(**found: Any) -> None:
        print("ANSWER " + json.dumps(found), flush=True)

    reply(up=True)
    for line in sys.stdin:
        question = json.loads(line)
        if "workload" in question:
            prompts, counts = requests(question["workload"])
        else:
            prompts, counts = question["prompts"], question["counts"]
        sampling = question["sampling"]
        generate = prepare(prompts, counts, sampling)
        start = time.perf_counter()
        outputs = generate()
        taken = time.perf_counter() - start
        found: dict[str, Any] = {"seconds": taken, "tokens": sum(counts) * sampling.get("n", 1)}
        if question.get("details"):
            found["sampled"] = [list(o.outputs[0].token_ids) for o in outputs]
            if sampling.get("logprobs") is not None:
                found["logprobs"] = [
                    [row[t].logprob for t, row in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)]
                    for o in outputs
                ]
        reply(**found)


if __name__ == "__main__":
    _serve()
