"""Rollout throughput of vLLM with its defaults, batch-invariant, and with rlkernel, alternating on one GPU.

Workloads: nano-vllm's benchmark (256 requests of 100-1024 tokens in and out), and 4 requests of 32k tokens. Random
weights at published shapes. If three engines do not fit into memory, vLLM's default runs with one other at a time.
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
NANO = {"requests": 256, "prompt": (100, 1024), "output": (100, 1024)}
LONG = {"requests": 4, "prompt": (32000, 32000), "output": (256, 256)}
WORKLOADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nano": (NANO, {"max_model_len": 4096, "max_num_seqs": 256}),
    "long": (LONG, {"max_model_len": 32768, "max_num_seqs": 16}),
}
CASES = (("qwen3-0.6b", "nano"), ("qwen3-8b", "nano"), ("qwen3-0.6b", "long"), ("qwen3-8b", "long"))
VOCABULARY = 120000
"""Token ids are drawn below this number, which is valid for every preset."""
RESERVE = 10 << 30
"""Bytes of an engine in addition to weights and cache: CUDA context, activations, graphs."""


def peak_tokens(prompt: tuple[int, int], output: tuple[int, int]) -> float:
    """Maximum over time of the mean number of cached tokens per request; all start at once, lengths are uniform."""
    least, most = output
    alive = lambda t: 1.0 if t <= least else (most - t) / (most - least)
    return max(alive(t) * (sum(prompt) / 2 + t) for t in range(most + 1))


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
) -> dict[str, list[float]]:
    """Tokens per second of each arm in each round; the arms alternate.

    A round after the first starts only if, with the duration of the longest round so far, it would finish before `end`
    (in seconds of `time.monotonic`).
    """
    asked, settings = WORKLOADS[workload]
    asked = {**asked, "seed": 0, "vocabulary": VOCABULARY, "requests": max(1, int(asked["requests"] * scale))}
    common = {
        "model": str(model), "skip_tokenizer_init": True, "seed": 0, "enable_prefix_caching": False,
        **memory(cache), **settings, **settings_of_all,
    }  # fmt: skip
    rates: dict[str, list[float]] = {name: [] for name in arms}
    with ExitStack() as stack:
        running = [stack.enter_context(Arm(name, model.parent, common)) for name in arms]
        for arm in running:
            arm.answer()
            print(f"{arm.name}: up", flush=True)
        sampling = {"temperature": 0.6}
        for arm in running:  # compiles kernels
            arm.ask(workload={**asked, "output": (8, 8)}, sampling=sampling)
        longest = 0.0
        for i in range(rounds):
            begin = time.monotonic()
            if i > 0 and begin + longest > end:
                print(f"round {i} and later are skipped for lack of time", flush=True)
                break
            for arm in running[i % len(running) :] + running[: i % len(running)]:
                found = arm.ask(workload=asked, sampling=sampling)
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

    Without the arm "rlkernel" the name ends with the other arms, so that it does not replace rlkernel's record.
    """
    without = [] if "rlkernel" in args.arms else [arm.replace(" ", "-") for arm in args.arms if arm != DEFAULT]
    return "_".join(filter(None, ("bench_vllm", args.preset, args.workload, *without)))


def main() -> int:
    """Prints tokens per second and writes the result."""
    args = options().parse_args()
    end = time.monotonic() + args.seconds
    import torch

    if not torch.cuda.is_available():
        print("bench_vllm: torch sees no CUDA GPU; nothing is measured")
        return 0
    from rlkernel.models import KVCache
    from rlkernel.models import preset as named

    folder, total = Path(temporary_folder()), torch.cuda.mem_get_info()[1]
    cases = [c for c in CASES if args.preset in (None, c[0]) and args.workload in (None, c[1])]
    found: list[dict[str, Any]] = []
    for preset, workload in cases:
        model = folder / preset
        if not model.exists():
            make_model(preset, folder)
        asked, _ = WORKLOADS[workload]
        keys = int(1.2 * asked["requests"] * peak_tokens(asked["prompt"], asked["output"]))
        cache = keys // 16 * KVCache.page_bytes(named(preset), 16, torch.bfloat16)
        weights = sum(f.stat().st_size for f in model.glob("*.safetensors"))
        for arms in groups(args.arms, weights, cache, total):
            rates = measure(model, arms, workload, cache, args.rounds, args.scale, end)
            found += rows(f"generate {preset}, {workload}", rates)
    for row in found:
        print(f"{row['op']}: {row['ours']} {row['tokens_per_s']:,.0f} tokens/s, {row['ratio']:.3f}x of {DEFAULT}")
    from importlib.metadata import version

    from results_io import write_result

    print(f"wrote {write_result(result_name(args), found, vllm=version('vllm'))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
