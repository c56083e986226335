"""A GRPO step of TRL at the shape of Qwen3-0.6B: flag on, with vLLM or with rlkernel's engine, against flag off.

8 prompts x 8 completions x 1024 tokens, random weights with finite gradients, the rollout in the trainer's process.
Each arm is a separate process on the same GPU. Their steps alternate, so that clocks and other load affect them
alike. `--tiny` is a trial run on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATHS = [str(ROOT), str(ROOT / "integrations"), str(ROOT / "benchmarks")]
sys.path[:0] = PATHS
ARMS = ("on", "engine", "off")
WARM_UP = 2
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}


@dataclass(frozen=True)
class Size:
    """A step: prompts of `prompt_tokens`, and a group of completions of `tokens` for each."""

    prompts: int = 8
    group: int = 8
    tokens: int = 1024
    prompt_tokens: int = 128

    @property
    def per_forward(self) -> int:
        """Completions of TRL's micro-batch: about 8 x 1024 tokens, as long as that divides the step's completions."""
        count = self.prompts * self.group
        return next(n for n in range(max(1, min(count, 8 * 1024 // self.tokens)), 0, -1) if count % n == 0)

    def texts(self, vocabulary: int) -> list[str]:
        """256 random prompts of the model's tokenizer."""
        generator = random.Random(0)
        draw = lambda: " ".join(f"t{generator.randrange(3, vocabulary)}" for _ in range(self.prompt_tokens))
        return [draw() for _ in range(256)]


