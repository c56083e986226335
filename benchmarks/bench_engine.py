"""Rollout throughput: 256 requests of 100-1024 tokens in and out on Qwen3-0.6B shapes, CUDA graphs against eager.

The workload is nano-vllm's benchmark with random token ids and random weights. Needs a GPU.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from results_io import write_result

from rlkernel.engine import LLM, SamplingParams
from rlkernel.models import Decoder, preset

REQUESTS = 256
ROUNDS = 3


def main() -> int:
    """Prints tokens per second and writes `bench_engine.json`."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    if not torch.cuda.is_available():
        print("bench_engine: torch sees no CUDA GPU; nothing is measured")
        return 0
    config = replace(preset("qwen3-0.6b"), max_position_embeddings=4096)
    model = Decoder.from_config(config, seed=0).to(device="cuda", dtype=torch.bfloat16)
    rng = random.Random(0)
    draw = lambda: rng.randint(100, 1024)
    prompts = [[rng.randrange(config.vocab_size) for _ in range(draw())] for _ in range(REQUESTS)]
    params = [SamplingParams(temperature=0.6, max_tokens=draw(), seed=i, ignore_eos=True) for i in range(REQUESTS)]
    tokens = sum(p.max_tokens for p in params)

    def seconds(llm: LLM) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        llm.generate(prompts, params)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    pages = REQUESTS * 2048 // 16
    settings = {"max_num_seqs": REQUESTS, "max_num_batched_tokens": 16384, "page_size": 16, "num_pages": pages}
    engines = {on: LLM(model, prefix_caching=False, cuda_graphs=on, **settings) for on in (True, False)}
    engines[True].generate(prompts, params)  # compiles kernels, certifies schedules, captures graphs
    engines[False].generate(prompts[:8], params[:8])
    order = (True, False, *[True] * (ROUNDS - 1))  # eager only once, because it is slow
    measured = [(on, seconds(engines[on])) for on in order]
    taken = {on: statistics.median(s for was, s in measured if was == on) for on in engines}
    for on, value in taken.items():
        print(f"graphs {on}: {tokens / value:,.0f} tokens/s ({tokens} tokens, {value:.2f} s)")
    row = {
        "op": "generate Qwen3-0.6B, 256 requests, 100-1024 in and out",
        "shape": (REQUESTS, tokens),
        "dtype": "bfloat16",
        "ours": "CUDA graphs",
        "baseline": "eager launches",
        "ours_ms": taken[True] * 1e3,
        "baseline_ms": taken[False] * 1e3,
        "ratio": taken[False] / taken[True],
        "tokens_per_s": tokens / taken[True],
        "rounds": ROUNDS,
        "rounds of the baseline": 1,
    }
    print(f"wrote {write_result('bench_engine', [row])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
