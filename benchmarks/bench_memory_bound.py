"""Memory-bound ops against the roofline of their bytes, a copy of as many bytes, and torch (compiled where possible).

The roofline counts what an op reads and writes once, at the measured 4.3 TB/s of an H200; a backward reads its inputs
again. Short passes cannot reach it because a launch takes time, so each line also has torch's `copy_` of as many bytes,
one per pass, alternating with ours. "loses to" names what was faster. For the "after copy" columns a copy evicted the
cache instead of a write (`timing.interleaved`). Compiling takes seconds per shape, so torch runs one of four shapes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from figures import SHARE
from results_io import add_device, write_result
from timing import compare, interleaved, rows, share_of_roofline

from rlkernel import ops
from rlkernel.kernels import stock

TOKENS, HIDDEN = (8192, 16384), (1024, 4096)
VOCABULARY = 151936
LOSS_TOKENS = (8192, 16384, 1 << 20, 1 << 24, 1 << 26)
"""A loss over 8192 tokens moves 160 kB and is launch-bound; the long ones show the kernel's own speed."""
LOSS_LENGTHS, LONG_LOSSES = (1024, 4096), 1 << 24
"""Sequence lengths, and the number of tokens from which losses are measured with both lengths."""


@dataclass
class Case:
    """One line: our call, a baseline and its name, and the bytes that each pass must move."""

    op: str
    shape: tuple[int, ...]
    ours: Callable[[], object]
    baseline: Callable[[], object]
    baseline_name: str
    moved: tuple[float, ...]  # of each pass
    dtype: torch.dtype | None = None  # the maker's
    against_floor: bool = False
    """Whether torch is left out, so that only the roofline and a copy are compared."""


class Maker:
    """Random inputs and callables on one device."""

    def __init__(self, cuda: bool, compiled: bool):
        self.device, self.dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
        self.size = self.dtype.itemsize
        self.compile = torch.compile if cuda and compiled else None
        self.name = "torch.compile" if self.compile else "torch"

    def leaf(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=self.device) * scale).to(self.dtype).requires_grad_()

    def ids(self, high: int, n: int) -> Tensor:
        return torch.randint(0, high, (n,), device=self.device)

    def baseline(self, fn: Callable[..., object]) -> Callable[..., object]:
        return self.compile(fn, dynamic=False) if self.compile else fn


def with_backward(fn: Callable[..., object], *leaves: Tensor) -> Callable[[], object]:
    """Forward and backward with a random upstream gradient for each result. The op's inputs are results of another op,
    as in a model, and not leaves."""
    upstream: list[Tensor] = []
    inputs = [leaf.clone() for leaf in leaves]

    def run() -> object:
        found = fn(*inputs)
        outs = list(found) if isinstance(found, tuple) else [found]
        if not upstream:
            upstream.extend(torch.randn_like(out) for out in outs)
        return torch.autograd.grad(outs, inputs, upstream)

    return run


def both(
    op: str, shape: tuple[int, ...], make: Maker, ours: Callable[..., object], plain: Callable[..., object],
    leaves: tuple[Tensor, ...], forward: float, backward: float,
) -> Iterator[Case]:  # fmt: skip
    """The forward alone, then forward and backward, of an op of `leaves`."""
    fixed = tuple(leaf.detach() for leaf in leaves)
    baseline = make.baseline(plain)
    yield Case(op, shape, lambda: ours(*fixed), lambda: baseline(*fixed), make.name, (forward,))
    yield Case(
        f"{op} fwd+bwd", shape, with_backward(ours, *leaves), with_backward(baseline, *leaves), make.name,
        (forward, backward),
    )  # fmt: skip


def logprob(make: Maker, t: int, v: int) -> Iterator[Case]:
    logits, targets = make.leaf(t, v), make.ids(v, t)
    pass_ = t * v * make.size
    ours = lambda z: ops.logprob(z, targets).logp
    plain = lambda z: torch.log_softmax(z.float(), -1).gather(1, targets[:, None])[:, 0]
    yield from both("logprob", (t, v), make, ours, plain, (logits,), pass_, 2 * pass_)