def make_model(folder: str, tiny: bool, tied: bool = True, eos: int | None = 1, **changes: int) -> None:
    """A random Qwen3 with a tokenizer; its logits have a standard deviation of about 3, and its gradients are
    finite. `changes`: of the shape."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    shape = {**(TINY if tiny else SHAPE), **changes}
    torch.manual_seed(0)
    config = Qwen3Config(
        **shape, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=eos, pad_token_id=2, rms_norm_eps=1e-6
    )
    with torch.device("cpu" if tiny else "cuda"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 3.0 * shape["hidden_size"] ** -0.5)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(shape["vocab_size"])}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1", pad_token="t2", unk_token="t0").save_pretrained(
        folder
    )


def worker(arm: str, folder: str, steps: int, tiny: bool, size: Size | None = None) -> None:
    """One arm: builds the trainer, then runs one step per line on standard input and prints its figures."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback

    from rlkernel_trl import GRPOConfig, GRPOTrainer, rollout_func

    if tiny and arm == "off":  # stock vLLM on a CPU repacks weights, so TRL could not update them
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        keep = lambda self, layer: setattr(layer, "cpu_linear", torch.nn.functional.linear)
        UnquantizedLinearMethod.process_weights_after_loading = keep
    cuda = torch.cuda.is_available()
    size = size or (Size(tokens=32, prompt_tokens=16) if tiny else Size())
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    per_forward = min(size.per_forward, size.prompts * size.group // processes)
    prompts = size.texts((TINY if tiny else SHAPE)["vocab_size"])
    spent: dict[str, float] = {}

    def now() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(name: str, fn: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = now()
            try:
                return fn(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0.0) + now() - start

        return call

    class Turns(TrainerCallback):
        """Waits for a line before each step and reports after it."""

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            sys.stdin.readline()
            spent.clear()
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            self.start = now()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            if "loss" not in logs:
                return
            seconds = now() - self.start
            wanted = (
                "loss",
                "grad_norm",
                "completions/mean_length",
                "rlkernel/exact_frac",
                "rlkernel/old_logps_skipped",
            )
            row = {name: logs[name] for name in wanted if name in logs}
            row["difference"] = logs["sampling/sampling_logp_difference/max"]
            row["difference_mean"] = logs["sampling/sampling_logp_difference/mean"]
            row["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30 if cuda else 0.0
            peak = max(torch.cuda.max_memory_allocated(), spent.pop("peak", 0.0)) if cuda else 0.0
            row["peak_gib"] = peak / 2**30
            if cuda:
                torch.cuda.empty_cache()  # for the other arm's step
            if state.is_world_process_zero:
                print("ROW " + json.dumps({"seconds": seconds, **spent, **row}), flush=True)

    def reward(completions: list[str], **columns: Any) -> list[float]:
        return [len(set(text.split())) / 1000 + i % 8 / 100 for i, text in enumerate(completions)]

    place: dict[str, Any] = {"use_cpu": True} if tiny else {}
    rollout = None
    if arm == "engine":
        limit = 128 if tiny else 1280
        engine = rollout_func(max_num_seqs=64, max_model_len=limit, num_pages=64 * limit // 16)
        rollout = timed("generate", counted(engine, spent) if cuda else engine)
    else:
        place |= {
            "vllm_mode": "colocate",
            "vllm_max_model_length": 256 if tiny else max(2048, size.prompt_tokens + size.tokens),
        }
        place |= {"vllm_gpu_memory_utilization": 0.05 if tiny else 0.2}
    trainer = GRPOTrainer(
        model=folder,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=per_forward,
            gradient_accumulation_steps=size.prompts * size.group // (per_forward * processes),
            num_generations=size.group,
            max_completion_length=size.tokens,
            max_steps=steps,
            bf16=True,
            gradient_checkpointing=True,
            model_init_kwargs={"dtype": "bfloat16"},
            use_vllm=arm != "engine",
            learning_rate=1e-6,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_rl_kernel_backend=arm != "off",
            **place,
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        callbacks=[Turns()],
        rollout_func=rollout,
    )
    if rollout is None:
        trainer.vllm_generation.generate = timed("generate", trainer.vllm_generation.generate)
        trainer.vllm_generation.sync_weights = timed("sync", trainer.vllm_generation.sync_weights)
    trainer._get_per_token_logps_and_entropies = timed("forward", trainer._get_per_token_logps_and_entropies)
    print("READY", flush=True)
    trainer.train()


def counted(engine: Any, spent: dict[str, float]) -> Any:
    """The engine's rollout; sets `spent["peak"]` to the peak until its end, with the KV cache, which torch does not
    count and which training does not have."""
    import torch

    def call(*args: Any) -> Any:
        before = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found = engine(*args)
        llm = engine.llm
        cache = llm.num_pages * llm.runner.cache.page_bytes(llm.model.config, llm.page_size, llm.model.dtype)
        spent["peak"] = max(before, torch.cuda.max_memory_allocated() + cache)
        torch.cuda.reset_peak_memory_stats()
        return found

    return call


class Arm:
    """A worker process of a benchmark; `options`: further arguments of its command line."""

    def __init__(self, name: str, folder: str, steps: int, tiny: bool, script: str = __file__, *options: str):
        self.name, self.rows = name, list[dict[str, float]]()
        environment = {**os.environ, **ENVIRONMENT}
        environment["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])
        with socket.socket() as free:  # torch's default port may belong to a benchmark on another GPU
            free.bind(("127.0.0.1", 0))
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        if tiny:
            environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
            environment |= {"TORCH_COMPILE_DISABLE": "1"}
        self.log = tempfile.NamedTemporaryFile("w+", prefix=f"bench_trl_{name}_", delete=False)  # noqa: SIM115
        command = [sys.executable, script, "--arm", name, "--model", folder, "--steps", str(steps), *options]
        self.process = subprocess.Popen(
            [*command, *(["--tiny"] if tiny else [])],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def wait(self, mark: str) -> str:
        """The next line that starts with `mark`, without the mark."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(mark):
                return line.removeprefix(mark)
        raise RuntimeError(f"arm {self.name} ended: {Path(self.log.name).read_text()[-3000:]}")

    def step(self) -> dict[str, float]:
        """Runs one step and returns its figures."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.rows.append(json.loads(self.wait("ROW ")))
        return self.rows[-1]


def main() -> int:
    """Prints every step and writes `bench_trl.json`; returns 1 if a log-probability differed under the flag."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=WARM_UP + 6, help=f"steps of each arm, including {WARM_UP} for warm-up"
    )
    parser.add_argument("--tiny", action="store_true", help="use a tiny model on the CPU and write no result")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="default: all; a result needs off")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        worker(args.arm, args.model, args.steps, args.tiny)
        return 0
    import torch

    if not args.tiny and not torch.cuda.is_available():
        print("bench_trl: torch sees no CUDA GPU; nothing is measured")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        # In a separate process, because this one must not hold the GPU.
        code = f"import sys; sys.path[:0] = {PATHS!r}; import bench_trl; bench_trl.make_model({folder!r}, {args.tiny})"
        subprocess.run([sys.executable, "-c", code], check=True)
        start = time.perf_counter()
        arms = {}
        for name in args.arms:  # sequentially, because vLLM measures free memory while it starts
            arms[name] = Arm(name, folder, args.steps, args.tiny)
            arms[name].wait("READY")
            print(f"[{time.perf_counter() - start:5.0f} s] {name} is up", flush=True)
        for step in range(args.steps):
            for name in list(arms)[:: 1 if step % 2 else -1]:
                row = arms[name].step()
                shown = {key: float(f"{value:.4g}") for key, value in row.items()}
                print(f"[{time.perf_counter() - start:5.0f} s] step {step + 1} {name:3} {shown}", flush=True)
        for arm in arms.values():
            arm.process.wait()
    if "off" not in arms:
        return 0
    rows = [result(name, arms[name].rows, arms["off"].rows[WARM_UP:]) for name in arms if name != "off"]
    print(json.dumps(rows, indent=1))
    if not args.tiny:
        from results_io import write_result
        from test_integrations import versions

        print(f"wrote {write_result('bench_trl', rows, versions=versions())}")
    return int(any(row["difference"] != 0 or row["exact_frac"] != 1 for row in rows))


def result(name: str, all_on: list[dict[str, float]], off: list[dict[str, float]]) -> dict[str, Any]:
    """A row of the result: medians over the measured steps; equality over all steps with the flag."""
    on = all_on[WARM_UP:]
    median = lambda rows, name: statistics.median(row.get(name, 0.0) for row in rows)
    ours, baseline = median(on, "seconds") * 1e3, median(off, "seconds") * 1e3
    return {
        "op": "GRPO step, TRL, Qwen3-0.6B",
        "shape": (8, 8, 1024),
        "dtype": "bfloat16",
        "ours": f"flag on, {'vLLM' if name == 'on' else 'rlkernel engine'}",
        "baseline": "flag off, vLLM",
        "ours_ms": ours,
        "baseline_ms": baseline,
        "ratio": baseline / ours,
        "peak_gib": median(on, "peak_gib"),
        "baseline_peak_gib": median(off, "peak_gib"),
        **{f"ours_{part}_ms": median(on, part) * 1e3 for part in ("generate", "sync", "forward")},
        **{f"baseline_{part}_ms": median(off, part) * 1e3 for part in ("generate", "sync", "forward")},
        "difference": max(row["difference"] for row in all_on),
        "baseline_difference": max(row["difference"] for row in off),
        "baseline_difference_mean": median(off, "difference_mean"),
        "exact_frac": min(row["rlkernel/exact_frac"] for row in all_on),
        "grad_norm": median(on, "grad_norm"),
        "baseline_grad_norm": median(off, "grad_norm"),
        "tokens": int(sum(64 * row["completions/mean_length"] for row in all_on)),
        "rounds": len(on),
    }


if __name__ == "__main__":
    sys.exit(main())
