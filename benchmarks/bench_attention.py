"""attention against FlashAttention-3 (from vLLM) for forward and paged decode, and cuDNN for backward.

Head dim 128, causal, bf16. The columns of a baseline that is not installed stay empty. A ratio above 1 means rlkernel
is faster. "ours" is "certified: NAME" for a schedule or "triton" for the Triton kernel. After a schedule's line comes
the Triton kernel's, timed in the same rounds with all schedules switched off.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from results_io import add_device, write_result
from timing import interleaved, share_of_roofline

from rlkernel import ops
from rlkernel.contract.orders import ATTENTION_SPLIT
from rlkernel.kernels import scheduled_op, select

D = 128
SCALE = D**-0.5
PAGE = 16
PREFILL = ((1, 8192, 16, 8), (8, 2048, 16, 8), (1, 32768, 16, 8))  # sequences, tokens of each, H, HK
DECODE = ((256, 1024, 16, 8), (64, 4096, 32, 8), (4, 32768, 32, 8))  # sequences, keys of each, H, HK
RAGGED = ((16, 16, 8), (64, 16, 8), (256, 16, 8), (64, 32, 8))  # sequences, H, HK
LEAST, MOST = 100, 2048  # keys of a ragged batch's sequences, drawn uniformly
SHARED = ((8, 64, 4096, 512, 16, 8), (8, 8, 4096, 512, 32, 8), (8, 8, 1024, 512, 16, 8), (32, 8, 256, 512, 16, 8),
          (8, 8, 512, 512, 16, 8))  # fmt: skip
"""Prompts, completions of each, keys of a prompt and of a completion, H, HK. The last two save reads of 224
and 112 MiB, above and below the engine's limit."""

Run = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One or two lines of the table. Rates come from `flops`, or for decode from `moved` bytes."""

    op: str
    shape: tuple[int, ...]  # B, T, H, HK, D
    ours: Run
    baseline: Run | None
    baseline_name: str
    flops: float
    moved: float
    ran: str  # implementation of `ours`: "cpu" on a CPU, "triton", "certified: NAME"


def ran(op: str, device: str, call: Callable[[Callable[..., None]], object] | None = None) -> str:
    """The implementation of an op here; `call(long)` calls the Triton launcher with the function for long prefill."""
    implementation = select.choose(op, device).implementation
    if implementation != "cuda" or call is None:
        return implementation
    from rlkernel.kernels.cuda.attention import prefill
    from rlkernel.kernels.verdicts import ANCHOR

    chosen: list[str] = []
    call(lambda *given: chosen.append(prefill.chosen(*given)))
    return f"certified: {chosen[0]}" if chosen and chosen[0] != ANCHOR else "triton"


def flash_attention_3() -> Callable[..., Any] | None:
    """FlashAttention-3's varlen function; None, with a message, if it does not load."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except Exception as e:  # a build for another torch or GPU can raise anything
        print(f"FlashAttention-3 does not load ({type(e).__name__}: {str(e)[:120]}): its columns stay empty")
        return None
    return flash_attn_varlen_func


def schedule_of(
    h: int, hk: int, dtype: torch.dtype, cu: torch.Tensor, lens: torch.Tensor, longest: int
) -> dict[str, Any]:
    """FlashAttention-3's schedule of a decode step, which vLLM computes once for all layers."""
    from vllm.vllm_flash_attn.flash_attn_interface import get_scheduler_metadata

    found = get_scheduler_metadata(
        len(lens), 1, longest, h, hk, D, lens, dtype, cu_seqlens_q=cu, page_size=PAGE, causal=True
    )
    return {"scheduler_metadata": found}


def torch_attention(cuda: bool) -> AbstractContextManager[Any]:
    """cuDNN on CUDA, torch's default on a CPU."""
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if cuda else nullcontext()


