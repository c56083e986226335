"""rms_norm's gradients on Hopper: the CUDA kernel has the bits of the Triton kernel in every setting, for any rows.

Control: plain torch in bf16 gives other bits.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu.gpu_checks import Compared
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.kernels import schedule
from rlkernel.kernels.cuda import rms_norm as cuda
from rlkernel.kernels.cuda import rms_norm_grad_sm90
from rlkernel.kernels.triton import rms_norm as anchor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

BF16 = torch.bfloat16


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(BF16)


@pytest.mark.parametrize("dr", (False, True), ids=("one", "residual"))
@pytest.mark.parametrize("channels", (520, 1024, 1032, 2048, 2560, 4096, 5120, 8192, 16384))
def test_rms_norm_schedules_equal_the_anchor(channels: int, dr: bool, record: Callable[..., None]) -> None:
    seen = Compared()
    settings = [groups for groups in rms_norm_grad_sm90.RESIDENT if rms_norm_grad_sm90.fits(channels, dr, groups)]
    w = rand(channels, seed=9)
    for rows in (1, 15, 17, 1024, 4097, 4099, 4104, 4113, 8192, 8193, 12289 + 5, 12288 + 15):
        x, dy = rand(rows, channels), rand(rows, channels, seed=1)
        second = rand(rows, channels, seed=2) if dr else None
        expected = anchor.gradients(dy, second, x, w, 1e-6)
        for groups in settings:
            found = rms_norm_grad_sm90.launcher(0, channels, dr, groups)(dy, second, x, w, 1e-6)
            seen.rows(found[0], expected[0], f"dx of {rows} rows, {groups} groups")
            seen.whole(found[1], expected[1], f"partial sums of {rows} rows, {groups} groups")
    assert settings or (channels == 16384 and dr)
    record(**vars(seen))


def test_special_values_addresses_and_strides() -> None:
    """eps of 0 with rows of zeros, infinities and NaN; addresses that TMA cannot read; strided rows."""
    channels, rows = 2560, 4100
    w = rand(channels, seed=9)
    x, dy = rand(rows + 1, channels), rand(rows + 1, channels, seed=1)
    x[3], x[70, 5], x[71, 9], dy[90, 0] = 0.0, float("inf"), float("nan"), float("-inf")
    wide = torch.cat((dy[:rows], dy[:rows]), 1)
    unaligned = torch.empty(rows * channels + 1, device="cuda", dtype=BF16)[1:].view(rows, channels).copy_(x[:rows])
    run = rms_norm_grad_sm90.launcher(0, channels, False, 4)
    for eps in (0.0, 1e-5):
        for given in ((dy[:rows], x[:rows]), (wide[:, channels:], x[:rows]), (dy[:rows], unaligned)):
            expected = anchor.gradients(given[0], None, given[1], w, eps)
            for found, wanted, what in zip(
                run(given[0], None, given[1], w, eps), expected, ("dx", "sums"), strict=True
            ):
                assert_bitwise(found, wanted, f"{what}, eps {eps}")


@pytest.mark.parametrize("channels", (1024, 5120))
def test_rms_norm_weight_gradient_in_micro_batches(channels: int, record: Callable[..., None]) -> None:
    """16,392 rows in one call, in two, without schedules, with every setting, and in a graph give the same bits."""
    seen, w = Compared(), rand(channels, seed=9)
    rows = 2 * cuda.MANY + 8
    x, dy = rand(rows, channels), rand(rows, channels, seed=1)
    into = torch.ops.rlkernel.rms_norm_grad_

    def summed(*pieces: slice) -> tuple[Tensor, Tensor]:
        total = torch.zeros(channels, device="cuda")
        return torch.cat([into(total, dy[p], None, x[p], w, 1e-6) for p in pieces]), total

    whole = summed(slice(None))
    with schedule.strict():
        again = summed(slice(0, cuda.MANY), slice(cuda.MANY, None))
    with schedule.without("hopper"):
        plain = summed(slice(None))
    others = [(again, "two calls"), (plain, "the anchor")]
    for groups in rms_norm_grad_sm90.RESIDENT:  # the kernel before the fold, which is launched with PDL
        run = rms_norm_grad_sm90.launcher(0, channels, False, groups)
        total = torch.zeros(channels, device="cuda")
        others.append(((anchor.rms_norm_grad_(total, dy, None, x, w, 1e-6, run), total), f"{groups} groups"))
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            dx = anchor.rms_norm_grad_(total := torch.zeros(channels, device="cuda"), dy, None, x, w, 1e-6, run)
        for _ in range(2):
            dx.fill_(float("nan"))
            graph.replay()
        others.append(((dx, total), f"{groups} groups in a graph"))
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
    verdict = cuda.gradients.verdict_of(cuda.shape_of(dy, dr, x, w, 1e-6))
    assert verdict is not None and all(trial.certified for trial in verdict.trials), verdict
