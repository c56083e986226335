"""Ops with a Triton kernel on a GPU: accurate against fp64, the same bits in any batch and in CUDA graphs, no waits.

linear, attention, logprob, policy_loss and adamw have files of their own, which also hold the stock controls; that
`assert_rows_alone` can fail is shown by tests/test_gpu_checks.py.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu.gpu_checks import DEVICE, Compared, Record, assert_rows_alone, data
from ops.op_checks import assert_compiles, assert_right, by_dtype, forward_backward, rand
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.contract.orders import EMBEDDING_WINDOW, WGRAD_TOKENS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

# ---- embedding, rms_norm, rope, swiglu ----------------------------------------------------------

EMBED = """
import torch
from rlkernel import ops
ids = torch.tensor([3, {id}, 5], device="cuda")
ops.embedding(ids, torch.ones(10, 520, dtype=torch.bfloat16, device="cuda"))
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("token", (-1, 9, 10, 1 << 40))
def test_an_id_outside_the_vocabulary_is_an_assertion(token: int) -> None:
    """In a process of its own, which cannot use CUDA after the assertion; 9 is the last valid id."""
    done = subprocess.run([sys.executable, "-c", EMBED.format(id=token)], capture_output=True, text=True)
    if token == 9:
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode != 0 and "device-side assert" in done.stderr, done.stderr
    assert "an id lies outside the vocabulary" in done.stdout + done.stderr


@by_dtype
def test_embedding(dtype: torch.dtype, record: Record) -> None:
    v, c, tokens = 300, 520, 3000
    weight, dy = rand(0, v, c, dtype=dtype), rand(1, tokens, c, dtype=dtype)
    ids = torch.randint(0, v, (tokens,), generator=torch.Generator().manual_seed(2))
    ids[::3] = 7  # one id a thousand times
    seen = Compared()
    seen.rows(ops.embedding(ids.to(DEVICE), weight.to(DEVICE)), weight[ids], "rows")
    strided = weight.to(DEVICE).t().contiguous().t()
    seen.rows(ops.embedding(ids.to(DEVICE)[1::2], strided), weight[ids[1::2]], "rows of a strided weight")
    expected = torch.zeros(v, c)
    for first in range(0, tokens, EMBEDDING_WINDOW):
        window = torch.zeros(v, c)
        torch.ops.rlkernel.embedding_wgrad_(
            window, dy[first : first + EMBEDDING_WINDOW], ids[first : first + EMBEDDING_WINDOW]
        )
        expected += window
    for pieces in ([slice(None)], [slice(0, 1024), slice(1024, None)]):
        grad = torch.zeros(v, c, device=DEVICE)
        for piece in pieces:
            torch.ops.rlkernel.embedding_wgrad_(grad, dy[piece].to(DEVICE), ids[piece].to(DEVICE))
        seen.whole(grad, expected, f"gradient against the CPU's sums of windows, {len(pieces)} micro-batches")
    fresh = torch.ops.rlkernel.embedding_wgrad(dy.to(DEVICE), ids.to(DEVICE), v)
    seen.whole(fresh, expected.to(dtype), "gradient without main_grad")
    record(**vars(seen))


