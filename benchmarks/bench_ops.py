"""Every op against plain torch at Qwen3-0.6B shapes: forward, and forward + backward, interleaved.

`python benchmarks/bench_ops.py` uses the GPU where there is one (bf16), else the CPU (fp32, smaller shapes). A ratio
above 1 means rlkernel is faster.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from results_io import write_result
from timing import interleaved, peak_gib, share_of_roofline

from rlkernel import ops


@dataclass
class Case:
    """One line of the table: `fn` runs the op through `rlkernel.ops`; the anchor is `fn` under `ops.stock()`.

    Where stock is a loop over sequences, `anchor` is one batched call of torch instead.
    """

    op: str
    shape: tuple[int, ...]
    fn: Callable[[], object]
    flops: float
    moved: float
    anchor: Callable[[], object] | None = None
    anchor_name: str = "torch"


def _leaf(*shape: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).to(dtype).requires_grad_(True)


def _backward(fn: Callable[[], Tensor], inputs: list[Tensor]) -> Callable[[], None]:
    upstream: list[Tensor] = []

    def run() -> None:
        out = fn()
        if not upstream:
            upstream.append(torch.randn_like(out))
        torch.autograd.grad(out, inputs, upstream[0])

    return run


def cases(device: str, dtype: torch.dtype, small: bool) -> Iterator[Case]:
    """Qwen3-0.6B: C=1024, 16 heads, 8 kv heads, D=128, F=3072, V=151936."""
    size = torch.finfo(dtype).bits // 8
    tokens = 512 if small else 8192
    c, h, hk, d, f, v = (256, 4, 2, 64, 768, 8192) if small else (1024, 16, 8, 128, 3072, 151936)
    t = tokens
    for m in (1, 16, 64, 256, t):
        for name, n, k in (("qkv", (h + 2 * hk) * d, c), ("gate_up", 2 * f, c), ("down", c, f)):
            x, w = _leaf(m, k, dtype=dtype, device=device), _leaf(n, k, dtype=dtype, device=device, scale=0.02)
            moved = (m * k + n * k + m * n) * size
            with torch.no_grad():
                yield Case(
                    f"linear {name}",
                    (m, n, k),
                    lambda x=x, w=w: ops.linear(x.detach(), w.detach()),
                    2 * m * n * k,
                    moved,
                )
            if m == t:
                yield Case(
                    f"linear {name} fwd+bwd",
                    (m, n, k),
                    _backward(lambda x=x, w=w: ops.linear(x, w), [x, w]),
                    6 * m * n * k,
                    3 * moved,
                )
    x, w = _leaf(t, c, dtype=dtype, device=device), _leaf(c, dtype=dtype, device=device)
    r = _leaf(t, c, dtype=dtype, device=device)
    yield Case(
        "rms_norm + residual",
        (t, c),
        lambda: ops.rms_norm(x.detach(), w.detach(), 1e-6, r.detach()),
        0,
        4 * t * c * size,
    )
    yield Case("rms_norm fwd+bwd", (t, c), _backward(lambda: ops.rms_norm(x, w, 1e-6), [x, w]), 0, 5 * t * c * size)
    gu = _leaf(t, 2 * f, dtype=dtype, device=device)
    yield Case("swiglu", (t, f), lambda: ops.swiglu(gu.detach()), 0, 3 * t * f * size)
    yield Case("swiglu fwd+bwd", (t, f), _backward(lambda: ops.swiglu(gu), [gu]), 0, 8 * t * f * size)
    q, k, kv = (_leaf(t, n, d, dtype=dtype, device=device) for n in (h, hk, hk))
    positions = torch.arange(t, device=device)
    table = torch.randn(t, d, device=device)
    yield Case(
        "rope",
        (t, h + hk, d),
        lambda: ops.rope(q.detach(), k.detach(), positions, table),
        0,
        2 * t * (h + hk) * d * size,
    )
    cu = torch.arange(0, t + 1, t // 4, device=device, dtype=torch.int32)
    flops = 4 * 4 * (t // 4) ** 2 * h * d / 2
    attend = lambda q, k, kv: ops.attention(q, k, kv, cu, max_seqlen_q=t // 4)[0]
    moved = (2 * t * h + 2 * t * hk) * d * size
    shape = (4, t // 4, h, d)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batched = [x.view(4, t // 4, -1, d).transpose(1, 2) for x in (q, k, v)]
        return F.scaled_dot_product_attention(*batched, is_causal=True, enable_gqa=True)

    yield Case(
        "attention",
        shape,
        lambda: attend(q.detach(), k.detach(), kv.detach()),
        flops,
        moved,
        lambda: sdpa(q.detach(), k.detach(), kv.detach()),
        "torch SDPA, batched",
    )
    yield Case(
        "attention fwd+bwd",
        shape,
        _backward(lambda: attend(q, k, kv), [q, k, kv]),
        3.5 * flops,
        3 * moved,
        _backward(lambda: sdpa(q, k, kv), [q, k, kv]),
        "torch SDPA, batched",
    )
    batch, length, page = (16, 128, 16) if small else (256, 1024, 16)
    pages = batch * length // page
    kc, vc = (torch.randn(pages, page, hk, d, device=device).to(dtype) for _ in range(2))
    table_ = torch.randperm(pages, device=device).to(torch.int32).view(batch, -1)
    qd = torch.randn(batch, h, d, device=device).to(dtype)
    cud = torch.arange(batch + 1, device=device, dtype=torch.int32)
    lens = torch.full((batch,), length, device=device, dtype=torch.int32)
    decode = lambda: ops.paged_attention(qd, kc, vc, table_, cud, lens, max_seqlen_q=1, max_seqlen_k=length)[0]
    dense = [c.view(batch, length, hk, d).transpose(1, 2) for c in (kc, vc)]
    yield Case(
        "paged decode",
        (batch, length, h, d),
        decode,
        0,
        2 * batch * length * hk * d * size,
        lambda: F.scaled_dot_product_attention(qd.unsqueeze(2), *dense, enable_gqa=True),
        "torch SDPA, dense cache",
    )
    t2 = tokens // 4
    hid, head = _leaf(t2, c, dtype=dtype, device=device), _leaf(v, c, dtype=dtype, device=device, scale=0.02)
    y = torch.randint(0, v, (t2,), device=device)
    gemm, moved = 2 * t2 * c * v, (t2 * c + v * c) * size
    yield Case(
        "linear_logprob", (t2, c, v), lambda: ops.linear_logprob(hid.detach(), head.detach(), y).logp, gemm, moved
    )
    both = _backward(lambda: ops.linear_logprob(hid, head, y).logp, [hid, head])
    yield Case("linear_logprob fwd+bwd", (t2, c, v), both, 4 * gemm, 3 * moved)
    z = torch.randn(t2, v, device=device).to(dtype)
    yield Case("logprob", (t2, v), lambda: ops.logprob(z, y).logp, 0, t2 * v * size)


def main() -> None:
    """Prints a line a case and writes `bench_ops.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    cuda = args.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    torch.manual_seed(0)
    rows = []
    for case in cases(args.device, dtype, small=not cuda):

        def stock(case: Case = case) -> object:
            with ops.stock():
                return case.fn()

        ours_ms, anchor_ms = interleaved([case.fn, case.anchor or stock], cuda, args.rounds)
        row = {
            "op": case.op,
            "shape": case.shape,
            "dtype": str(dtype).removeprefix("torch."),
            "ours": "rlkernel",
            "anchor": case.anchor_name,
            "ours_ms": ours_ms,
            "anchor_ms": anchor_ms,
            "ratio": anchor_ms / ours_ms,
            "share_of_roofline": share_of_roofline(ours_ms, case.flops, case.moved),
            "peak_gib": peak_gib(case.fn, cuda),
        }
        rows.append(row)
        print(
            f"{case.op:26} {case.shape!s:24} {ours_ms:9.4f} ms  torch {anchor_ms:9.4f} ms  ratio {row['ratio']:.2f}",
            flush=True,
        )
    print(f"wrote {write_result('bench_ops', rows)}")


if __name__ == "__main__":
    main()
