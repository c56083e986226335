"""adamw_ and grad_norm on a GPU give the CPU's bits, in any grouping, alignment, block size, stream and CUDA graph.

Control: one gradient that is a few ulps away, and stock torch, give other bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_bitwise, compare_bitwise
from rlkernel.contract.orders import NORM_SEGMENT, SEGMENT
from rlkernel.kernels.triton import adamw

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SIZES = [1, 70, 0, 1024, 1025, 16_384, 100_000, 3 * NORM_SEGMENT + 5 * SEGMENT + 3]
NAMES = ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters")


def state(
    device: str, grad: torch.dtype = F32, param: torch.dtype = F32, wild: bool = False, sizes: Sequence[int] = SIZES
) -> dict[str, list[Tensor]]:
    """Parameters, gradients, moments and masters. `wild` spreads exponents over most of the range, with denormals and
    zeros."""
    generator = torch.Generator().manual_seed(0)
    columns: list[list[Tensor]] = []
    for spread in (1.0, 3.0, 0.1, 0.1):
        columns.append([torch.randn(n, generator=generator) * spread for n in sizes])
        for t in columns[-1] if wild else ():
            t.mul_(torch.exp2(torch.randint(-125, 40, t.shape, generator=generator).float()))
            t[torch.rand(t.shape, generator=generator) < 0.05] = 0.0
    masters, grads, exp_avgs, exp_avg_sqs = ([t.to(device) for t in column] for column in columns)
    params = masters if param == F32 else [w.to(param) for w in masters]
    grads = [g.to(grad) for g in grads]
    return dict(zip(NAMES, (params, grads, exp_avgs, [v.square() for v in exp_avg_sqs], masters), strict=True))


def steps(s: dict[str, list[Tensor]], **options: Any) -> ops.GradNorm:
    """Two updates in place, the second one clipped."""
    ops.adamw_(**s, lr=1e-2, step=1, **options)
    found = ops.grad_norm(s["grads"], max_norm=1.0)
    ops.adamw_(**s, lr=1e-2, step=2, scale=found.scale, zero_grad=True, **options)
    return found


def compare(ours: dict[str, list[Tensor]], theirs: dict[str, list[Tensor]], what: str) -> tuple[int, int]:
    """Elements and mismatches. All NaNs count as equal, because their payload depends on the machine."""
    elements = mismatches = 0
    for name in NAMES:
        for a, b in zip(ours[name], theirs[name], strict=True):
            a, b = a.cpu(), b.cpu()
            both = a.isnan() & b.isnan()
            report = compare_bitwise(a.masked_fill(both, 0.0), b.masked_fill(both, 0.0))
            assert report.mismatches == 0, f"{what}, {name}: {report}"
            elements, mismatches = elements + report.elements, mismatches + report.mismatches
    return elements, mismatches


def test_adamw_has_the_bits_of_the_cpu(record: Callable[..., None]) -> None:
    cases = elements = mismatches = 0
    for grad, param in ((F32, F32), (F32, BF16), (BF16, BF16), (F16, F16), (BF16, F32), (F32, F16)):
        few = ((0.9, 0.999),)  # because each combination compiles another kernel
        for wild in (False, True):
            for betas in (*few, (0.4, 0.95), (0.0, 0.0)) if (grad, param) == (F32, F32) else few:
                here, there = state("cuda", grad, param, wild), state("cpu", grad, param, wild)
                found, expected = steps(here, betas=betas), steps(there, betas=betas)
                for name, a, b in zip(found._fields, found, expected, strict=True):
                    assert_bitwise(a, b, f"{name} of {grad}, wild {wild}")
                count, bad = compare(here, there, f"{grad}, {param}, {betas}, wild {wild}")
                cases, elements, mismatches = cases + 1, elements + count, mismatches + bad
    record(cases=cases, elements=elements, mismatches=mismatches)


def test_grad_norm_of_mixed_dtypes_has_the_bits_of_the_cpu() -> None:
    columns = [state("cpu", dtype)["grads"] for dtype in (F32, BF16, F16)]
    grads = [g for row in zip(*columns, strict=True) for g in row]
    grads.append(grads[-1].repeat(SEGMENT))  # more segments than lanes
    for options in ({}, {"max_norm": 1.0}, {"max_norm": 1e9, "loss_scale": 64.0}):
        scale = options.pop("loss_scale", None)
        both = []
        for device in ("cpu", "cuda"):
            by = None if scale is None else torch.tensor(scale, device=device)
            both.append(ops.grad_norm([g.to(device) for g in grads], loss_scale=by, **options))
        for name, a, b in zip(both[0]._fields, *both, strict=True):
            assert_bitwise(b, a, f"{name} under {options}")


def test_bits_do_not_depend_on_grouping_alignment_or_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = state("cuda", F32, BF16)
    expected = steps(whole)
    for groups in ([[7, 3], [0, 1, 2], [6, 5, 4]], [[i] for i in range(len(SIZES))]):
        parts = state("cuda", F32, BF16)
        for group in groups:
            piece = {name: [parts[name][i] for i in group] for name in NAMES}
            ops.adamw_(**piece, lr=1e-2, step=1)
        found = ops.grad_norm(parts["grads"], max_norm=1.0)
        for group in groups:
            alone = ops.grad_norm([parts["grads"][i] for i in group])
            assert_bitwise(alone.squares, expected.squares[torch.tensor(group, device="cuda")], "squares of a group")
            piece = {name: [parts[name][i] for i in group] for name in NAMES}
            ops.adamw_(**piece, lr=1e-2, step=2, scale=found.scale, zero_grad=True)
        compare(parts, whole, f"groups {groups}")
    shifted = state("cuda", F32, BF16)
    for name, tensors in shifted.items():  # no tensor at a multiple of 16 bytes
        shifted[name] = [torch.cat((t.new_zeros(1), t))[1:] for t in tensors]
    assert_bitwise(steps(shifted).norm, expected.norm, "norm, unaligned")
    compare(shifted, whole, "unaligned")
    for block, warps in ((256, 1), (2048, 4)):
        monkeypatch.setattr(adamw, "BLOCK", block)
        monkeypatch.setattr(adamw, "WARPS", warps)
        monkeypatch.setattr(adamw, "NORM_WARPS", warps)
        other = state("cuda", F32, BF16)
        assert_bitwise(steps(other).norm, expected.norm, f"norm, {warps} warps")
        compare(other, whole, f"blocks of {block}")


def test_control_another_gradient_and_stock_torch_differ() -> None:
    ours, other = state("cuda", F32, BF16), state("cuda", F32, BF16)
    other["grads"][6][50_000] *= 1 + 2.0**-22
    steps(ours)
    steps(other)
    with pytest.raises(AssertionError, match="elements differ"):
        compare(ours, other, "one gradient, a few ulps away")
    with ops.stock():
        steps(stock := state("cuda", F32, BF16))
    with pytest.raises(AssertionError, match="elements differ"):
        compare(stock, ours, "stock")


def test_grad_norm_is_deterministic() -> None:
    grads = state("cuda", sizes=[700_001] * 20)["grads"]
    first = ops.grad_norm(grads, max_norm=1.0)
    for _ in range(50):
        for a, b in zip(ops.grad_norm(grads, max_norm=1.0), first, strict=True):
            assert_bitwise(a, b, "norm, repeated")


@pytest.mark.parametrize("bad", (math.inf, math.nan))
def test_a_nonfinite_gradient_changes_no_weight(bad: float) -> None:
    s, before = state("cuda", F32, BF16), state("cuda", F32, BF16)
    s["grads"][6][99_999] = bad
    found = ops.grad_norm(s["grads"], max_norm=1.0)
    assert math.isnan(found.scale) and found.squares.isfinite().tolist() == [i != 6 for i in range(len(SIZES))]
    ops.adamw_(**s, lr=1e-2, step=1, scale=found.scale, zero_grad=True)
    assert not any(g.any() for g in s["grads"])
    compare({**s, "grads": before["grads"]}, before, "a skipped update")


def test_in_a_graph_and_on_another_stream() -> None:
    eager, graphed = state("cuda", F32, BF16), state("cuda", F32, BF16)

    def run(s: dict[str, list[Tensor]]) -> None:
        found = ops.grad_norm(s["grads"], max_norm=1.0)
        ops.adamw_(**s, lr=1e-2, step=1, scale=found.scale)

    again = pytest.raises(RuntimeError, match="call once with the same tensors before")
    with again, torch.cuda.graph(torch.cuda.CUDAGraph()):
        run(graphed)
    saved = {name: [t.clone() for t in tensors] for name, tensors in graphed.items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(graphed)
    torch.cuda.current_stream().wait_stream(side)
    run(eager)
    compare(graphed, eager, "on another stream")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(graphed)
    for name, tensors in saved.items():
        for t, old in zip(graphed[name], tensors, strict=True):
            t.copy_(old)
    others = [
        state("cuda", sizes=[8]) for _ in range(adamw.MAX_TABLES)
    ]  # more than are kept, except that captured ones stay
    for other in others:
        run(other)
    graph.replay()
    compare(graphed, eager, "in a graph")


def test_adamw_does_not_synchronize() -> None:
    s = state("cuda", F32, BF16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps(s)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_on_a_device_that_is_not_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    expected, other = state("cuda:0", F32, BF16), state("cuda:1", F32, BF16)
    steps(expected)
    steps(other)
    compare(other, expected, "on another device")