def prefill(
    b: int, t: int, h: int, hk: int, dtype: torch.dtype, device: str, fa3: Callable[..., Any] | None
) -> Iterator[Case]:
    """Forward and backward of b sequences of t tokens."""
    cuda = device == "cuda"
    q, k, v = (torch.randn(b * t, n, D, device=device).to(dtype) for n in (h, hk, hk))
    dout = torch.randn_like(q)
    cu = torch.arange(0, b * t + 1, t, device=device, dtype=torch.int32)
    flops, size = 4 * b * t * t * h * D / 2, q.element_size()
    moved = (2 * q.numel() + k.numel() + v.numel()) * size
    shape = (b, t, h, hk, D)

    def common(long: Callable[..., None]) -> object:
        from rlkernel.kernels.triton.attention import attention

        return attention(q, k, v, cu, cu, t, t, SCALE, None, ATTENTION_SPLIT, long=long)

    forward = None
    if fa3 is not None:
        limits = {"max_seqlen_q": t, "max_seqlen_k": t, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
        forward = lambda: fa3(q, k, v, causal=True, fa_version=3, num_splits=1, **limits)
    yield Case(
        "attention forward", shape, lambda: ops.attention(q, k, v, cu, max_seqlen_q=t), forward, "FlashAttention-3",
        flops, moved, ran("attention", device, common),
    )  # fmt: skip
    out, lse = ops.attention(q, k, v, cu, max_seqlen_q=t)
    saved = (dout, q, k, v, out, lse, cu, cu, t, t, SCALE, None)
    # Keys and values are repeated because torch's cuDNN attention has no backward for grouped heads.
    wide = [x.view(b, t, -1, D).transpose(1, 2).repeat_interleave(h // x.shape[1], 1) for x in (q, k, v)]
    leaves = [x.contiguous().requires_grad_() for x in wide]
    with torch_attention(cuda):
        found = F.scaled_dot_product_attention(*leaves, is_causal=True)
    g = dout.view(b, t, h, D).transpose(1, 2).contiguous()
    yield Case(
        "attention backward", shape, lambda: torch.ops.rlkernel.attention_backward(*saved),
        lambda: torch.autograd.grad(found, leaves, g, retain_graph=True), "cuDNN" if cuda else "torch",
        2.5 * flops, 2 * moved, ran("attention_backward", device),
    )  # fmt: skip


def decode(
    op: str, keys: list[int], h: int, hk: int, dtype: torch.dtype, device: str, fa3: Callable[..., Any] | None
) -> Case:
    """One new token for each sequence of as many keys in pages."""
    b, longest = len(keys), max(keys)
    lens = torch.tensor(keys, device=device, dtype=torch.int32)
    needed = (lens + PAGE - 1) // PAGE
    pages = int(needed.sum())
    kc, vc = (torch.randn(pages, PAGE, hk, D, device=device).to(dtype) for _ in range(2))
    table = torch.zeros(b, -(-longest // PAGE), device=device, dtype=torch.int32)
    used = torch.arange(table.shape[1], device=device) < needed[:, None]
    table[used] = torch.randperm(pages, device=device).to(torch.int32)
    q = torch.randn(b, h, D, device=device).to(dtype)
    cu = torch.arange(b + 1, device=device, dtype=torch.int32)
    limits = {"max_seqlen_q": 1, "max_seqlen_k": longest}
    baseline = None
    if fa3 is not None:
        paged = {"cu_seqlens_q": cu, "seqused_k": lens, "block_table": table}
        paged |= schedule_of(h, hk, dtype, cu, lens, longest)
        baseline = lambda: fa3(q, kc, vc, causal=True, fa_version=3, **paged, **limits)
    ours = lambda: ops.paged_attention(q, kc, vc, table, cu, lens, **limits)

    def common(long: Callable[..., None]) -> object:
        from rlkernel.kernels.triton.attention import paged_attention

        return paged_attention(q, kc, vc, table, cu, lens, 1, longest, SCALE, None, ATTENTION_SPLIT, long=long)

    moved = (2 * sum(keys) * hk + 2 * b * h) * D * q.element_size()
    by = ran("paged_attention", device, common)
    return Case(op, (b, longest, h, hk, D), ours, baseline, "FlashAttention-3", 0, moved, by)


def ragged(b: int) -> list[int]:
    """Keys of b sequences."""
    return random.Random(0).choices(range(LEAST, MOST + 1), k=b)


def shared_prefix(
    groups: int, each: int, prefix: int, suffix: int, h: int, hk: int, dtype: torch.dtype, device: str
) -> Case:
    """One new token for `groups` prompts of `prefix` keys with `each` completions of `suffix` keys; against the op
    that reads the prompt once per completion."""
    b, length = groups * each, prefix + suffix
    common, own = groups * prefix // PAGE, b * suffix // PAGE
    kc, vc = (torch.randn(common + own, PAGE, hk, D, device=device).to(dtype) for _ in range(2))
    pages = torch.randperm(common + own, device=device).to(torch.int32)
    table = torch.cat((pages[:common].view(groups, -1).repeat_interleave(each, 0), pages[common:].view(b, -1)), 1)
    q = torch.randn(b, h, D, device=device).to(dtype)
    cu = torch.arange(b + 1, device=device, dtype=torch.int32)
    lens, lengths = (torch.full((b,), n, device=device, dtype=torch.int32) for n in (length, prefix))
    shared = ops.SharedPrefix(torch.arange(groups + 1, device=device, dtype=torch.int32) * each, lengths, each, prefix)
    run = lambda shared: ops.paged_attention(
        q, kc, vc, table, cu, lens, max_seqlen_q=1, max_seqlen_k=length, shared=shared
    )
    moved = (2 * (groups * prefix + b * suffix) * hk + 2 * b * h) * D * q.element_size()
    return Case(
        "shared-prefix decode", (groups, each, prefix, suffix, h, hk, D), lambda: run(shared), lambda: run(None),
        "unshared", 0, moved, "cpu" if device == "cpu" else "triton",
    )  # fmt: skip


def cases(device: str, dtype: torch.dtype, fa3: Callable[..., Any] | None) -> Iterator[Case]:
    """All lines; the tensors of one shape are freed before the next shape's are created."""
    small = device == "cpu"
    for b, t, h, hk in ((2, 256, 4, 2),) if small else PREFILL:
        yield from prefill(b, t, h, hk, dtype, device, fa3)
    for b, length, h, hk in ((4, 256, 4, 2),) if small else DECODE:
        yield decode("paged decode", [length] * b, h, hk, dtype, device, fa3)
    for b, h, hk in ((4, 4, 2),) if small else RAGGED:
        keys, op = ragged(b), f"paged decode, {LEAST}-{MOST} keys"
        yield decode(op, keys, h, hk, dtype, device, fa3)
        yield decode(f"{op}, longest first", sorted(keys, reverse=True), h, hk, dtype, device, fa3)
    for sizes in ((2, 3, 64, 32, 4, 2),) if small else SHARED:
        yield shared_prefix(*sizes, dtype, device)


def without_schedules(run: Run) -> Run:
    """`run` with all schedules switched off."""

    def baseline() -> object:
        with scheduled_op.without():
            return run()

    return baseline


def row(case: Case, dtype: torch.dtype, ours_ms: float, baseline_ms: float | None) -> dict[str, Any]:
    """One line: times, their ratio, and the rates of both."""
    amount, unit = (case.flops, "tflops") if case.flops else (case.moved, "tb_per_s")
    return {
        "op": case.op,
        "shape": case.shape,
        "dtype": str(dtype).removeprefix("torch."),
        "ours": case.ran,
        "baseline": case.baseline_name if baseline_ms else None,
        "ours_ms": ours_ms,
        "baseline_ms": baseline_ms,
        "ratio": baseline_ms / ours_ms if baseline_ms else None,
        f"ours_{unit}": amount / ours_ms * 1e-9,
        f"baseline_{unit}": amount / baseline_ms * 1e-9 if baseline_ms else None,
        "share_of_roofline": share_of_roofline(ours_ms, case.flops, case.moved),
    }


def measure(case: Case, dtype: torch.dtype, cuda: bool, rounds: int) -> list[dict[str, Any]]:
    """The case's line; if a schedule ran, then also the Triton kernel's from the same rounds."""
    lines = [case]
    if case.ran.startswith("certified"):
        lines.append(replace(case, ours=without_schedules(case.ours), ran="triton"))
    sides = [line.ours for line in lines]
    times = interleaved(sides if case.baseline is None else [*sides, case.baseline], cuda, rounds)
    baseline_ms = None if case.baseline is None else times[-1]
    return [row(line, dtype, ours_ms, baseline_ms) for line, ours_ms in zip(lines, times, strict=False)]


def main() -> None:
    """Prints one line per case and writes `bench_attention.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_device(parser)
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    cuda = args.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    torch.manual_seed(0)
    fa3 = flash_attention_3() if cuda else None
    rows = []
    for case in cases(args.device, dtype, fa3):
        for line in measure(case, dtype, cuda, args.rounds):
            rows.append(line)
            rates = [f"{key} {line[key]:.4g}" for key in line if key.endswith(("tflops", "tb_per_s")) and line[key]]
            by = (
                f"{line['baseline']} {line['baseline_ms']:9.4f} ms  ratio {line['ratio']:.3f}"
                if line["baseline"]
                else "alone"
            )
            print(f"{line['op']:42} {line['shape']!s:24} {line['ours']:22} {line['ours_ms']:9.4f} ms  {by}  "
                  f"{', '.join(rates)}", flush=True)  # fmt: skip
    print(f"wrote {write_result('bench_attention', rows)}")


if __name__ == "__main__":
    main()
