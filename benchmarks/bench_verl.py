"""A GRPO step under verl's Ray trainer with vLLM on the same GPUs: flag on against flag off, by number of ranks.

Shape of Qwen3-0.6B (or 8B), random weights, completions of a fixed length, FSDP2, one vLLM server per rank. Each arm is
a run of `python -m verl.trainer.main_ppo`; a step's time is verl's `timing_s/step`. verl needs an older transformers
than TRL, so this runs in an environment of its own (docs/integrations/verl.md). `--tiny` is a trial run on CPUs, with
the platform of the tests.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATHS = [str(ROOT), str(ROOT / "integrations"), str(ROOT / "benchmarks")]
sys.path[:0] = PATHS

from bench_grpo import MODELS, WARM_UP, parsed
from bench_trl import ENVIRONMENT, SHAPE, TINY, Size
from processes import Groups, exit_on_signals
from results_io import write_result

MODEL, ACTOR, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ARMS = {
    "on": [f"+{MODEL}.use_rl_kernel_backend=True"],
    # All sequences have the same length, so padding costs nothing; torch's attention knows no packed sequences.
    "off": [f"{MODEL}.use_remove_padding=False"],
}
PHASES = ("gen", "old_log_prob", "update_actor", "update_weights")


def write_inputs(folder: Path, size: Size, tiny: bool, changes: dict[str, Any]) -> None:
    """Model, prompts and reward. In a process of its own, because this one must not hold the GPU."""
    code = (
        f"import sys; sys.path[:0] = {PATHS!r}; import bench_trl; "
        f"bench_trl.make_model({str(folder / 'model')!r}, {tiny}, **{changes!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    words = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    newline, spaces = pre_tokenizers.Split(Regex("\n"), "isolated"), pre_tokenizers.Split(Regex(" +"), "removed")
    words.pre_tokenizer = pre_tokenizers.Sequence([newline, spaces])  # verl expects a newline to be a token
    words.save(str(folder / "model" / "tokenizer.json"))
    place = folder / "model" / "tokenizer_config.json"
    template = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    place.write_text(json.dumps(json.loads(place.read_text()) | template))
    rows = [
        {
            "data_source": "random",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": i},
        }
        for i, text in enumerate(size.texts((TINY if tiny else SHAPE)["vocab_size"]))
    ]
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "data.parquet")
    (folder / "reward.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(map(ord, solution_str)) % 100 / 100\n"
    )


def settings(folder: Path, size: Size, ranks: int, steps: int, tiny: bool) -> list[str]:
    """Settings of both arms."""
    length = size.prompt_tokens + size.tokens
    given = {
        "data.train_files": folder / "data.parquet",
        "data.val_files": folder / "data.parquet",
        "data.train_batch_size": size.prompts,
        "data.max_prompt_length": size.prompt_tokens,
        "data.max_response_length": size.tokens,
        "data.filter_overlong_prompts": False,
        f"{MODEL}.path": folder / "model",
        f"{MODEL}.enable_gradient_checkpointing": True,
        f"+{MODEL}.override_config.attn_implementation": "sdpa",
        f"{ACTOR}.strategy": "fsdp2",
        f"{ACTOR}.optim.lr": 1e-4,
        f"{ACTOR}.ppo_mini_batch_size": size.prompts,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": size.per_forward,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": size.per_forward,
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.n": size.group,
        f"{ROLLOUT}.ignore_eos": True,
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
        f"{ROLLOUT}.gpu_memory_utilization": 0.4,
        f"{ROLLOUT}.max_model_len": length,
        f"{ROLLOUT}.max_num_seqs": size.prompts * size.group,
        f"{ROLLOUT}.calculate_log_probs": True,
        "algorithm.adv_estimator": "grpo",
        "reward.custom_reward_function.path": folder / "reward.py",
        "reward.custom_reward_function.name": "score",
        "trainer.logger": "[console]",
        "trainer.val_before_train": False,
        "trainer.n_gpus_per_node": ranks,
        "trainer.total_training_steps": steps,
        "trainer.resume_mode": "disable",
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "ray_kwargs.ray_init.num_cpus": 32,
        "+ray_kwargs.ray_init.object_store_memory": 2_000_000_000,
        "+ray_kwargs.ray_init.include_dashboard": False,
    }
    if tiny:
        given |= {
            f"{ROLLOUT}.enforce_eager": True,
            f"{ROLLOUT}.free_cache_engine": False,
            f"+{ROLLOUT}.enable_sleep_mode": False,
            f"{ROLLOUT}.agent.num_workers": 1,
            f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 16,
            f"{ACTOR}.use_torch_compile": False,
            f"{ACTOR}.fsdp_config.use_torch_compile": False,
            "reward.num_workers": 1,
            "trainer.device": "cpu",
            "+ray_kwargs.ray_init.num_gpus": ranks,
        }
    return [f"{key}={value}" for key, value in given.items()]


def steps_of(text: str) -> list[dict[str, float]]:
    """The metrics of each step in verl's console output."""
    lines = [line for line in text.splitlines() if re.search(r" step:\d+ - ", line)]
    number = r"(\S+):(?:np\.float64\()?(-?[\d.]+(?:e[-+]?\d+)?|nan)\)?(?: - |$)"
    return [{name: float(value) for name, value in re.findall(number, line)} for line in lines]


