"""rms_norm: accuracy, batch invariance, and a weight gradient that no split of the tokens changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import (
    DTYPES,
    assert_compiles,
    assert_reference_equal,
    assert_right,
    by_dtype,
    differs,
    forward_backward,
    rand,
    threads,
    with_threads,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlkernel import ops
from rlkernel.contract import assert_bitwise

EPS = 1e-6
properties = settings(max_examples=20, deadline=None, derandomize=True)
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**16)


def norm(x: Tensor, w: Tensor) -> Tensor:
    return ops.rms_norm(x, w, EPS)


def add_norm(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return ops.rms_norm(x, w, EPS, residual)


def truth(x: Tensor, w: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * w


def add_truth(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return truth(x + residual, w), x + residual


def data(rows: int, c: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    """x, residual, weight, dy, dr."""
    shapes = ((rows, c), (rows, c), (c,), (rows, c), (rows, c))
    return tuple(rand(seed + i, *shape, dtype=dtype) for i, shape in enumerate(shapes))


# ---- right


@by_dtype
@pytest.mark.parametrize("c", (64, 130))
def test_accuracy(dtype: torch.dtype, c: int) -> None:
    x, residual, w, dy, dr = data(33, c, dtype)
    assert_right(norm, truth, (x, w), (dy,), f"rms_norm {dtype}")
    assert_right(add_norm, add_truth, (x, residual, w), (dy, dr), f"rms_norm with residual {dtype}")


@by_dtype
@pytest.mark.parametrize("c", (1, 16, 33, 70))
def test_reference_equals_cpp(dtype: torch.dtype, c: int) -> None:
    x, residual, w, dy, dr = data(5, c, dtype)
    assert_reference_equal(lambda: forward_backward(norm, (x, w), (dy,)), f"rms_norm {dtype}")
    assert_reference_equal(lambda: forward_backward(add_norm, (x, residual, w), (dy, dr)), f"add_rms_norm {dtype}")


def test_rounding_points() -> None:
    x, residual, w, *_ = data(7, 96, torch.bfloat16)
    y, r = ops.rms_norm(x, w, EPS, residual)
    assert_bitwise(r, x + residual, "r = round(x + residual)")
    assert_bitwise(y, ops.rms_norm(r, w, EPS), "the norm is of r")
    ones = ops.rms_norm(r, torch.ones_like(w), EPS)
    assert_bitwise(y, ones * w, "rounded before the weight, and once after it")


def test_extremes() -> None:
    x = torch.tensor([[0.0] * 8, [1e-20] * 8, [1e18] * 8, [float("nan")] + [1.0] * 7, [1.0] * 8])
    y = ops.rms_norm(x, torch.ones(8), EPS)
    assert_bitwise(y[0], torch.zeros(8), "a row of zeros")
    assert torch.equal(y[2], torch.ones(8)) and bool(torch.isfinite(y[1]).all())
    assert bool(y[3].isnan().all()) and bool(torch.isfinite(y[4]).all())


# ---- invariant


def check_row_alone(rows: int, c: int, row: int, dtype: torch.dtype, seed: int) -> None:
    x, residual, w, dy, dr = data(rows, c, dtype, seed)
    whole = forward_backward(add_norm, (x, residual, w), (dy, dr))
    one = slice(row, row + 1)
    alone = forward_backward(add_norm, (x[one], residual[one], w), (dy[one], dr[one]))
    for name, a, b in zip(("y", "r", "dx", "dresidual"), alone[:4], whole[:4], strict=True):
        assert_bitwise(a[0], b[row], f"{name} of row {row} of {rows} alone")


@properties
@given(st.integers(1, 40), st.integers(1, 150), st.integers(0, 10**6), dtypes, seeds)
def test_row_alone_equals_row_in_batch(rows: int, c: int, row: int, dtype: torch.dtype, seed: int) -> None:
    check_row_alone(rows, c, row % rows, dtype, seed)


def test_row_alone_control() -> None:
    # One long row: stock torch cuts its sum over two threads when the row comes alone.
    with threads(2):
        check = lambda: check_row_alone(8, 70_000, 3, torch.float32, 0)
        check()
        with ops.stock():
            assert differs(check)


@properties
@given(st.integers(2, 40), st.integers(1, 100), dtypes, seeds)
def test_position_in_the_batch_is_free(rows: int, c: int, dtype: torch.dtype, seed: int) -> None:
    x, residual, w, dy, dr = data(rows, c, dtype, seed)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    a = forward_backward(add_norm, (x, residual, w), (dy, dr))
    b = forward_backward(add_norm, (x[order], residual[order], w), (dy[order], dr[order]))
    for i in range(4):
        assert_bitwise(b[i], a[i][order], f"permuted rows, tensor {i}")


def check_micro_batches(pieces: list[int], c: int, dtype: torch.dtype, seed: int) -> None:
    x, _, w, dy, _ = data(sum(pieces), c, dtype, seed)
    w.requires_grad_()
    totals = []
    for split in ([sum(pieces)], pieces):
        w.main_grad = torch.zeros(c)
        for xs, dys in zip(x.split(split), dy.split(split), strict=True):
            w.grad = None
            norm(xs, w).backward(dys)
            if w.grad is not None:  # stock torch: accumulated in fp32 as frameworks do
                w.main_grad += w.grad
        totals.append(w.main_grad)
    assert_bitwise(totals[1], totals[0], f"weight gradient over {pieces}")


@properties
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 150), dtypes, seeds)
def test_micro_batch_split_of_the_weight_gradient(pieces: list[int], c: int, dtype: torch.dtype, seed: int) -> None:
    check_micro_batches(pieces, c, dtype, seed)


def test_micro_batch_control() -> None:
    check_micro_batches([16, 40, 8], 64, torch.float32, 0)
    with ops.stock():
        assert differs(lambda: check_micro_batches([16, 40, 8], 64, torch.float32, 0))


@by_dtype
def test_threads_are_free(dtype: torch.dtype) -> None:
    x, residual, w, dy, dr = data(130, 200, dtype)
    run = lambda: forward_backward(add_norm, (x, residual, w), (dy, dr))
    for i, (one, two) in enumerate(zip(with_threads(1, run), with_threads(2, run), strict=True)):
        assert_bitwise(one, two, f"1 against 2 threads, tensor {i}")


@by_dtype
def test_heads_are_rows(dtype: torch.dtype) -> None:
    x, w, dy = rand(0, 6, 4, 32, dtype=dtype), rand(1, 32, dtype=dtype), rand(2, 6, 4, 32, dtype=dtype)
    heads = forward_backward(norm, (x, w), (dy,))
    rows = forward_backward(norm, (x.view(24, 32), w), (dy.view(24, 32),))
    for i, (a, b) in enumerate(zip(heads, rows, strict=True)):
        assert_bitwise(a.reshape(b.shape), b, f"[T,H,D] against [T*H,D], tensor {i}")
    fused = rand(3, 6, 9, 32, dtype=dtype)
    assert_bitwise(norm(fused[:, 2:5], w), norm(fused[:, 2:5].contiguous(), w), "a slice of fused heads")


# ---- torch's machinery


def test_gradient_through_one_output_alone() -> None:
    x, residual, w, dy, dr = data(5, 40, torch.float32)
    for use, expected_dw in ((0, True), (1, False)):
        leaves = [t.clone().requires_grad_() for t in (x, residual, w)]
        (add_norm(*leaves)[use] * (dy, dr)[use]).sum().backward()
        assert_bitwise(leaves[0].grad, leaves[1].grad, "x and residual share the gradient")
        assert (leaves[2].grad is not None) == expected_dw
        if use == 1:
            assert_bitwise(leaves[0].grad, dr, "r alone passes its gradient through")
        else:
            expected = torch.ops.rlkernel.rms_norm_dgrad(dy, None, x + residual, w, EPS)
            assert_bitwise(leaves[0].grad, expected, "y alone")


# Ops that return their upstream gradient, or a view of it.
HANDING_ON = {
    "a leaf": lambda t: t,
    "a sum": lambda t: t + 0.0,
    "a clone": lambda t: t.clone(),
    "a view": lambda t: t.view(t.shape),
    "a checkpoint": lambda t: checkpoint(lambda x: x - 0.0, t, use_reentrant=False),
}


@pytest.mark.parametrize("shape", ((8,), (4, 8), (2, 2, 8)))
@pytest.mark.parametrize("use", (0, 1))
@pytest.mark.parametrize(
    ("behind", "compiled"),
    # compiled, views of one gradient share memory, also those of torch's own sum
    [(behind, compiled) for behind in HANDING_ON for compiled in (False, True) if not (compiled and "view" in behind)],
)
def test_gradients_of_two_leaves_are_two_tensors(shape: tuple[int, ...], use: int, behind: str, compiled: bool) -> None:
    """Otherwise the second backward adds each to the other, and clipping scales both twice."""
    through = HANDING_ON[behind]
    leaves = [rand(i, *shape).requires_grad_() for i in range(2)]
    twins = [t.detach().clone().requires_grad_() for t in leaves]
    upstream = rand(2, *shape)
    run = lambda x, residual: ops.rms_norm(through(x), torch.ones(8), EPS, through(residual))[use]
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        given = upstream.clone()
        run(*leaves).backward(given)
        add_truth(*twins, torch.ones(8))[use].backward(upstream)
    for leaf, twin in zip(leaves, twins, strict=True):
        torch.testing.assert_close(leaf.grad, twin.grad)
    memory = {t.untyped_storage().data_ptr() for t in (leaves[0].grad, leaves[1].grad, given) if t is not None}
    assert len(memory) == 3


def test_opcheck() -> None:
    r = torch.ops.rlkernel
    x, residual, w, dy, dr = data(6, 20, torch.float32)
    leaves = [t.clone().requires_grad_() for t in (x, residual, w)]
    torch.library.opcheck(r.rms_norm.default, (leaves[0], leaves[2], EPS))
    torch.library.opcheck(r.add_rms_norm.default, (*leaves, EPS))
    torch.library.opcheck(r.rms_norm_dgrad.default, (dy, dr, x, w, EPS))
    torch.library.opcheck(r.rms_norm_dgrad.default, (dy, None, x, w, EPS))
    torch.library.opcheck(r.rms_norm_grad.default, (dy, dr, x, w, EPS))
    torch.library.opcheck(r.rms_norm_grad_.default, (torch.zeros(20), dy, None, x, w, EPS))


def test_compiles() -> None:
    x, residual, w, dy, dr = data(6, 20, torch.float32)
    assert_compiles(norm, (x, w), (dy,))
    assert_compiles(add_norm, (x, residual, w), (dy, dr))


def test_empty_batch() -> None:
    x, residual, w, dy, dr = data(0, 16, torch.float32)
    y, r, dx, _, dw = forward_backward(add_norm, (x, residual, w), (dy, dr))
    assert y.shape == r.shape == dx.shape == (0, 16) and not dw.any()


@pytest.mark.parametrize(
    "changes,message",
    (
        ({"x": rand(0, 2, 6)}, "x must end in C=8"),
        ({"x": rand(0, 2, 8, dtype=torch.float16)}, "cast one of them"),
        ({"weight": rand(0, 2, 8)}, r"weight is \(2, 8\); expected one dimension"),
        ({"residual": rand(0, 8)}, r"residual is \(8,\)"),
        ({"residual": rand(0, 2, 8, dtype=torch.bfloat16)}, "both must have one shape and dtype"),
    ),
)
def test_bad_input(changes: dict, message: str) -> None:
    arguments = {"x": rand(0, 2, 8), "weight": rand(1, 8), "eps": EPS, **changes}
    with pytest.raises(ValueError, match=message):
        ops.rms_norm(**arguments)
