"""What `tp_leaves=8` costs against 1 on one GPU, and vLLM on several GPUs against stock vLLM on as many.

Rollout: nano-vllm's workload, engines alternating. Training: forward and backward of part of the layers and the head,
alternating. Random weights at published shapes.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import bench_vllm
from results_io import write_result
from timing import interleaved
from vllm_arms import LEAVES, make_model, temporary_folder

LAYERS = 8
"""Layers of the training step; all layers have the same shape."""


def rollout(preset: str, ranks: int, rounds: int, scale: float, seconds: float) -> list[dict[str, Any]]:
    """One row: tokens per second with `tp_leaves=8` against 1, or on several GPUs against stock vLLM."""
    model = make_model(preset, Path(temporary_folder()))
    cache = bench_vllm.cache_bytes(preset, "nano") // ranks
    baseline, end = "rlkernel" if ranks == 1 else bench_vllm.DEFAULT, time.monotonic() + seconds
    found = bench_vllm.measure(model, [baseline, LEAVES], "nano", cache, rounds, scale, end, tensor_parallel_size=ranks)
    where = f"generate {preset}, nano" + f", {ranks} GPUs" * (ranks > 1)
    return bench_vllm.rows(where, found["nano"], baseline)


def training(preset: str, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """One row: milliseconds of forward and backward over `tokens` tokens in sequences of 1024, with fp32 gradients."""
    import torch

    from rlkernel.models import Decoder
    from rlkernel.models import preset as named
    from rlkernel.models.batch import PackedBatch

    config = named(preset)
    layers = min(LAYERS, config.num_layers)
    config = replace(config, num_layers=layers, windows=config.windows[:layers], tp_leaves=8)
    with torch.device("cuda"):
        model = Decoder(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.zero_main_grads()
    row_parallel = [x for layer in model.layers for x in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    ids = torch.randint(config.vocab_size, (tokens // 1024, 1024)).tolist()
    batch, targets = PackedBatch.from_sequences(ids, device="cuda"), torch.tensor(ids, device="cuda").flatten()

    def step(leaves: int) -> None:
        for linear in row_parallel:
            linear.chunks = leaves
        model.logprob(model(batch), targets).logp.sum().backward()

    base, ours = interleaved([lambda: step(1), lambda: step(8)], cuda=True, rounds=rounds)
    op = f"forward and backward, {preset}, {layers} layers and head, {tokens} tokens"
    row = {"op": op, "dtype": "bfloat16", "ours": "tp_leaves=8", "baseline": "tp_leaves=1", "ours_ms": ours}
    return [{**row, "baseline_ms": base, "ratio": base / ours}]


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=Path(__file__).name, description=__doc__)
    parser.add_argument("--preset", choices=("qwen3-0.6b", "qwen3-8b"), default="qwen3-8b")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4, 8), default=1, help="GPUs of the rollout")
    parser.add_argument("--parts", nargs="+", choices=("rollout", "training"), default=["rollout", "training"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the rollout's requests")
    parser.add_argument("--tokens", type=int, default=8192, help="of the training step, a multiple of 1024")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="time limit of the rollout: later rounds are skipped"
    )
    return parser


def result_name(args: argparse.Namespace) -> str:
    """`bench_tp_leaves`, followed by what is not the default: number of GPUs, preset, parts."""
    default = options().parse_args([])
    ranks = "" if args.ranks == 1 else f"{args.ranks}-gpus"
    preset = "" if args.preset == default.preset else args.preset
    parts = "" if args.parts == default.parts else "-".join(args.parts)
    return "_".join(filter(None, ("bench_tp_leaves", ranks, preset, parts)))


def main() -> int:
    """Prints the ratios and writes the result."""
    args = options().parse_args()
    import torch

    if torch.cuda.device_count() < args.ranks:
        print(f"bench_tp_leaves: torch sees {torch.cuda.device_count()} CUDA GPUs of {args.ranks}; nothing is measured")
        return 0
    found: list[dict[str, Any]] = []
    if "training" in args.parts:
        found += training(args.preset, args.tokens, 5 * args.rounds)
        torch.cuda.empty_cache()
    if "rollout" in args.parts:
        found += rollout(args.preset, args.ranks, args.rounds, args.scale, args.seconds)
    for row in found:
        print(f"{row['op']}: {row['ours']} has {row['ratio']:.3f}x the speed of {row['baseline']}")
    print(f"wrote {write_result(result_name(args), found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
