"""How time and memory grow with tokens T, vocabulary V and group size G, against TRL, Liger and logits in memory.

One axis at a time around Qwen3-0.6B (C = 1024, V = 151936): linear_logprob, forward + backward; for groups also
policy_loss over the G completions, and group_advantages. Candidates that run out of memory have a note instead of a
time. Three rounds, and one from 65536 tokens, so that the script takes about a minute on an H200.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import baselines
from baselines import materialised
from results_io import add_device, write_result
from timing import compare, rows

from rlkernel import ops

C, V, T = 1024, 151936, 8192
TOKENS = (300, 1024, 2066, 4096, 4300, 16384, 65536, 262144)
VOCABULARIES = (32768, 65536, 131072, 262144)
GROUPS = (8, 32, 128, 512, 1024)
COMPLETION = 128
"""Tokens per completion."""

LONG = 6 * 65536 * C * V
"""Products of this size take so long that one round suffices."""

Candidates = dict[str, Callable[[], object]]


class Inputs:
    """Hidden states, head, targets and upstream gradients of T tokens."""

    def __init__(self, t: int, c: int, v: int, cuda: bool):
        self.cuda, self.shape = cuda, (t, c, v)
        self.device, self.dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
        self.hidden = torch.randn(t, c, device=self.device, dtype=self.dtype).requires_grad_()
        self.weight = (torch.randn(v, c, device=self.device, dtype=self.dtype) * 0.02).requires_grad_()
        self.targets = torch.randint(0, v, (t,), device=self.device)
        self.upstream = torch.randn(t, device=self.device)

    def logp(self) -> dict[str, Callable[[], Tensor]]:
        """Every implementation of the log-probabilities (Liger's has the opposite sign)."""
        args = self.hidden, self.weight, self.targets
        found: dict[str, Callable[[], Tensor]] = {"rlkernel": lambda: ops.linear_logprob(*args).logp}
        trl, liger = baselines.trl(), baselines.liger("none")
        if trl:
            found[trl[0]] = lambda: trl[1](*args)[0]
        if liger:
            found[liger[0]] = lambda: liger[1](*args)
        return {**found, "torch, logits in memory": lambda: materialised(*args)}

    def grads(self, outputs: Tensor, upstream: Tensor) -> object:
        return torch.autograd.grad(outputs, [self.hidden, self.weight], upstream)


def linear_logprob(x: Inputs) -> Candidates:
    """Forward and backward of every implementation."""
    return {name: lambda fn=fn: x.grads(fn(), x.upstream) for name, fn in x.logp().items()}  # type: ignore[misc]


def group_step(x: Inputs, group: int) -> Candidates:
    """Advantages of one group, log-probabilities of its completions, the GRPO loss and its gradients."""
    rewards = torch.rand(group, device=x.device)
    cu = torch.arange(group + 1, device=x.device, dtype=torch.int32) * COMPLETION
    old = torch.randn(group * COMPLETION, device=x.device) - 12.0
    one = torch.ones((), device=x.device)

    def ours(logp: Tensor) -> Tensor:
        return ops.policy_loss(logp, old, ops.group_advantages(rewards, group), cu).loss

    def plain(logp: Tensor) -> Tensor:
        a = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).repeat_interleave(COMPLETION)
        ratio = torch.exp(logp - old)
        loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
        return loss.view(group, COMPLETION).mean(1).mean()

    def step(name: str, fn: Callable[[], Tensor]) -> Callable[[], object]:
        if name == "rlkernel":
            return lambda: x.grads(ours(fn()), one)
        sign = -1.0 if name.startswith("Liger") else 1.0
        return lambda: x.grads(plain(sign * fn()), one)

    return {name: step(name, fn) for name, fn in x.logp().items()}


def advantages(group: int, cuda: bool) -> Candidates:
    """group_advantages of 1024 prompts, and the same in torch."""
    rewards = torch.rand(1024 * group, device="cuda" if cuda else "cpu")

    def plain() -> Tensor:
        r = rewards.view(-1, group)
        return ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).view(-1)

    return {"rlkernel": lambda: ops.group_advantages(rewards, group), "torch": plain}


def sweeps(cuda: bool) -> Iterator[tuple[str, tuple[int, ...], Candidates, torch.dtype, float, float]]:
    """(op, shape, candidates, dtype, flops, bytes) of every point."""
    scale = 1 if cuda else 64
    c, v, t = C // scale, V // scale, T // scale

    def point(op: str, x: Inputs, candidates: Candidates, head: tuple[int, ...] = ()) -> tuple:
        n, c, v = x.shape
        moved = (4 * n * c + 3 * v * c) * x.dtype.itemsize
        return op, (*head, *x.shape), candidates, x.dtype, 6 * n * c * v, moved

    for n in TOKENS:
        x = Inputs(n // scale, c, v, cuda)
        yield point("T: linear_logprob fwd+bwd", x, linear_logprob(x))
    for n in VOCABULARIES:
        x = Inputs(t, c, n // scale, cuda)
        yield point("V: linear_logprob fwd+bwd", x, linear_logprob(x))
    for group in GROUPS if cuda else GROUPS[:2]:
        x = Inputs(group * COMPLETION, c, v, cuda)
        yield point("G: GRPO step of one group", x, group_step(x, group), (group,))
    for group in GROUPS:
        yield "G: group_advantages, 1024 prompts", (group,), advantages(group, cuda), torch.float32, 0, 8192 * group


def main() -> None:
    """Prints one line per pair and writes `bench_scaling.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_device(parser)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    cuda = args.device == "cuda"
    torch.manual_seed(0)
    lines, begin = [], time.perf_counter()
    for op, shape, candidates, dtype, flops, moved in sweeps(cuda):
        found = compare(candidates, cuda, 1 if flops >= LONG else args.rounds)
        lines += rows(op, shape, dtype, found, [("rlkernel", name) for name in list(found)[1:]], flops, moved)
    print(f"{time.perf_counter() - begin:.0f} s")
    print(f"wrote {write_result('bench_scaling', lines, notes=baselines.MISSING)}")


if __name__ == "__main__":
    main()
