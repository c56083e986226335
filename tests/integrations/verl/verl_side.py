"""Tiny models, and runs of verl on CPUs in processes of their own, for the tests of `rlkernel_verl`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
GPUS = torch.cuda.device_count()  # the same tests run on GPUs where there are any

ON_CPUS = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # verl registers its engines for CUDA; rlkernel_verl for NVIDIA's
    "VERL_ENGINE_VENDOR": "nvidia",
    "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
ENVIRONMENT = {
    **({} if GPUS else ON_CPUS),
    "PYTHONPATH": os.pathsep.join(map(str, (HERE, ROOT, ROOT / "integrations", ROOT / "consistency"))),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
}
VOCABULARY = 64  # of the models; the tokenizer has fewer words, as Qwen's does


def make_model(folder: Path, tied: bool = False, **changes: Any) -> None:
    """Writes a tiny Qwen3 with a tokenizer."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = ["<pad>", "<eos>", "<unk>", *"0123456789+=? ", "add", "red", "green", "blue", "user", "assistant", ":"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(pattern=Regex(r"\s|\w+|."), behavior="isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "initializer_range": 0.08,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**{**shape, "tie_word_embeddings": tied, **changes}))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_data(folder: Path) -> None:
    """Prompts with a rule's ground truth, and the reward: the digits of a response."""
    import pandas

    rows = [
        {
            "data_source": "add",
            "prompt": [{"role": "user", "content": f"{i % 10}+{i * 7 % 10}=?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i % 10 + i * 7 % 10)},
            "extra_info": {"index": i},
        }
        for i in range(64)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "data.parquet")
    (folder / "reward.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(c.isdigit() for c in solution_str) / 10\n"
    )


def overrides(folder: Path, steps: int, ranks: int = 1) -> list[str]:
    """Settings of `verl.trainer.main_ppo` for a GRPO run on CPUs."""
    data, actor, rollout = "data", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    model, ray = "actor_rollout_ref.model", "ray_kwargs.ray_init"
    given = {
        f"{data}.train_files": folder / "data.parquet",
        f"{data}.val_files": folder / "data.parquet",
        f"{data}.train_batch_size": 4,
        f"{data}.max_prompt_length": 32,
        f"{data}.max_response_length": 16,
        f"{data}.dataloader_num_workers": 0,
        f"{data}.filter_overlong_prompts": False,
        f"{model}.path": folder / "model",
        f"+{model}.override_config.attn_implementation": "sdpa",
        f"{actor}.strategy": "fsdp2",
        f"{actor}.ppo_mini_batch_size": 4,
        f"{actor}.ppo_micro_batch_size_per_gpu": 4,
        f"{actor}.optim.lr": 1e-3,
        f"{actor}.use_torch_compile": False,
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"{rollout}.name": "vllm",
        f"{rollout}.n": 4,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": 0.3,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": 4,
        f"{rollout}.max_model_len": 64,
        f"{rollout}.max_num_seqs": 16,
        f"{rollout}.max_num_batched_tokens": 256,
        f"{rollout}.agent.num_workers": 1,
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": 16,
        "algorithm.adv_estimator": "grpo",
        "reward.custom_reward_function.path": folder / "reward.py",
        "reward.custom_reward_function.name": "score",
        "reward.num_workers": 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "transfer_queue.backend.SimpleStorage.total_storage_size": 1000,
        "trainer.logger": "[console]",
        "trainer.val_before_train": False,
        "trainer.n_gpus_per_node": ranks,
        "trainer.total_training_steps": steps,
        "trainer.resume_mode": "disable",
        f"{ray}.num_cpus": 32,
        f"+{ray}.object_store_memory": 200_000_000,
        f"+{ray}.include_dashboard": False,
    }
    if not GPUS:
        given |= {
            f"{rollout}.enforce_eager": True,
            f"{rollout}.free_cache_engine": False,
            f"+{rollout}.enable_sleep_mode": False,
            "trainer.device": "cpu",
            f"+{ray}.num_gpus": ranks,  # of the platform for CPUs
        }
    return [f"{key}={value}" for key, value in given.items()]


def train(
    folder: Path, steps: int, *changes: str, ranks: int = 1, timeout: float = 600
) -> tuple[list[dict[str, float]], str]:
    """A run of verl's trainer with real vLLM: its steps' metrics, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(folder, steps, ranks), *changes],
        cwd=folder,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    found = []
    for line in done.stdout.splitlines():
        if re.search(r" step:\d+ - ", line):
            pairs = re.findall(r"(\S+):(-?[\d.]+(?:e-?\d+)?|nan)(?: - |$)", line)
            found.append({name: float(value) for name, value in pairs})
    return found, done.stdout


def on_ranks(ranks: int, folder: Path, scenarios: list[dict[str, Any]], timeout: float = 300) -> list[list[Any]]:
    """What each scenario of `verl_ranks.py` returned on each rank, [ranks][scenarios]."""
    store = folder / f"store{ranks}{abs(hash(json.dumps(scenarios)))}"
    started = [
        subprocess.Popen(
            [sys.executable, str(HERE / "verl_ranks.py"), str(store), json.dumps(scenarios)],
            env={**os.environ, **ENVIRONMENT, "RANK": str(rank), "WORLD_SIZE": str(ranks)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    out = []
    for process in started:
        text, _ = process.communicate(timeout=timeout)
        lines = [line for line in text.splitlines() if line.startswith("RESULTS ")]
        assert lines, text[-6000:]
        out.append(json.loads(lines[-1].removeprefix("RESULTS ")))
    return out
