"""linear_logprob against TRL's chunked log-probability, Liger's fused cross-entropy and logits in memory.

Three published shapes in bf16: forward, forward + backward, prompts (rows without upstream gradient at the start of
sequences of 1024 tokens), the entropy's gradient, kept probabilities. If every row has a gradient, ours passes `rows`,
as the trainers do. Memory counts everything beyond the inputs. TFLOP/s count the three products that any implementation
needs, not the recomputation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import baselines
from baselines import materialised
from results_io import add_device, write_result
from timing import compare, rows

from rlkernel import ops

SHAPES = ((8192, 4096, 151936), (4096, 1024, 151936), (4096, 4096, 128256))  # T, C, V
SMALL = ((96, 64, 1024),)
OURS, MAIN, KEPT = "rlkernel", "rlkernel, main_grad", "rlkernel, keep_probs"
SEQUENCE = 1024
REST = 0.03
"""Pause in seconds before each sample of forward + backward. These products run at the power limit, so without a pause
the previous candidate changes the time by up to a tenth. The table also has lines without the pause."""


class Bench:
    """The inputs of one shape and the result rows of its cases."""

    def __init__(self, shape: tuple[int, int, int], cuda: bool, rounds: int):
        t, c, v = self.shape = shape
        self.cuda, self.rounds, self.lines = cuda, rounds, []  # type: ignore[var-annotated]
        device, self.dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
        leaf = lambda scale, *size: (torch.randn(*size, device=device) * scale).to(self.dtype).requires_grad_()
        self.hidden, self.weight = leaf(1.0, t, c), leaf(0.02, v, c)
        self.into_main = self.weight.detach().requires_grad_()
        self.into_main.main_grad = torch.zeros(v, c, device=device)  # type: ignore[attr-defined]
        self.targets = torch.randint(0, v, (t,), device=device)
        self.upstream = torch.randn(t, device=device)
        self.every = torch.arange(t, device=device)
        self.place = (torch.arange(t, device=device) % SEQUENCE) / min(t, SEQUENCE)
        self.random = torch.rand(t, device=device)
        self.trl, self.liger, self.liger_mean = baselines.trl(), baselines.liger("none"), baselines.liger("mean")

    def add(self, op: str, candidates: dict[str, Callable[[], object]], products: float, rest: float = 0.0) -> None:
        """Times the candidates; adds one row per baseline, and one row against TRL for each further variant of ours."""
        t, c, v = self.shape
        found = compare(candidates, self.cuda, self.rounds, rest)
        ours = [name for name in found if name.startswith(OURS)]
        others = [name for name in found if name not in ours]
        pairs = [(OURS, name) for name in others] + [(name, others[0]) for name in ours[1:]]
        pairs += [(KEPT, name) for name in others if name.startswith("three") and KEPT in ours]
        moved = ((1 + products) * t * c + products * v * c) * self.dtype.itemsize
        self.lines += rows(op, self.shape, self.dtype, found, pairs, products * 2 * t * c * v, moved)

    def given(self, upstream: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, targets and upstream gradient of all rows, or of the rows `kept` [N] int64."""
        of = (lambda x: x) if kept is None else (lambda x: x.index_select(0, kept))
        return of(self.hidden), of(self.targets), of(upstream)

    def ours(
        self, upstream: Tensor, weight: Tensor, entropy: bool = False, kept: Tensor | None = None, **options: Any
    ) -> Callable[[], object]:
        def run() -> object:
            targets, grad = (self.targets, upstream) if kept is None else (self.targets[kept], upstream[kept])
            scored = ops.linear_logprob(self.hidden, weight, targets, rows=kept, **options)
            outputs, grads = ([scored.logp, scored.entropy], [grad] * 2) if entropy else ([scored.logp], [grad])
            if weight is not self.into_main:
                return torch.autograd.grad(outputs, [self.hidden, weight], grads)
            torch.autograd.backward(outputs, grads)  # autograd.grad would allocate a gradient next to main_grad
            found, self.hidden.grad = self.hidden.grad, None
            return found

        return run

    def ways(
        self, upstream: Tensor, entropy: bool = False, kept: Tensor | None = None
    ) -> dict[str, Callable[[], object]]:
        """Our variants of forward and backward."""
        found = {
            OURS: self.ours(upstream, self.weight, entropy, kept),
            MAIN: self.ours(upstream, self.into_main, entropy, kept),
        }
        if not entropy:  # the entropy's gradient recomputes the logits
            found[KEPT] = self.ours(upstream, self.weight, kept=kept, keep_probs=True)
        return found

    def chunked(self, upstream: Tensor, kept: Tensor | None = None, entropy: bool = False) -> Callable[[], object]:
        """TRL's forward and backward over all rows, or only over the `kept` ones, as its trainer calls it."""
        assert self.trl is not None
        logprob = self.trl[1]

        def run() -> object:
            hidden, targets, grad = self.given(upstream, kept)
            logp, h = logprob(hidden, self.weight, targets)
            outputs, grads = ([logp, h], [grad] * 2) if entropy else ([logp], [grad])
            return torch.autograd.grad(outputs, [self.hidden, self.weight], grads)

        return run

    def grad_of(
        self, loss: Callable[..., Tensor], upstream: Tensor, kept: Tensor | None = None
    ) -> Callable[[], object]:
        """Forward and backward of a baseline with one result."""

        def run() -> object:
            hidden, targets, grad = self.given(upstream, kept)
            return torch.autograd.grad(loss(hidden, self.weight, targets), [self.hidden, self.weight], grad)

        return run

    def forward(self) -> None:
        h, w, y = self.hidden.detach(), self.weight.detach(), self.targets
        candidates: dict[str, Callable[[], object]] = {OURS: lambda: ops.linear_logprob(h, w, y).logp}
        for found in (self.trl, self.liger):
            if found:
                candidates[found[0]] = lambda fn=found[1]: fn(h, w, y)
        candidates["torch, logits in memory"] = lambda: materialised(h, w, y)
        candidates["torch, GEMM alone"] = lambda: h @ w.T
        self.add("linear_logprob", candidates, 1)

    def backward(self) -> None:
        candidates = self.ways(self.upstream, kept=self.every)
        if self.trl:
            candidates[self.trl[0]] = self.chunked(self.upstream)
        if self.liger:
            candidates[self.liger[0]] = self.grad_of(self.liger[1], self.upstream)
        if self.liger_mean:
            one = torch.ones((), device=self.hidden.device)
            candidates[self.liger_mean[0]] = self.grad_of(self.liger_mean[1], one)
        candidates["torch, logits in memory"] = self.grad_of(materialised, self.upstream)
        h, w = self.hidden.detach(), self.weight.detach()

        def three() -> object:
            z = h @ w.T
            return z @ w, z.T @ h

        candidates["three GEMMs of torch"] = three
        self.add("linear_logprob fwd+bwd", candidates, 3, REST)
        self.add("linear_logprob fwd+bwd, without rest", candidates, 3)

    def prompts(self, share: float, scattered: bool = False) -> None:
        """A share of the rows has no upstream gradient: the first ones of each sequence, or `scattered` ones.

        Measured over all rows and without these rows, as TRL's trainer and rlkernel's transformers backend call it.
        """
        upstream = torch.where((self.random if scattered else self.place) >= share, self.upstream, 0.0)
        kept = upstream.nonzero().squeeze(1)  # not in the timed call, because it synchronises
        candidates = self.ways(upstream)
        if self.trl:
            candidates[self.trl[0]] = self.chunked(upstream)
            candidates[f"{self.trl[0]}, rows left out"] = self.chunked(upstream, kept)
        candidates["torch, logits in memory"] = self.grad_of(materialised, upstream)
        what = "rows without gradient" if scattered else "prompts"
        name = f"linear_logprob fwd+bwd, {share:.0%} {what}"
        self.add(name, candidates, 1 + 2 * (1 - share))
        candidates = {
            OURS: self.ours(upstream, self.weight, kept=kept),
            MAIN: self.ours(upstream, self.into_main, kept=kept),
            "torch, logits in memory": self.grad_of(materialised, upstream, kept),
        }
        if self.trl:
            candidates = {self.trl[0]: self.chunked(upstream, kept), **candidates}
        self.add(f"{name}, rows left out", candidates, 3 * len(kept) / len(upstream))

    def entropy(self) -> None:
        candidates = self.ways(self.upstream, entropy=True, kept=self.every)
        if self.trl:
            candidates[self.trl[0]] = self.chunked(self.upstream, entropy=True)
        stock = self.ours(self.upstream, self.weight, entropy=True)

        def in_memory() -> object:
            with ops.stock():
                return stock()

        candidates["torch, logits in memory"] = in_memory
        self.add("linear_logprob fwd+bwd, entropy gradient", candidates, 3)


def main() -> None:
    """Prints one line per pair and writes `bench_linear_logprob.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_device(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", type=int, nargs="*", help="indices into the three shapes; all by default")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    torch.manual_seed(0)
    lines = []
    shapes = SHAPES if cuda else SMALL
    for shape in [shapes[i] for i in args.shapes] if args.shapes else shapes:
        bench = Bench(shape, cuda, args.rounds)
        bench.forward()
        bench.backward()
        bench.prompts(0.5)
        bench.prompts(0.9)
        bench.prompts(0.5, scattered=True)
        bench.prompts(0.8, scattered=True)  # as in a loss over high-entropy tokens only
        bench.entropy()
        lines += bench.lines
        del bench
    print(f"wrote {write_result('bench_linear_logprob', lines, notes=baselines.MISSING)}")


if __name__ == "__main__":
    main()
