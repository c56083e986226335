"""Rollout throughput of vLLM with its defaults, batch-invariant and with rlkernel, and of rlkernel's own engine.

The arms alternate on one GPU. Workloads: nano-vllm's benchmark (256 requests of 100-1024 tokens in and out), 4 requests
of 32k tokens, and groups: 8 completions of 1024 tokens of each of 8 prompts, with prefix caches. Random weights at
published shapes. If all engines do not fit into memory, vLLM's default runs with one other at a time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from vllm_arms import ARMS, Arm, make_model, memory, temporary_folder

DEFAULT = "vllm default"
Workload = dict[str, Any]
NANO: Workload = {"requests": 256, "prompt": (100, 1024), "output": (100, 1024)}
LONG: Workload = {"requests": 4, "prompt": (32000, 32000), "output": (256, 256)}
GROUPS = {
    f"8 prompts of {n}, 8 x 1024 tokens": {"requests": 8, "n": 8, "prompt": (n, n), "output": (1024, 1024)}
    for n in (128, 4096)
}
WORKLOADS: dict[str, tuple[dict[str, Workload], dict[str, Any]]] = {
    "nano": ({"nano": NANO}, {"max_model_len": 4096, "max_num_seqs": 256}),
    "long": ({"long": LONG}, {"max_model_len": 32768, "max_num_seqs": 16}),
    "groups": (GROUPS, {"max_model_len": 8192, "max_num_seqs": 256, "enable_prefix_caching": True}),
}
"""Per name the workloads that the same engines run one after another, and settings of these engines."""
CASES = tuple((preset, name) for name in WORKLOADS for preset in ("qwen3-0.6b", "qwen3-8b"))
VOCABULARY = 120000
"""Token ids are drawn below this number, which is valid for every preset."""
RESERVE = 10 << 30
"""Bytes of an engine in addition to weights and cache: CUDA context, activations, graphs."""


def peak_tokens(asked: Workload) -> float:
    """Most cached tokens: maximum over time of the mean per request, all of which start at once, times the requests.

    Lengths are uniform; the completions of a request share its prompt.
    """
    (least, most), n = asked["output"], asked.get("n", 1)
    alive = lambda t: 1.0 if t <= least else (most - t) / (most - least)
    mean = max(alive(t) * (sum(asked["prompt"]) / 2 + n * t) for t in range(most + 1))
    return float(asked["requests"] * mean)


def cache_bytes(preset: str, workload: str) -> int:
    """Size of a bf16 KV cache with a fifth more than the largest workload needs."""
    import torch

    from rlkernel.models import KVCache
    from rlkernel.models import preset as named

    keys = int(1.2 * max(map(peak_tokens, WORKLOADS[workload][0].values())))
    return keys // 16 * KVCache.page_bytes(named(preset), 16, torch.bfloat16)


def groups(arms: Sequence[str], weights: int, cache: int, total: int) -> list[list[str]]:
    """Arms that run at the same time: all, or the default with one other."""
    if len(arms) * (weights + cache + RESERVE) <= total:
        return [list(arms)]
    return [[DEFAULT, arm] for arm in arms if arm != DEFAULT]


def measure(
    model: Path,
    arms: list[str],
    workload: str,
    cache: int,
    rounds: int,
    scale: float,
    end: float,
    **settings_of_all: Any,
) -> dict[str, dict[str, list[float]]]:
    """Tokens per second of each arm in each round of each workload of that name; the arms alternate.

    The prompts of every round are new, so that prefix caches share them within a round only. A round after the first
    starts only if, with the duration of the longest round so far, it would finish before `end` (in seconds of
    `time.monotonic`).
    """
    all_asked, settings = WORKLOADS[workload]
    common = {
        "model": str(model), "skip_tokenizer_init": True, "seed": 0, "enable_prefix_caching": False,
        **memory(cache), **settings, **settings_of_all,
    }  # fmt: skip
    with ExitStack() as stack:
        running = [stack.enter_context(Arm(name, model.parent, common)) for name in arms]
        for arm in running:
            arm.answer()
            print(f"{arm.name}: up", flush=True)
        return {
            what: _rates(running, {**asked, "requests": max(1, int(asked["requests"] * scale))}, rounds, end)
            for what, asked in all_asked.items()
        }


def _rates(running: list[Arm], asked: Workload, rounds: int, end: float) -> dict[str, list[float]]:
    """Tokens per second of each arm in each round of one workload."""
    rates: dict[str, list[float]] = {arm.name: [] for arm in running}

    def ask(arm: Arm, seed: int) -> dict[str, Any]:
        workload = {**asked, "seed": seed, "vocabulary": VOCABULARY}
        return arm.ask(workload=workload, sampling={"temperature": 0.6, "n": asked.get("n", 1)})

    for arm in running:
        ask(arm, rounds)  # compiles kernels, captures graphs
    longest = 0.0
    for i in range(rounds):
        begin = time.monotonic()
        if i > 0 and begin + longest > end:
            print(f"round {i} and later are skipped for lack of time", flush=True)
            break
        for arm in running[i % len(running) :] + running[: i % len(running)]:
            found = ask(arm, i)
            rates[arm.name].append(found["tokens"] / found["seconds"])
            print(f"round {i}: {arm.name}: {rates[arm.name][-1]:,.0f} tokens/s", flush=True)
        longest = max(longest, time.monotonic() - begin)
    return rates


def rows(op: str, rates: dict[str, list[float]], against: str = DEFAULT) -> list[dict[str, Any]]:
    """One row per arm: medians over the rounds, and the median of the rounds' ratios to the arm `against`."""
    out = []
    for name, found in rates.items():
        if name == against:
            continue
        baseline = rates[against]
        out.append(
            {
                "op": op,
                "dtype": "bfloat16",
                "ours": name,
                "baseline": against,
                "tokens_per_s": statistics.median(found),
                "baseline_tokens_per_s": statistics.median(baseline),
                "ratio": statistics.median(a / b for a, b in zip(found, baseline, strict=True)),
                "rounds": len(found),
            }
        )
    return out


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=Path(__file__).name, description=__doc__)
    parser.add_argument("--preset", choices=sorted({p for p, _ in CASES}))
    parser.add_argument("--workload", choices=WORKLOADS)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[DEFAULT, "vllm batch invariant", "rlkernel"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the requests")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="time limit: rounds that would end later are skipped"
    )
    return parser


