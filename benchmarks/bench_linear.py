"""linear and its gradients against torch's default cuBLAS: 9 Qwen3 weights x 6 row counts, interleaved.

"linear_between" is the forward at intermediate row counts, which occur while a decoding batch shrinks. Each side is one
CUDA graph, so that launch times do not count at decode sizes. On a CPU the weights are small and nothing is captured. A
ratio above 1 means rlkernel is faster; the last rows are geometric means and minima.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from results_io import add_device, write_result
from timing import interleaved, share_of_roofline

from rlkernel import ops
from rlkernel.kernels import select

ROWS = (1, 16, 64, 256, 2048, 8192)
BETWEEN = (8, 24, 48, 96, 136, 176, 224)
WGRAD_ROWS = (2048, 8192)
WEIGHTS = (
    ("0.6B qkv", 4096, 1024),
    ("0.6B o", 1024, 2048),
    ("0.6B gate_up", 6144, 1024),
    ("0.6B down", 1024, 3072),
    ("0.6B head", 151936, 1024),
    ("8B qkv", 6144, 4096),
    ("8B o", 4096, 4096),
    ("8B gate_up", 24576, 4096),
    ("8B down", 4096, 12288),
)  # name, N, K


def graph(fn: Callable[[], Tensor]) -> Callable[[], object]:
    """fn as a CUDA graph, captured after warm-up calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            fn()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        fn()
    return captured.replay


def measure(op: str, name: str, m: int, n: int, k: int, dtype: torch.dtype, cuda: bool, rounds: int) -> dict[str, Any]:
    """One line of the table; op is "linear" ([M,K] x [N,K]), "linear_dgrad" ([M,N] x [N,K]) or "linear_wgrad", the
    weight gradient in the weight's dtype ([M,N] x [M,K])."""
    device = "cuda" if cuda else "cpu"
    w = (torch.randn(n, k, device=device) * 0.02).to(dtype)
    if op == "linear":
        x = torch.randn(m, k, device=device).to(dtype)
        arguments: tuple[Any, ...] = (x, w, None, 1, 1, None)
        ours, baseline = lambda: ops.linear(x, w), lambda: torch.nn.functional.linear(x, w)
    else:
        dy = torch.randn(m, n, device=device).to(dtype)
        arguments = (dy, w, 1)
        ours, baseline = lambda: torch.ops.rlkernel.linear_dgrad(dy, w, 1), lambda: dy @ w
    if op == "linear_wgrad":
        x = torch.randn(m, k, device=device).to(dtype)
        arguments = (torch.empty_like(w), dy, x, True)
        ours, baseline = lambda: torch.ops.rlkernel.linear_wgrad(dy, x), lambda: dy.t() @ x
    ours(), baseline()
    choice = select.choose(op, device)
    schedule = choice.implementation
    if schedule == "cuda":
        from rlkernel.kernels.cuda import linear

        scheduled = linear.wgrad_chunk if op == "linear_wgrad" else getattr(linear, op)
        schedule = scheduled.chosen(*arguments)
    equal = bool(torch.equal(ours(), baseline()))
    sides = [graph(ours), graph(baseline)] if cuda else [ours, baseline]
    ours_ms, baseline_ms = interleaved(sides, cuda, rounds)
    moved = (m * k + n * k + m * n) * w.element_size()
    return {
        "op": f"{op} {name}",
        "shape": (m, n, k),
        "dtype": str(dtype).removeprefix("torch."),
        "ours": schedule,
        "baseline": "torch",
        "ours_ms": ours_ms,
        "baseline_ms": baseline_ms,
        "ratio": baseline_ms / ours_ms,
        "share_of_roofline": share_of_roofline(ours_ms, 2 * m * n * k, moved),
        "torch has these bits": equal,
    }


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Geometric mean and smallest ratio of each op."""
    lines = []
    for op in dict.fromkeys(row["op"].split()[0] for row in rows):
        ratios = [row["ratio"] for row in rows if row["op"].split()[0] == op]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        lines += [{"op": f"{op}: geometric mean", "ratio": mean}, {"op": f"{op}: smallest", "ratio": min(ratios)}]
    return lines


def main() -> None:
    """Prints one line per case and writes `bench_linear.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_device(parser)
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    cuda = args.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    weights = WEIGHTS if cuda else (("small", 768, 256), ("small down", 256, 768))
    torch.manual_seed(0)
    rows = []
    for name, n, k in weights:
        for m in ROWS if cuda else ROWS[:4]:
            for op in ("linear", "linear_dgrad", "linear_wgrad") if m in WGRAD_ROWS else ("linear", "linear_dgrad"):
                row = measure(op, name, m, n, k, dtype, cuda, args.rounds)
                rows.append(row)
                print(
                    f"{row['op']:26} {row['shape']!s:22} {row['ours']:18} {row['ours_ms']:9.4f} ms  "
                    f"torch {row['baseline_ms']:9.4f} ms  ratio {row['ratio']:.3f}",
                    flush=True,
                )
        for m in BETWEEN if cuda else ():
            row = measure("linear", name, m, n, k, dtype, cuda, args.rounds)
            rows.append({**row, "op": f"linear_between {name}"})
            print(f"{rows[-1]['op']:26} {m} rows: {row['ours']:18} ratio {row['ratio']:.3f}", flush=True)
    means = summary(rows)
    for row in means:
        print(f"{row['op']}: {row['ratio']:.3f}")
    print(f"wrote {write_result('bench_linear', rows + means)}")


if __name__ == "__main__":
    main()
