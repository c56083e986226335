"""rms_norm's gradients: equal bits in one call, in micro-batches and in a graph, and close to fp64.

Control: plain torch in bf16 gives other bits.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu.gpu_checks import Compared
from torch import Tensor

from rlkernel import ops
from rlkernel.contract.orders import WGRAD_TOKENS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

BF16 = torch.bfloat16


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(BF16)


@pytest.mark.parametrize("channels", (1024, 5120))
def test_rms_norm_weight_gradient_in_micro_batches(channels: int, record: Callable[..., None]) -> None:
    """16,392 rows in one call, in two and in a graph give the same bits."""
    seen, w = Compared(), rand(channels, seed=9)
    rows = 2 * WGRAD_TOKENS + 8
    x, dy = rand(rows, channels), rand(rows, channels, seed=1)
    into = torch.ops.rlkernel.rms_norm_grad_

    def summed(*pieces: slice) -> tuple[Tensor, Tensor]:
        total = torch.zeros(channels, device="cuda")
        return torch.cat([into(total, dy[p], None, x[p], w, 1e-6) for p in pieces]), total

    whole = summed(slice(None))
    others = [(summed(slice(0, WGRAD_TOKENS), slice(WGRAD_TOKENS, None)), "two calls")]
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        dx, total = summed(slice(None))
    for _ in range(2):
        dx.fill_(float("nan"))
        graph.replay()
    others.append(((dx, total), "a graph"))
    for found, what in others:
        seen.rows(found[0], whole[0], f"dx, {what}")
        seen.whole(found[1], whole[1], f"weight gradient, {what}")
    record(**vars(seen))


def test_close_to_fp64() -> None:
    """The error of all gradients is at most twice that of plain torch in bf16."""
    rows, channels = 4096, 5120
    x, r, w, dy, dr = (rand(rows, channels, seed=i) if i != 2 else rand(channels, seed=2) for i in range(5))

    def run(norm: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (x, r, w)]
        return list(torch.autograd.grad(norm(*leaves), leaves, [t.to(dtype) for t in (dy, dr)]))

    def plain(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        total = x + r
        rstd = torch.rsqrt(
            total.to(torch.float64 if x.dtype == torch.float64 else torch.float32).square().mean(-1, True) + 1e-6
        )
        return (total * rstd.to(total.dtype)) * w, total

    truth, ours, torchs = (
        run(plain, torch.float64),
        run(lambda x, r, w: ops.rms_norm(x, w, 1e-6, r), BF16),
        run(plain, BF16),
    )
    for name, exact, mine, theirs in zip(("dx", "dresidual", "dweight"), truth, ours, torchs, strict=True):
        error = lambda t, exact=exact: (t.double() - exact).norm() / exact.norm()
        assert error(mine) <= 2 * error(theirs), f"{name}: {error(mine)} against torch's {error(theirs)}"
        assert not torch.equal(mine, theirs), f"{name}: the control has the same bits"