def result_name(args: argparse.Namespace) -> str:
    """`bench_vllm`, or `bench_vllm_<preset>_<workload>` for one case.

    The record of the plugin and of vLLM's modes has no ending, so these have one: "engine" if rlkernel's engine is an
    arm, else the names of the arms if "rlkernel" is not among them.
    """
    others = [] if "rlkernel" in args.arms else [arm.replace(" ", "-") for arm in args.arms if arm != DEFAULT]
    ending = ["engine"] if "engine" in args.arms else others
    return "_".join(filter(None, ("bench_vllm", args.preset, args.workload, *ending)))


def main() -> int:
    """Prints tokens per second and writes the result."""
    args = options().parse_args()
    end = time.monotonic() + args.seconds
    import torch

    if not torch.cuda.is_available():
        print("bench_vllm: torch sees no CUDA GPU; nothing is measured")
        return 0
    folder, total = Path(temporary_folder()), torch.cuda.mem_get_info()[1]
    cases = [c for c in CASES if args.preset in (None, c[0]) and args.workload in (None, c[1])]
    found: list[dict[str, Any]] = []
    for preset, workload in cases:
        model = folder / preset
        if not model.exists():
            make_model(preset, folder)
        cache = cache_bytes(preset, workload)
        weights = sum(f.stat().st_size for f in model.glob("*.safetensors"))
        for arms in groups(args.arms, weights, cache, total):
            measured = measure(model, arms, workload, cache, args.rounds, args.scale, end)
            for what, rates in measured.items():
                found += rows(f"generate {preset}, {what}", rates)
    for row in found:
        print(f"{row['op']}: {row['ours']} {row['tokens_per_s']:,.0f} tokens/s, {row['ratio']:.3f}x of {DEFAULT}")
    from importlib.metadata import version

    from results_io import write_result

    print(f"wrote {write_result(result_name(args), found, vllm=version('vllm'))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