def rms_truth(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


@by_dtype
@pytest.mark.parametrize("c", (64, 128, 1000, 4096))
def test_rms_norm(c: int, dtype: torch.dtype, record: Record) -> None:
    x, r, w, dy, dr = (
        data(i, *shape, dtype=dtype) for i, shape in enumerate(((70, c), (70, c), (c,), (70, c), (70, c)))
    )
    assert_right(lambda x, w: ops.rms_norm(x, w, 1e-6), rms_truth, (x, w), (dy,), "rms_norm")
    assert_right(
        lambda x, r, w: ops.rms_norm(x, w, 1e-6, residual=r),
        lambda x, r, w: (rms_truth(x + r, w), x + r),
        (x, r, w),
        (dy, dr),
        "add_rms_norm",
    )
    rows = WGRAD_TOKENS + 300
    x, r, dy = (data(i, rows, c, dtype=dtype) for i in range(3))
    whole, parts = torch.zeros(c, device=DEVICE), torch.zeros(c, device=DEVICE)
    gradients = torch.ops.rlkernel.rms_norm_grad_
    gradients(whole, dy, None, x, w, 1e-6)
    for piece in (slice(0, WGRAD_TOKENS), slice(WGRAD_TOKENS, None)):
        gradients(parts, dy[piece], None, x[piece], w, 1e-6)
    seen = Compared()
    seen.whole(parts, whole, "weight gradient in micro-batches")
    seen.whole(torch.ops.rlkernel.rms_norm_grad(dy, r, x, w, 1e-6)[1], whole.to(dtype), "rounded once")
    x, r, dy = (t[:1100] for t in (x, r, dy))
    seen += assert_rows_alone(lambda x, r: ops.rms_norm(x, w, 1e-6, residual=r), (x, r), "add_rms_norm")
    seen += assert_rows_alone(lambda x: ops.rms_norm(x, w, 1e-6), (x,), "rms_norm")
    dgrad = torch.ops.rlkernel.rms_norm_dgrad
    seen += assert_rows_alone(lambda dy, r, x: dgrad(dy, r, x, w, 1e-6), (dy, r, x), "input gradient")
    y, total = ops.rms_norm(x, w, 1e-6, residual=r)
    seen.rows(ops.rms_norm(total, w, 1e-6), y, "norm of the sum")
    record(**vars(seen))


def test_rms_norm_of_misaligned_rows() -> None:
    """A view at an odd address is copied, because its alignment would assign elements to other threads."""
    x, w = data(0, 40, 63, dtype=torch.bfloat16), data(1, 63, dtype=torch.bfloat16)
    expected = ops.rms_norm(x, w, 1e-6)
    for i in range(1, 4):
        assert_bitwise(ops.rms_norm(x[i:], w, 1e-6), expected[i:], f"rows from {i}")


@by_dtype
def test_rope(dtype: torch.dtype, record: Record) -> None:
    tokens, h, hk, d = 500, 16, 8, 128
    packed = rand(0, tokens, h + 2 * hk, d, dtype=dtype)
    positions = torch.randint(0, 4096, (tokens,), generator=torch.Generator().manual_seed(1))
    angles = torch.arange(4096)[:, None] * 10000.0 ** (-torch.arange(d // 2) / (d // 2))
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    results = []
    for device in ("cpu", DEVICE):
        q, k = packed.to(device)[:, :h], packed.to(device)[:, h : h + hk]
        upstream = [rand(i, tokens, n, d, dtype=dtype).to(device) for i, n in ((2, h), (3, hk))]
        op = lambda q, k, device=device: ops.rope(q, k, positions.to(device), table.to(device))
        results.append(forward_backward(op, (q, k), upstream))
    seen = Compared()
    seen.rows(results[1], results[0], "GPU against CPU: one fma form")
    rows = (packed[:, :h].to(DEVICE), packed[:, h : h + hk].to(DEVICE), positions.to(DEVICE))
    seen += assert_rows_alone(lambda q, k, p: ops.rope(q, k, p, table.to(DEVICE)), rows, "rope")
    record(**vars(seen))


@by_dtype
def test_swiglu(dtype: torch.dtype, record: Record) -> None:
    gate_up, dy = data(0, 70, 2 * 1100, dtype=dtype) * 3, data(1, 70, 1100, dtype=dtype)
    truth = lambda x: F.silu(x[..., :1100]) * x[..., 1100:]
    assert_right(ops.swiglu, truth, (gate_up,), (dy,), "swiglu")
    gate_up[0, :4] = torch.tensor([-1e4, 1e4, 0.0, -0.0])
    assert bool(torch.isfinite(ops.swiglu(gate_up)).all())
    x, up = data(2, 1100, 2 * 96, dtype=dtype), data(3, 1100, 96, dtype=dtype)
    seen = assert_rows_alone(ops.swiglu, (x,), "swiglu")
    seen += assert_rows_alone(torch.ops.rlkernel.swiglu_grad, (up, x), "gradient")
    # An output larger than the L2 cache runs another variant of the kernel.
    large = data(4, 11_000, 2 * 3072, dtype=dtype)
    seen.rows(ops.swiglu(large)[-7:], ops.swiglu(large[-7:]), "rows of a large and of a small call")
    record(**vars(seen))


# ---- sample -------------------------------------------------------------------------------------


def requests(batch: int, v: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "logits": torch.randn(batch, v, generator=generator) * 3,
        "seeds": torch.randint(-(2**62), 2**62, (batch,), generator=generator),
        "positions": torch.randint(0, 2**20, (batch,), generator=generator),
        "temperature": torch.rand(batch, generator=generator) + 0.5,
        "top_k": torch.randint(0, 100, (batch,), generator=generator, dtype=torch.int32),
        "top_p": 0.5 + 0.5 * torch.rand(batch, generator=generator),
        "min_p": 0.05 * torch.rand(batch, generator=generator),
    }


@pytest.mark.parametrize("filters", ((), ("top_k",), ("top_p",), ("min_p",), ("top_k", "top_p", "min_p")), ids=",".join)
@pytest.mark.parametrize("v", (1000, 151936))
def test_sample(v: int, filters: tuple[str, ...], record: Record) -> None:
    batch = 24
    x = requests(batch, v)
    x["temperature"][::7] = 0.0
    used = {n: t.to(DEVICE) for n, t in x.items() if n in filters or not n.endswith(("_k", "_p"))}
    whole, seen = ops.sample(**used, return_kept=True, return_full=True), Compared()
    for order in (
        torch.randperm(batch, generator=torch.Generator().manual_seed(0)),
        torch.tensor([5]),
        torch.arange(3, 9),
    ):
        some = ops.sample(**{n: t[order.to(DEVICE)] for n, t in used.items()}, return_kept=True, return_full=True)
        expected = [None if w is None else w[order.to(DEVICE)] for w in whole]
        seen.rows(some, expected, f"requests {order.tolist()[:3]}...")
    cpu = ops.sample(**{n: t.cpu() for n, t in used.items()}, return_kept=True)
    if "top_p" in filters or "min_p" in filters:  # a probability at the threshold may fall on either side
        flips = (ops.unpack_kept(whole.kept.cpu(), v) != ops.unpack_kept(cpu.kept, v)).sum()
        assert int(flips) <= 4
        assert int((whole.tokens.cpu() != cpu.tokens).sum()) <= 1
    else:
        what = "tokens and kept set, GPU against CPU: noise and threshold are integers"
        seen.rows([whole.tokens, whole.kept], [cpu.tokens, cpu.kept], what)
    scored = ops.logprob(used["logits"], whole.tokens, temperature=used["temperature"].clamp(min=1e-3), kept=whole.kept)
    sampled = used["temperature"] > 0
    seen.rows(whole.logp[sampled], scored.logp[sampled], "logp is logprob's over the kept set")
    scored = ops.logprob(used["logits"], whole.tokens, temperature=used["temperature"].clamp(min=1e-3))
    seen.rows(whole.full_logp[sampled], scored.logp[sampled], "full_logp is logprob's over all tokens")
    record(**vars(seen))


def test_sample_follows_the_distribution() -> None:
    draws, v = 40000, 9
    logits = data(0, 1, v).expand(draws, v).contiguous()
    seeds = torch.arange(draws, device=DEVICE)
    ones = torch.ones(draws, device=DEVICE)
    tokens = ops.sample(logits, seeds, seeds % 17, temperature=ones).tokens
    counts = torch.bincount(tokens, minlength=v).double()
    p = torch.softmax(logits[0].double(), 0)
    z = (counts - draws * p) / (draws * p * (1 - p)).sqrt()
    assert float(z.abs().max()) < 4.5


# ---- all of them --------------------------------------------------------------------------------


NAMES = (
    *("linear", "linear_dgrad", "linear_wgrad", "linear_wgrad_", "bias_grad_", "embedding", "embedding_wgrad_"),
    *("rms_norm", "rms_norm_dgrad", "rms_norm_grad", "rms_norm_grad_", "rope", "swiglu", "swiglu_grad"),
    *("logprob", "logprob_dgrad", "linear_logprob", "linear_logprob_grad_"),
    *("linear_logprob_probs", "linear_logprob_logits", "sample", "gae"),
)


def everything() -> dict[str, Callable[[], Any]]:
    """A call of every op of NAMES, forward and backward, on tensors that are allocated beforehand."""
    dtype = torch.bfloat16
    x, w, b, dy = (data(i, *s, dtype=dtype) for i, s in enumerate(((300, 256), (512, 256), (512,), (300, 512))))
    head, norm = data(4, 700, 256, dtype=dtype), data(5, 256, dtype=dtype)
    ids = torch.randint(0, 700, (300,), device=DEVICE)
    table = data(6, 300, 64)
    q, k = data(7, 300, 4, 64, dtype=dtype), data(8, 300, 2, 64, dtype=dtype)
    g = data(9, 300)
    borders = torch.tensor([0, 7, 7, 300], device=DEVICE, dtype=torch.int32)
    main, flat = torch.zeros(512, 256, device=DEVICE), torch.zeros(512, device=DEVICE)
    sampling = {n: t.to(DEVICE) for n, t in requests(16, 700).items()}
    raw = torch.ops.rlkernel
    logits = data(10, 300, 700)
    _, entropy, _, stats = raw.logprob(logits, ids, None, None)
    return {
        "linear": lambda: ops.linear(x, w, b, chunks=4),
        "linear_dgrad": lambda: raw.linear_dgrad(dy, w, 1),
        "linear_wgrad": lambda: raw.linear_wgrad(dy, x),
        "linear_wgrad_": lambda: raw.linear_wgrad_(main.zero_(), dy, x) or main.clone(),
        "bias_grad_": lambda: raw.bias_grad_(flat.zero_(), dy) or flat.clone(),
        "embedding": lambda: ops.embedding(ids, head),
        "embedding_wgrad_": lambda: raw.embedding_wgrad_(main.zero_(), x, ids % 512) or main.clone(),
        "rms_norm": lambda: ops.rms_norm(x, norm, 1e-6, residual=x),
        "rms_norm_dgrad": lambda: raw.rms_norm_dgrad(x, x, x, norm, 1e-6),
        "rms_norm_grad": lambda: raw.rms_norm_grad(x, x, x, norm, 1e-6),
        "rms_norm_grad_": lambda: raw.rms_norm_grad_(flat.zero_()[:256], x, x, x, norm, 1e-6) + flat[:256],
        "rope": lambda: ops.rope(q, k, ids % 300, table),
        "swiglu": lambda: ops.swiglu(x),
        "swiglu_grad": lambda: raw.swiglu_grad(x[:, :128].contiguous(), x),
        "logprob": lambda: ops.logprob(logits, ids),
        "logprob_dgrad": lambda: raw.logprob_dgrad(logits, ids, None, None, stats, entropy, g, g),
        "linear_logprob": lambda: ops.linear_logprob(x, head, ids),
        "linear_logprob_grad_": lambda: raw.linear_logprob_grad_(
            None, x, head, ids, None, None, stats, entropy, g, g, None, None, None, False, True, True
        ),
        "linear_logprob_logits": lambda: raw.linear_logprob_logits(x, head, ids, None, None, 256, False),
        "linear_logprob_probs": lambda: raw.linear_logprob_probs(x, head, ids, None, None, False),
        "sample": lambda: ops.sample(**sampling, return_kept=True),
        "gae": lambda: ops.gae(g, logits[:, 0], borders, 0.99, 0.95),
    }


def tensors(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else [t for t in out if t is not None]


def test_repeated_runs_give_the_same_bits(record: Record) -> None:
    runs = everything()
    first, seen = {name: [t.clone() for t in tensors(run())] for name, run in runs.items()}, Compared()
    for _, (name, run) in itertools.product(range(20), runs.items()):
        seen.whole(tensors(run()), first[name], name)
    record(**vars(seen))


@pytest.mark.parametrize("name", NAMES)
def test_does_not_synchronize_and_runs_in_a_graph(name: str) -> None:
    run = everything()[name]
    expected = [t.clone() for t in tensors(run())]  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tensors(run())
    for t in captured:
        t.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(captured, expected, strict=True):
        assert_bitwise(a, b, f"{name}, replayed")


def test_compiles_with_dynamo() -> None:
    x, w, g = data(0, 20, 64), data(1, 300, 64), data(2, 20)
    targets = torch.randint(0, 300, (20,), device=DEVICE)
    assert_compiles(lambda x, w: ops.linear_logprob(x, w, targets)[:2], (x, w), (g, g))
    assert_compiles(lambda x, w: ops.linear(x, w, chunks=2), (x, w), (data(3, 20, 300),))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_a_gpu_that_is_not_current() -> None:
    x, w = data(0, 33, 256, dtype=torch.bfloat16), data(1, 512, 256, dtype=torch.bfloat16)
    assert torch.cuda.current_device() == 0
    ids, g = torch.arange(33, device=DEVICE) * 7, data(2, 33)
    g[::2] = 0.0

    def run(device: str) -> list[Tensor]:
        hidden, weight = (t.to(device).requires_grad_(True) for t in (x, w))
        rows = ops.embedding(ids.to(device), weight)
        logp = ops.linear_logprob(hidden, weight, ids.to(device)).logp
        return [ops.linear(hidden, weight, chunks=2), rows, logp, *torch.autograd.grad(
            (logp, rows), (hidden, weight), (g.to(device), rows.detach())
        )]  # fmt: skip

    for i, (second, first) in enumerate(zip(run("cuda:1"), run("cuda:0"), strict=True)):
        assert second.get_device() == 1
        assert_bitwise(second, first, f"second GPU, result {i}")
