"""Linear with its weight gradient, and sampling, against plain torch; sampling also against vLLM's samplers.

`python benchmarks/bench_ops.py` uses the GPU (bf16) if there is one, otherwise the CPU (fp32, smaller shapes). A ratio
above 1 means rlkernel is faster.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from baselines import MISSING, samplers
from results_io import add_device, write_result
from timing import compare, rows

from rlkernel import ops


@dataclass
class Case:
    """`fn` runs the op through `rlkernel.ops`; one baseline is `fn` under `ops.stock()`, others are named."""

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fn: Callable[[], object]
    flops: float
    moved: float
    others: dict[str, Callable[[], object]] = field(default_factory=dict)


def linears(device: str, dtype: torch.dtype, small: bool) -> Iterator[Case]:
    """Forward, input gradient and weight gradient of Qwen3-0.6B's layers over 8192 tokens."""
    m, c, h, f = (512, 256, 512, 768) if small else (8192, 1024, 4096, 3072)
    for name, n, k in (("qkv", h, c), ("gate_up", 2 * f, c), ("down", c, f)):
        x, w = (torch.randn(*shape, device=device).to(dtype).requires_grad_() for shape in ((m, k), (n, k)))
        dy = torch.randn(m, n, device=device).to(dtype)

        def run(x: Tensor = x, w: Tensor = w, dy: Tensor = dy) -> object:
            return torch.autograd.grad(ops.linear(x, w), [x, w], dy)

        yield Case(
            f"linear {name} fwd+bwd", (m, n, k), dtype, run, 6 * m * n * k, 3 * (m * k + n * k + m * n) * w.itemsize
        )


def samples(device: str, small: bool) -> Iterator[Case]:
    """One token for each row of fp32 logits: unfiltered, and with top-k, top-p and min-p."""
    v = 8192 if small else 151936
    settings = {"": {}, ", top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95}, ", top-p 0.95": {"top_p": 0.95}}
    settings[", filtered"] = {"top_k": 50, "top_p": 0.9, "min_p": 0.01}
    for b in (16,) if small else (32, 64, 128, 256):
        logits, seeds = torch.randn(b, v, device=device), torch.ones(b, device=device, dtype=torch.int64)
        column = lambda value, b=b: torch.full((b,), value, device=device)
        for name, values in settings.items():
            options = {key: column(value) for key, value in values.items()}
            if "top_k" in options:
                options["top_k"] = options["top_k"].int()
            temperature = column(0.8)
            run = lambda logits=logits, seeds=seeds, temperature=temperature, options=options: ops.sample(
                logits, seeds, seeds, temperature=temperature, **options
            )
            given = (logits, temperature, options.get("top_k"), options.get("top_p"))
            others = {
                other: lambda sampler=sampler, given=given: sampler(*given)
                for other, sampler in samplers().items()
                if "min_p" not in options and (options or not other.startswith("FlashInfer"))
            }
            yield Case(f"sample{name}", (b, v), torch.float32, run, 0, b * v * 4, others)


def main() -> None:
    """Prints one line per case and writes `bench_ops.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_device(parser)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    cuda = args.device == "cuda"
    torch.manual_seed(0)
    lines = []
    for case in (
        *linears(args.device, torch.bfloat16 if cuda else torch.float32, not cuda),
        *samples(args.device, not cuda),
    ):

        def stock(case: Case = case) -> object:
            with ops.stock():
                return case.fn()

        baselines = {"torch": stock, **case.others}
        found = compare({"rlkernel": case.fn, **baselines}, cuda, args.rounds)
        pairs = [("rlkernel", name) for name in baselines]
        lines += rows(case.op, case.shape, case.dtype, found, pairs, case.flops, case.moved)
    print(f"wrote {write_result('bench_ops', lines, notes=MISSING)}")


if __name__ == "__main__":
    main()