def of_tokens(make: Maker, t: int, c: int) -> Iterator[Case]:
    """rms_norm, swiglu, rope and embedding of Qwen3 0.6B (C = 1024) or 8B (C = 4096)."""
    row = t * c * make.size
    x, residual, weight = make.leaf(t, c), make.leaf(t, c), make.leaf(c)
    yield from both(
        "rms_norm", (t, c), make, lambda x, w: ops.rms_norm(x, w, 1e-6), lambda x, w: stock.rms_norm(x, w, 1e-6),
        (x, weight), 2 * row, 3 * row,
    )  # fmt: skip
    yield from both(
        "rms_norm + residual", (t, c), make, lambda x, r, w: ops.rms_norm(x, w, 1e-6, r),
        lambda x, r, w: stock.add_rms_norm(x, r, w, 1e-6), (x, residual, weight), 4 * row, 4 * row,
    )  # fmt: skip
    f = 3 * c
    gate_up = make.leaf(t, 2 * f)
    yield from both("swiglu", (t, f), make, ops.swiglu, stock.swiglu, (gate_up,), 9 * row, 15 * row)
    del gate_up
    h, hk, d = c // 128 if c == 4096 else c // 64, max(1, min(8, c // 32)), min(128, c // 4)
    q, k = make.leaf(t, h, d), make.leaf(t, hk, d)
    positions, table = torch.arange(t, device=make.device), torch.randn(t, d, device=make.device)
    heads = 2 * t * (h + hk) * d * make.size + t * (4 * d + 8)
    yield from both(
        "rope", (t, h + hk, d), make, lambda q, k: ops.rope(q, k, positions, table),
        lambda q, k: stock.rope(q, k, positions, table), (q, k), heads, heads,
    )  # fmt: skip
    yield from embedding(make, t, c)


def embedding(make: Maker, t: int, c: int) -> Iterator[Case]:
    """Backward onto an fp32 main_grad; torch's equivalent is index_add_, which uses atomics."""
    v = VOCABULARY if make.device == "cuda" else 1024
    row = t * c * make.size
    weight, ids = make.leaf(v, c, scale=0.02), make.ids(v, t)
    weight.main_grad = torch.zeros(v, c, device=make.device)  # type: ignore[attr-defined]
    fixed, upstream = weight.detach(), make.leaf(t, c).detach()
    touched = int(ids.unique().numel()) * c * 8
    baseline = lambda: torch.nn.functional.embedding(ids, fixed)
    yield Case("embedding", (t, c, v), lambda: ops.embedding(ids, fixed), baseline, "torch", (2 * row,))

    def ours() -> None:
        ops.embedding(ids, weight).backward(upstream)  # autograd.grad would also allocate a gradient

    def atomics() -> None:
        baseline()
        weight.main_grad.index_add_(0, ids, upstream.float())  # type: ignore[attr-defined]

    yield Case("embedding fwd+bwd", (t, c, v), ours, atomics, "torch, index_add_",
               (2 * row, row + touched))  # fmt: skip


def policy_loss(make: Maker, t: int, length: int) -> Iterator[Case]:
    """GRPO with old log-probabilities, a mask and sequences of `length` tokens; the loss and its gradient."""
    b = max(1, t // length)
    cu = torch.linspace(0, t, b + 1, device=make.device).to(torch.int32)
    old = torch.randn(t, device=make.device)
    logp = (old + 0.1 * torch.randn(t, device=make.device)).requires_grad_()
    advantages, mask = torch.randn(b, device=make.device), torch.rand(t, device=make.device) < 0.8
    one = torch.ones((), device=make.device)
    owner = torch.repeat_interleave(torch.arange(b, device=make.device), cu.diff().long(), output_size=t)

    def plain(logp: Tensor) -> Tensor:
        """The loss without statistics, as in a plain trainer."""
        ratio, a = torch.exp(logp - old), advantages[owner]
        loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) * mask
        return (loss.view(b, -1).sum(1) / mask.view(b, -1).sum(1).clamp(min=1)).mean()

    baseline = make.baseline(plain)
    ours = lambda: torch.autograd.grad(ops.policy_loss(logp, old, advantages, cu, mask=mask).loss, [logp], one)
    theirs = lambda: torch.autograd.grad(baseline(logp), [logp], one)
    name = "policy_loss fwd+bwd" if length == LOSS_LENGTHS[0] else f"policy_loss of {length} each fwd+bwd"
    yield Case(name, (t,), ours, theirs, f"{make.name}, no statistics",
               (t * (4 + 4 + 1 + 4),), torch.float32)  # fmt: skip