def run_arm(
    name: str, folder: Path, given: list[str], steps: int, limit: float, variables: dict[str, str]
) -> list[dict[str, float]]:
    """The metrics of each step of a run; a run that is killed after `limit` seconds may have fewer than `steps`.

    Raises:
        RuntimeError: it failed, or was killed during the warm-up; with the end of what it printed.
    """
    path = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "PYTHONPATH": path, **variables}
    environment = {**os.environ, **ENVIRONMENT, **variables}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *given, *ARMS[name]]
    with tempfile.TemporaryFile("w+") as out:
        try:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            status = Groups().run(command, limit, cwd=folder, env=environment, **streams)  # hydra writes to the folder
            end = f"status {status}"
        except subprocess.TimeoutExpired:
            end = f"stopped after {limit:.0f} s"
        out.seek(0)
        text = out.read()
    found = steps_of(text)
    complete = end == "status 0" and len(found) == steps
    if not complete and (end.startswith("status") or len(found) <= WARM_UP):
        raise RuntimeError(f"{text[-8000:]}\nverl, {name}: {end}, {len(found)} of {steps} steps")
    return found


def on_cpus() -> dict[str, str]:
    """Environment variables of verl on CPUs, as its tests have them."""
    sys.path.insert(0, str(ROOT / "tests" / "integrations" / "verl"))
    from verl_side import ENVIRONMENT as OF_TESTS
    from verl_side import ON_CPUS

    return {**OF_TESTS, **ON_CPUS}


def row_of(label: str, size: Size, ranks: int, found: dict[str, list[dict[str, float]]], notes: list[str]) -> Any:
    """Medians of the steps after the warm-up."""

    warm_up = min(WARM_UP, max(map(len, found.values()), default=1) - 1)

    def milliseconds(arm: str, name: str) -> float | None:
        values = [step[f"timing_s/{name}"] for step in found.get(arm, [])[warm_up:] if f"timing_s/{name}" in step]
        return statistics.median(values) * 1e3 if values else None

    mine, theirs = milliseconds("on", "step"), milliseconds("off", "step")
    drift = lambda arm: max((step["training/rollout_probs_diff_max"] for step in found.get(arm, [])), default=None)
    return {
        "op": f"GRPO step of verl, Qwen3-{label}, {ranks} rank{'s' * (ranks > 1)}",
        "shape": (size.prompts, size.group, size.tokens),
        "dtype": "bfloat16",
        "ours": "flag on",
        "baseline": "flag off",
        "ours_ms": mine,
        "baseline_ms": theirs,
        "ratio": theirs / mine if mine and theirs else None,
        **{f"ours_{name}_ms": milliseconds("on", name) for name in PHASES},
        **{f"baseline_{name}_ms": milliseconds("off", name) for name in PHASES},
        "rollout_probs_diff_max": drift("on"),
        "baseline_rollout_probs_diff_max": drift("off"),
        "tokens": int(sum(step["actor/rlkernel/tokens"] for step in found.get("on", []))),
        "updates": len(found.get("on", [])),
        "note": "; ".join(notes),
    }


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=Path(__file__).name, description=__doc__)
    parser.add_argument("--row", help="[MODEL:]PROMPTSxGROUPxTOKENS, default 8x8x1024; MODEL 0.6b or 8b-full")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--steps", type=int, default=WARM_UP + 3, help="two of them warm-up")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of each run: later, it is killed")
    parser.add_argument("--tiny", action="store_true", help="use CPUs and a tiny model, and write no result")
    return parser


def what_is_missing(ranks: int) -> str:
    """Why nothing can be measured here, or ""."""
    import torch

    if torch.cuda.device_count() < ranks:
        return f"torch sees {torch.cuda.device_count()} GPUs of {ranks}"
    return "" if importlib.util.find_spec("verl") else "verl is not installed"


def main() -> int:
    """Prints the rows and writes the result; returns 1 if a run failed or a log-probability differed."""
    args = options().parse_args()
    exit_on_signals()
    row = args.row or ("2x4x16" if args.tiny else "8x8x1024")
    label, size = parsed(row)
    if not args.tiny and (missing := what_is_missing(max(args.ranks))):
        print(f"bench_verl: {missing}; nothing is measured")
        return 0
    rows, place = [], "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as made:
        folder = Path(made)
        write_inputs(folder, size, args.tiny, {"tied": False, **MODELS[label][0]})
        variables = on_cpus() if args.tiny else {}
        for ranks in args.ranks:
            found, notes = dict[str, list[dict[str, float]]](), list[str]()
            for arm in args.arms:
                begin = time.monotonic()
                try:
                    given = settings(folder, size, ranks, args.steps, args.tiny)
                    found[arm] = run_arm(arm, folder, given, args.steps, args.limit, variables)
                except RuntimeError as error:
                    print(error, file=sys.stderr)
                    notes.append(str(error).strip().splitlines()[-1][:300])
                print(f"{arm}, {ranks} ranks: {time.monotonic() - begin:.0f} s", flush=True)
                measured = row_of(label, size, ranks, found, notes)
                if not args.tiny:  # after each arm, because the next one may outlive a job's time limit
                    name = f"bench_verl_{row}_{max(args.ranks)}".replace(":", "_")
                    print(f"wrote {write_result(name, [*rows, measured])}", flush=True)
            rows.append(measured)
            print(rows[-1], flush=True)
    return int(any(row["note"] or row["rollout_probs_diff_max"] not in (0, None) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
