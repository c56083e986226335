"""A learning curve: `rlkernel train grpo` and TRL with vLLM, from the same checkpoint, on a built-in task.

One supervised warm-up makes the start model. Then each arm trains it with the same prompts in the same order, the same
reward and the same hyper-parameters, once per seed. The seeds of one arm share the GPU and run at the same time; the
arms run one after the other. TRL trains fp32 weights under bf16 autocast and vLLM samples in bf16, which are its usual
settings; rlkernel trains and samples bf16 weights with fp32 masters. Writes `bench_curve.json`; `--plot RECORD` draws
`docs/curve.svg` from it with matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATHS = [str(ROOT), str(ROOT / "integrations"), str(ROOT / "benchmarks")]
sys.path[:0] = PATHS
ARMS = {"rlkernel": "rlkernel train grpo", "trl": "TRL with vLLM"}
FIGURE = ROOT / "docs" / "curve.svg"
PROMPTS, GROUP, LR, BETAS, WARM_UP_STEPS = 64, 8, 6e-5, (0.9, 0.98), 700
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip
"""Sizes of the model of a trial run on a CPU."""


def train(folder: Path, *words: str) -> None:
    """One run of the command line; raises with the end of its output if it fails."""
    command = [sys.executable, "-m", "rlkernel.cli.main", "train", "grpo", "--output", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(done.stdout + done.stderr)[-3000:]}")


def start_model(folder: Path, task: str, tiny: bool) -> Path:
    """The model after the warm-up, which imitates the task's demonstrations."""
    steps = 5 if tiny else WARM_UP_STEPS
    small = [f"model.config={json.dumps(SMALL)}", "warmup.examples=256", "eval.rows=8"] if tiny else []
    # One step with a learning rate of almost 0, because a run has at least one.
    train(folder, f"data.task={task}", f"warmup.steps={steps}", "train.steps=1", "optimizer.lr=1e-30",
          "rollout.prompts=1", "rollout.group_size=2", "run.probe_rollouts=0", *small)  # fmt: skip
    return folder / "model"


def rlkernel_arm(model: str, task: str, seed: int, steps: int, tiny: bool) -> None:
    """`rlkernel train grpo`; prints one row per step."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        limits = [f"rollout.prompts={PROMPTS}", f"rollout.group_size={GROUP}"]
        limits = ["rollout.prompts=2", "rollout.group_size=2"] if tiny else limits
        train(folder, f"data.task={task}", "--model", model, "warmup.steps=0", f"train.steps={steps}", "--seed",
              str(seed), "model.dtype=" + ("float32" if tiny else "bfloat16"), f"optimizer.lr={LR}",
              f"optimizer.betas={list(BETAS)}", "run.probe_rollouts=0", "eval.rows=1", "eval.every=0",
              "run.save=false", *limits)  # fmt: skip
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            shown = {
                name: row[name] for name in ("reward", "seconds", "length", "max_abs_diff", "mismatch_tokens", "tokens")
            }
            print("ROW " + json.dumps(shown), flush=True)


def trl_arm(model: str, task: str, seed: int, steps: int, tiny: bool) -> None:
    """TRL's GRPOTrainer with vLLM in its process; prints one row per step."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rlkernel.data.tasks import load_task

    if tiny:  # stock vLLM on a CPU repacks weights, so TRL could not update them
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        keep = lambda self, layer: setattr(layer, "cpu_linear", torch.nn.functional.linear)
        UnquantizedLinearMethod.process_weights_after_loading = keep
    prompts, group = (2, 2) if tiny else (PROMPTS, GROUP)
    builtin = load_task(task)
    length = builtin.defaults("grpo")["rollout.max_tokens"]
    names = builtin.columns  # type: ignore[attr-defined]
    rows = [{k: row[k] for k in ("prompt", *names)} for row in islice(builtin.train_prompts(seed), prompts * steps)]

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return builtin.reward(prompts, completions, **{name: columns[name] for name in names})

    class Rows(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.started = time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            if "reward" not in logs:
                return
            shown = {
                "reward": logs["reward"],
                "seconds": time.perf_counter() - self.started,
                "length": logs["completions/mean_length"],
                "max_abs_diff": logs["sampling/sampling_logp_difference/max"],
                "mean_abs_diff": logs["sampling/sampling_logp_difference/mean"],
                "tokens": logs["completions/mean_length"] * prompts * group,
            }
            print("ROW " + json.dumps(shown), flush=True)

    place: dict[str, Any] = {"use_cpu": True} if tiny else {}
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            seed=seed,
            per_device_train_batch_size=prompts * group,
            num_generations=group,
            max_completion_length=length,
            max_steps=steps,
            bf16=not tiny,
            model_init_kwargs={"dtype": "float32"},
            gradient_checkpointing=False,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.05 if tiny else 0.1,
            vllm_max_model_length=512,
            loss_type="grpo",
            beta=0.0,
            learning_rate=LR,
            lr_scheduler_type="constant",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            max_grad_norm=1.0,
            shuffle_dataset=False,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **place,
        ),
        train_dataset=Dataset.from_list(rows),
        callbacks=[Rows()],
    )
    trainer.train()


