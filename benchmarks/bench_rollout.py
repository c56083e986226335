"""Rollout of Qwen3-0.6B's shape with random weights: throughput, and milliseconds per decode step; needs a GPU.

`python benchmarks/bench_rollout.py --against DIR` also measures another checkout, in a process of its own, and reports
whether tokens and log-probabilities are equal. Without it the lines have no baseline.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROUNDS = 3
FILTERS = {"top_k": 50, "top_p": 0.95}
FEW = 20  # tokens of the short run, which is subtracted for the time of a step


@dataclass(frozen=True)
class Work:
    """Requests of one prompt length; without tokens, the workload of nano-vllm's benchmark.

    Attributes:
        name: first column of the table.
        prompts: number of requests.
        length, tokens: tokens of a prompt and of a completion.
        by_step: report the time of a decode step instead of the whole.
        options: sampling parameters.
    """

    name: str
    prompts: int
    length: int = 0
    tokens: int = 0
    by_step: bool = True
    options: dict[str, Any] = field(default_factory=dict)


WORKS = (
    Work("256 requests, 100-1024 in and out", 256, by_step=False),
    Work("decode step, 64 sequences of 160-380 keys", 64, 160, 220),
    Work("the same, top-k 50, top-p 0.95", 64, 160, 220, options=FILTERS),
    Work("decode step, 256 sequences of 550-800 keys", 256, 550, 250),
)


def measure() -> dict[str, dict[str, Any]]:
    """Milliseconds, sampled tokens and a digest of the completions of every workload, by the rlkernel on the path."""
    import torch

    from rlkernel.engine import LLM, SamplingParams
    from rlkernel.models import Decoder, preset

    config = replace(preset("qwen3-0.6b"), max_position_embeddings=8192)
    model = Decoder.from_config(config, seed=0).to(device="cuda", dtype=torch.bfloat16)
    llm = LLM(model, max_num_seqs=256, max_num_batched_tokens=16384, page_size=16, num_pages=256 * 128)

    def run(prompts: list[list[int]], params: list[SamplingParams]) -> tuple[float, str]:
        llm.weights_updated()  # no prompt is cached
        torch.cuda.synchronize()
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        torch.cuda.synchronize()
        seconds, digest = time.perf_counter() - start, hashlib.sha256()
        for completion in (c for output in outputs for c in output.outputs):
            digest.update(str(completion.token_ids).encode() + completion.logprobs_tensor.numpy().tobytes())
        return seconds, digest.hexdigest()

    found = {}
    for work in WORKS:
        rng = random.Random(0)
        draw = lambda rng=rng: rng.randint(100, 1024)
        ids = lambda n, rng=rng: [rng.randrange(config.vocab_size) for _ in range(n)]
        prompts = [ids(work.length or draw()) for _ in range(work.prompts)]
        lengths = [work.tokens or draw() for _ in range(work.prompts)]
        given = {"temperature": 0.6, "ignore_eos": True, **work.options}
        of = lambda lengths, given=given: [SamplingParams(max_tokens=n, seed=i, **given) for i, n in enumerate(lengths)]
        for _ in range(2):  # compiles, certifies, captures
            run(prompts, of(lengths))
        runs = [run(prompts, of(lengths)) for _ in range(ROUNDS)]
        ms = statistics.median(seconds for seconds, _ in runs) * 1e3
        if work.by_step:
            few = [FEW] * work.prompts
            short = statistics.median([run(prompts, of(few))[0] for _ in range(ROUNDS + 2)][2:])
            ms = (ms - short * 1e3) / (work.tokens - FEW)
        found[work.name] = {"ms": ms, "tokens": sum(lengths), "digest": runs[0][1]}
    return found


def measure_in_process(tree: Path) -> dict[str, dict[str, Any]]:
    """`measure` with the rlkernel of another checkout."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, str(Path(__file__).resolve()), "--measure", str(out)]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, cwd=tree, check=True)
        found: dict[str, dict[str, Any]] = json.loads(out.read_text())
        return found


def main() -> int:
    """Prints one line per workload and writes `bench_rollout.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="another checkout of rlkernel")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        args.measure.write_text(json.dumps(measure()))
        return 0
    import torch

    if not torch.cuda.is_available():
        print("bench_rollout: torch sees no CUDA GPU; nothing is measured")
        return 0
    sys.path[:0] = [str(HERE.parent), str(HERE)]
    from results_io import commit, write_result

    ours = measure_in_process(HERE.parent)
    base = {} if args.against is None else measure_in_process(args.against.resolve())
    lines = []
    for work in WORKS:
        a, b = ours[work.name], base.get(work.name)
        line = {
            "op": work.name, "ours_ms": a["ms"],
            "baseline": b and f"commit {(commit(args.against) or args.against.name)[:7]}",
            "baseline_ms": b and b["ms"], "ratio": b and b["ms"] / a["ms"],
            "tokens_per_s": None if work.by_step else a["tokens"] / a["ms"] * 1e3,
            "same completions": b and a["digest"] == b["digest"],
        }  # fmt: skip
        lines.append(line)
        print(line, flush=True)
    print(f"wrote {write_result('bench_rollout', lines)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