def optimizer(make: Maker) -> Iterator[Case]:
    """AdamW and the gradient norm over the tensors of Qwen3-0.6B: bf16 parameters, fp32 masters, moments, gradients."""
    cuda = make.device == "cuda"
    layers, scale = (28, 1) if cuda else (1, 16)
    layer = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (1024,), (1024,), (128,), (128,))
    shapes = [(VOCABULARY // scale, 1024 // scale), *(tuple(n // scale for n in shape) for shape in layer * layers)]
    fp32 = lambda fill: [fill(*shape, device=make.device) for shape in shapes]
    masters, grads, exp_avgs, exp_avg_sqs = fp32(torch.randn), fp32(torch.randn), fp32(torch.zeros), fp32(torch.zeros)
    params = [m.bfloat16() for m in masters]
    n = sum(m.numel() for m in masters)

    def ours() -> None:
        ops.adamw_(params, grads, exp_avgs, exp_avg_sqs, masters=masters, lr=1e-6, step=2)

    theirs = [m.clone().requires_grad_() for m in masters]
    for parameter, grad in zip(theirs, grads, strict=True):
        parameter.grad = grad
    fused = torch.optim.AdamW(theirs, lr=1e-6, fused=True)

    def baseline() -> None:
        fused.step()
        torch._foreach_copy_(params, [p.detach() for p in theirs])

    yield Case("adamw", (n,), ours, baseline, "torch AdamW, fused", (n * (3 * 8 + 4 + 2),), torch.float32)
    norm = lambda: torch.nn.utils.get_total_norm(grads)
    yield Case(
        "grad_norm",
        (n,),
        lambda: ops.grad_norm(grads, max_norm=1.0),
        norm,
        "torch get_total_norm",
        (n * 4,),
        torch.float32,
    )


def copying(moved: tuple[float, ...], device: str) -> Callable[[], object]:
    """Copies that read and write as many bytes as each pass, without allocation."""
    halves = [int(size) // 8 for size in moved]  # of fp32 elements
    source, target = torch.randn(max(halves), device=device), torch.empty(max(halves), device=device)
    pairs = [(target[:n], source[:n]) for n in halves]

    def run() -> None:
        for to, given in pairs:
            to.copy_(given)

    return run


def against_copy(line: dict[str, Any], copy_ms: float | None) -> dict[str, Any]:
    """The line, with the copy's share of the roofline, whether SHARE is reached, and what is faster."""
    ours, share = line["ours_ms"], line["share_of_roofline"]
    faster = [
        name for name, ms in ((line["baseline"], line["baseline_ms"]), ("copy", copy_ms)) if ms and ours and ms < ours
    ]
    copied = share * ours / copy_ms if copy_ms and ours and share else None
    reaches = "yes" if share and share >= SHARE else "no, nor does a copy" if copied and copied < SHARE else "no"
    return {
        **line,
        "copy_ms": copy_ms,
        "copy_share_of_roofline": copied,
        f"reaches_{SHARE}": reaches if share else "",
        "loses_to": ", ".join(faster),
    }


def after_copy(ms: float, copy_ms: float, moved: float) -> dict[str, Any]:
    """Fields for the times of ours and the copy after a copy evicted the cache."""
    return {
        "ms_after_copy": ms,
        "copy_ms_after_copy": copy_ms,
        "share_after_copy": share_of_roofline(ms, 0, moved),
        "copy_share_after_copy": share_of_roofline(copy_ms, 0, moved),
    }


def cases(make: Maker) -> Iterator[Case]:
    """Every case; tensors are freed after their case was measured."""
    cuda = make.device == "cuda"
    yield from logprob(make, *((4096, VOCABULARY) if cuda else (64, 1024)))
    for t in TOKENS if cuda else (64, 128):
        for c in HIDDEN if cuda else (64,):
            for case in of_tokens(make, t, c):
                yield replace(case, against_floor=cuda and (t, c) != (TOKENS[0], HIDDEN[-1]))
    for t in LOSS_TOKENS if cuda else (2048,):
        for length in LOSS_LENGTHS if t >= LONG_LOSSES else LOSS_LENGTHS[:1]:
            for case in policy_loss(make, t, length):
                yield replace(case, against_floor=cuda and t != LONG_LOSSES)
    yield from optimizer(make)


def main() -> None:
    """Prints one line per case and writes `bench_memory_bound.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_device(parser)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--eager", action="store_true", help="plain torch as the baseline, without torch.compile")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    torch.manual_seed(0)
    make = Maker(cuda, compiled=not args.eager)
    lines = []
    for case in cases(make):
        candidates = {"rlkernel": case.ours, "copy": copying(case.moved, make.device)}
        if not case.against_floor:
            candidates[case.baseline_name] = case.baseline
        found = compare(candidates, cuda, args.rounds)
        name = "" if case.against_floor else case.baseline_name
        (line,) = rows(
            case.op, case.shape, case.dtype or make.dtype, found, [("rlkernel", name)], moved=sum(case.moved)
        )
        again = interleaved([case.ours, candidates["copy"]], cuda, args.rounds, by_copy=True)
        lines.append({**against_copy(line, found["copy"].ms), **after_copy(*again, sum(case.moved))})
        print(
            f"{'':34} a copy takes {lines[-1]['copy_ms']:.4f} ms; loses to: {lines[-1]['loses_to'] or 'nothing'}; "
            f"after a copy {again[0]:.4f} ms, share {lines[-1]['share_after_copy'] or 0:.3f}, a copy {again[1]:.4f} ms"
        )
    print(f"wrote {write_result('bench_memory_bound', lines)}")


if __name__ == "__main__":
    main()