def run_arm(arm: str, model: Path, task: str, seeds: int, steps: int, tiny: bool) -> list[list[dict[str, float]]]:
    """All seeds of one arm, at the same time; returns their rows."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    environment["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])
    if tiny:
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
        environment |= {"TORCH_COMPILE_DISABLE": "1"}
    processes = []
    for seed in range(seeds):
        command = [sys.executable, __file__, "--arm", arm, "--model", str(model), "--seed", str(seed)]
        command += ["--task", task, "--steps", str(steps), *(["--tiny"] if tiny else [])]
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        processes.append((subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True), log))
        if arm == "trl" and seed + 1 < seeds:
            time.sleep(20)  # vLLM measures the GPU's free memory while it starts
    runs = []
    for process, log in processes:
        code = process.wait()
        log.seek(0)
        text = log.read()
        if code:
            raise RuntimeError(f"arm {arm}: {text[-3000:]}")
        runs.append([json.loads(line[4:]) for line in text.splitlines() if line.startswith("ROW ")])
    return runs


def summary(arm: str, task: str, runs: list[list[dict[str, float]]], goal: float) -> dict[str, Any]:
    """One row of the result: final reward, steps and seconds to the goal, differing tokens; and the curves."""
    window = 10
    smooth = [
        [statistics.fmean(row["reward"] for row in run[max(0, i - window + 1) : i + 1]) for i in range(len(run))]
        for run in runs
    ]
    reached = [next((i for i, value in enumerate(one) if value >= goal), None) for one in smooth]
    clock = [
        sum(row["seconds"] for row in run[: at + 1]) for run, at in zip(runs, reached, strict=True) if at is not None
    ]
    everywhere = all(at is not None for at in reached)
    return {
        "op": f"learning curve, {task}",
        "what": ARMS[arm],
        "seeds": len(runs),
        "steps": len(runs[0]),
        "reward_first": statistics.fmean(run[0]["reward"] for run in runs),
        "reward_last": statistics.fmean(one[-1] for one in smooth),
        "goal": goal,
        "steps_to_goal": statistics.fmean(at + 1 for at in reached if at is not None) if everywhere else None,
        "seconds_to_goal": statistics.fmean(clock) if everywhere else None,
        "step_seconds": statistics.median(row["seconds"] for run in runs for row in run),
        "tokens": int(sum(row["tokens"] for run in runs for row in run)),
        "mismatch_tokens": sum(int(row["mismatch_tokens"]) for run in runs for row in run)
        if arm == "rlkernel"
        else None,
        "max_abs_diff": max(row["max_abs_diff"] for run in runs for row in run),
        "curves": [[[round(row["reward"], 4), round(row["seconds"], 4)] for row in run] for run in runs],
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Reward against steps and against seconds: mean of the seeds as a line, their range as a band."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    import numpy as np

    matplotlib.rcParams |= {"svg.hashsalt": "rlkernel", "font.size": 9, "svg.fonttype": "none"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
    for row, color in zip(rows, ("#0b6e4f", "#b5541c"), strict=True):
        rewards = np.array([[reward for reward, _ in run] for run in row["curves"]])
        kernel = np.ones(5) / 5
        rewards = np.array([np.convolve(one, kernel, mode="valid") for one in rewards])
        seconds = np.cumsum([[second for _, second in run] for run in row["curves"]], axis=1).mean(axis=0)[4:]
        steps = np.arange(5, rewards.shape[1] + 5)
        for axis, x in ((left, steps), (right, seconds)):
            axis.plot(x, rewards.mean(axis=0), color=color, label=row["what"])
            axis.fill_between(x, rewards.min(axis=0), rewards.max(axis=0), color=color, alpha=0.2, linewidth=0)
    left.set(xlabel="step", ylabel="reward, mean of 5 steps")
    right.set(xlabel="seconds of training")
    right.legend(frameon=False, loc="lower right")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    """Trains all arms, prints a table, writes the record and the figure; returns 1 if a token of ours differed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="countdown", help="a built-in task with scratch work (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--goal", type=float, default=0.5, help="reward, as the mean of 10 steps, that is timed")
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS))
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU; writes no result")
    parser.add_argument("--plot", metavar="RECORD", type=Path, help="only draw the figure of a record")
    parser.add_argument("--arm", choices=tuple(ARMS), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plot:
        plot(json.loads(args.plot.read_text())["rows"], FIGURE)
        return 0
    if args.arm:
        {"rlkernel": rlkernel_arm, "trl": trl_arm}[args.arm](args.model, args.task, args.seed, args.steps, args.tiny)
        return 0
    from results_io import write_result
    from test_integrations import versions

    start = time.perf_counter()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = start_model(Path(scratch) / "start", args.task, args.tiny)
        print(f"[{time.perf_counter() - start:5.0f} s] start model", flush=True)
        for arm in args.arms:
            runs = run_arm(arm, model, args.task, args.seeds, args.steps, args.tiny)
            rows.append(summary(arm, args.task, runs, args.goal))
            shown = {name: value for name, value in rows[-1].items() if name != "curves"}
            print(f"[{time.perf_counter() - start:5.0f} s] {json.dumps(shown)}", flush=True)
            if not args.tiny:
                print(f"wrote {write_result('bench_curve', rows, versions=versions())}", flush=True)
    return int(any(row["mismatch_tokens"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
