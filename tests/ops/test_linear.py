"""linear: accurate against fp64, the same bits in any batch, tile, thread count, fused weight or token split."""

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
    with_threads,
)
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_bitwise

properties = settings(max_examples=20, deadline=None, derandomize=True)
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**16)


def tree(parts: list[Tensor]) -> Tensor:
    """The balanced binary tree of the contract."""
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    return parts[0]


def gradients(x: Tensor, w: Tensor, dy: Tensor, pieces: list[int], bias: Tensor | None = None) -> list[Tensor]:
    """main_grad of the weight (and the bias) after one backward per piece of the tokens."""
    w = w.clone().requires_grad_()
    w.main_grad = torch.zeros(w.shape)
    if bias is not None:
        bias = bias.clone().requires_grad_()
        bias.main_grad = torch.zeros(bias.shape)
    for xs, dys in zip(x.split(pieces), dy.split(pieces), strict=True):
        ops.linear(xs, w, bias).backward(dys)
    assert w.grad is None
    return [w.main_grad] if bias is None else [w.main_grad, bias.main_grad]


# ---- right


@by_dtype
@pytest.mark.parametrize("chunks", (1, 4))
def test_accuracy(dtype: torch.dtype, chunks: int) -> None:
    x, w, b, dy = (rand(i, *shape, dtype=dtype) for i, shape in enumerate(((33, 96), (40, 96), (40,), (33, 40))))
    assert_right(
        lambda x, w, b: ops.linear(x, w, b, chunks=chunks, dgrad_chunks=chunks),
        torch.nn.functional.linear,
        (x, w, b),
        (dy,),
        f"linear {dtype} chunks={chunks}",
    )


def test_float32_output_of_bf16_is_not_rounded() -> None:
    x, w = rand(0, 5, 64, dtype=torch.bfloat16), rand(1, 7, 64, dtype=torch.bfloat16)
    wide = ops.linear(x, w, out_dtype=torch.float32)
    assert_bitwise(wide, ops.linear(x.float(), w.float()), "bf16 operands, fp32 result")
    assert_bitwise(wide.bfloat16(), ops.linear(x, w), "one rounding at the end")


def test_chain_has_one_fma_a_step() -> None:
    # 1 + 2^-24 is lost in fp32; the exact product -(1 + 2^-23)(1 - 2^-23) = -1 + 2^-46 keeps it inside one fma.
    eps = 2.0**-23
    y = ops.linear(torch.tensor([[1.0, -(1.0 + eps)]]), torch.tensor([[1.0, 1.0 - eps]]))
    assert float(y) == eps**2


@by_dtype
@pytest.mark.parametrize("m,n,k,chunks", ((1, 5, 7, 1), (3, 33, 20, 4), (13, 35, 16, 2), (2, 17, 300, 2)))
def test_reference_equals_cpp(dtype: torch.dtype, m: int, n: int, k: int, chunks: int) -> None:
    x, w, b, dy = (
        rand(0, m, k, dtype=dtype),
        rand(1, n, k, dtype=dtype),
        rand(2, n, dtype=dtype),
        rand(3, m, n, dtype=dtype),
    )

    def run() -> list[Tensor]:
        return forward_backward(lambda x, w, b: ops.linear(x, w, b, chunks=chunks), (x, w, b), (dy,))

    assert_reference_equal(run, f"linear {dtype} {(m, n, k, chunks)}")
    with_four = lambda: torch.ops.rlkernel.linear_dgrad(rand(4, m, 8, dtype=dtype), rand(5, 8, k, dtype=dtype), 4)
    assert_reference_equal(with_four, f"linear_dgrad {dtype}")


# ---- invariant


def check_row_alone(m: int, n: int, k: int, row: int, dtype: torch.dtype, seed: int, chunks: int = 1) -> None:
    x, w = rand(seed, m, k, dtype=dtype), rand(seed + 1, n, k, dtype=dtype)
    alone = ops.linear(x[row : row + 1], w, chunks=chunks)
    assert_bitwise(alone[0], ops.linear(x, w, chunks=chunks)[row], f"row {row} of {m} alone")


@properties
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 80), st.integers(0, 10**6), dtypes, seeds)
def test_row_alone_equals_row_in_batch(m: int, n: int, k: int, row: int, dtype: torch.dtype, seed: int) -> None:
    check_row_alone(m, n, k, row % m, dtype, seed)


@pytest.mark.parametrize("m,n,k", ((256, 256, 256), (64, 128, 1024)))
def test_row_alone_control(m: int, n: int, k: int) -> None:
    for row in (0, 17, m - 1):
        check_row_alone(m, n, k, row, torch.float32, 0)
        with ops.stock():
            assert differs(lambda row=row: check_row_alone(m, n, k, row, torch.float32, 0))


@properties
@given(st.integers(2, 60), st.integers(1, 40), st.integers(1, 64), dtypes, seeds)
def test_position_in_the_batch_is_free(m: int, n: int, k: int, dtype: torch.dtype, seed: int) -> None:
    x, w, dy = rand(seed, m, k, dtype=dtype), rand(seed + 1, n, k, dtype=dtype), rand(seed + 2, m, n, dtype=dtype)
    order = torch.randperm(m, generator=torch.Generator().manual_seed(seed))
    y, dx, _ = forward_backward(ops.linear, (x, w), (dy,))
    y2, dx2, _ = forward_backward(ops.linear, (x[order], w), (dy[order],))
    assert_bitwise(y2, y[order], "permuted rows")
    assert_bitwise(dx2, dx[order], "input gradient of permuted rows")


@properties
@given(st.integers(1, 30), st.integers(2, 70), st.integers(1, 60), st.integers(1, 10**6), dtypes, seeds)
def test_fused_weights_split(m: int, n: int, k: int, cut: int, dtype: torch.dtype, seed: int) -> None:
    x, w, b = rand(seed, m, k, dtype=dtype), rand(seed + 1, n, k, dtype=dtype), rand(seed + 2, n, dtype=dtype)
    cut = 1 + cut % (n - 1)
    separate = [ops.linear(x, w[s], b[s]) for s in (slice(0, cut), slice(cut, n))]
    assert_bitwise(torch.cat(separate, dim=-1), ops.linear(x, w, b), f"weights fused at row {cut}")


@properties
@given(st.integers(1, 20), st.integers(1, 40), st.integers(1, 12), st.sampled_from((1, 2, 4, 8)), dtypes, seeds)
def test_chunks_are_tensor_parallel_ranks(m: int, n: int, span: int, p: int, dtype: torch.dtype, seed: int) -> None:
    x, w = rand(seed, m, span * p, dtype=dtype), rand(seed + 1, n, span * p, dtype=dtype)
    ranks = [
        ops.linear(xs.contiguous(), ws.contiguous(), out_dtype=torch.float32)
        for xs, ws in zip(x.split(span, 1), w.split(span, 1), strict=True)
    ]
    assert_bitwise(tree(ranks).to(dtype), ops.linear(x, w, chunks=p), f"{p} ranks against {p} chunks")
    if p > 2:
        halves = x.split(span * p // 2, 1), w.split(span * p // 2, 1)
        ranks = [ops.linear(a, b, chunks=p // 2, out_dtype=torch.float32) for a, b in zip(*halves, strict=True)]
        assert_bitwise(tree(ranks).to(dtype), ops.linear(x, w, chunks=p), f"2 ranks of {p // 2} chunks")


def test_chunks_control() -> None:
    def check() -> None:
        x, w = rand(0, 8, 512), rand(1, 16, 512)
        ranks = [
            ops.linear(a.contiguous(), b.contiguous()) for a, b in zip(x.split(128, 1), w.split(128, 1), strict=True)
        ]
        assert_bitwise(tree(ranks), ops.linear(x, w, chunks=4), "4 ranks")

    check()
    with ops.stock():
        assert differs(check)


@by_dtype
def test_threads_are_free(dtype: torch.dtype) -> None:
    x, w, b, dy = (rand(i, *s, dtype=dtype) for i, s in enumerate(((65, 130), (150, 130), (150,), (65, 150))))
    run = lambda: forward_backward(lambda x, w, b: ops.linear(x, w, b, chunks=2), (x, w, b), (dy,))
    for i, (one, two) in enumerate(zip(with_threads(1, run), with_threads(2, run), strict=True)):
        assert_bitwise(one, two, f"1 against 2 threads, tensor {i}")


def check_micro_batches(m: int, n: int, k: int, pieces: list[int], dtype: torch.dtype, seed: int) -> None:
    x, w, dy = rand(seed, m, k, dtype=dtype), rand(seed + 1, n, k, dtype=dtype), rand(seed + 2, m, n, dtype=dtype)
    whole = gradients(x, w, dy, [m], rand(seed + 3, n, dtype=dtype))
    split = gradients(x, w, dy, pieces, rand(seed + 3, n, dtype=dtype))
    for name, a, b in zip(("weight", "bias"), split, whole, strict=True):
        assert_bitwise(a, b, f"{name} gradient over {pieces}")


@properties
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 40), st.integers(1, 40), dtypes, seeds)
def test_micro_batch_split_of_weight_gradients(
    pieces: list[int], n: int, k: int, dtype: torch.dtype, seed: int
) -> None:
    check_micro_batches(sum(pieces), n, k, pieces, dtype, seed)


def test_micro_batch_control() -> None:
    def check() -> None:
        x, w, dy = rand(0, 64, 48), rand(1, 32, 48).requires_grad_(), rand(2, 64, 32)
        total = torch.zeros(2, 32, 48)
        for i, pieces in enumerate(([64], [16, 40, 8])):
            for xs, dys in zip(x.split(pieces), dy.split(pieces), strict=True):
                w.grad, w.main_grad = None, total[i]
                ops.linear(xs, w).backward(dys)
                if w.grad is not None:  # stock torch: accumulated in fp32 as frameworks do
                    total[i] += w.grad
        assert_bitwise(total[1], total[0], "weight gradient")

    check()
    with ops.stock():
        assert differs(check)


def test_a_row_of_nan_stays_in_its_row() -> None:
    x, w = rand(0, 14, 20), rand(1, 40, 20)
    clean = ops.linear(x, w)
    x[5] = float("nan")
    y = ops.linear(x, w)
    assert bool(y[5].isnan().all())
    keep = torch.arange(14) != 5
    assert_bitwise(y[keep], clean[keep], "rows next to the NaN")


# ---- torch's machinery


def test_opcheck() -> None:
    r = torch.ops.rlkernel
    x, w, b = rand(0, 6, 16).requires_grad_(), rand(1, 8, 16).requires_grad_(), rand(2, 8).requires_grad_()
    torch.library.opcheck(r.linear.default, (x, w, b, 2, 2, None))
    torch.library.opcheck(r.linear.default, (x.bfloat16(), w.bfloat16(), None, 1, 1, torch.float32))
    torch.library.opcheck(r.linear_dgrad.default, (rand(3, 6, 8), w.detach(), 2))
    torch.library.opcheck(r.linear_wgrad.default, (rand(3, 6, 8), x.detach()))
    torch.library.opcheck(r.linear_wgrad_.default, (torch.zeros(8, 16), rand(3, 6, 8), x.detach()))
    torch.library.opcheck(r.bias_grad_.default, (torch.zeros(8), rand(3, 6, 8)))


def test_compiles() -> None:
    assert_compiles(
        lambda x, w, b: ops.linear(x, w, b, chunks=2),
        (rand(0, 2, 3, 8), rand(1, 4, 8), rand(2, 4)),
        (rand(3, 2, 3, 4),),
    )


def test_leading_shapes_views_and_empty_batches() -> None:
    x, w = rand(0, 2, 3, 8), rand(1, 8, 5)
    y = ops.linear(x, w.t())
    assert_bitwise(y.view(6, 5), ops.linear(x.view(6, 8), w.t().contiguous()), "leading shape and transposed weight")
    strided = rand(2, 6, 16)[:, ::2]
    assert_bitwise(ops.linear(strided, w.t()), ops.linear(strided.contiguous(), w.t()), "strided x")
    y, dx, dw = forward_backward(ops.linear, (rand(0, 0, 8), rand(1, 5, 8)), (rand(2, 0, 5),))
    assert y.shape == (0, 5) and dx.shape == (0, 8) and not dw.any()


def test_only_the_wanted_gradients_are_computed() -> None:
    x, w = rand(0, 4, 8), rand(1, 5, 8).requires_grad_()
    ops.linear(x, w).sum().backward()
    assert x.grad is None and w.grad is not None
    frozen, x = rand(1, 5, 8), x.requires_grad_()
    ops.linear(x, frozen).sum().backward()
    assert x.grad is not None and frozen.grad is None


@pytest.mark.parametrize(
    "kwargs,message",
    (
        ({"x": rand(0, 2, 6)}, "x must end in K=8"),
        ({"x": rand(0, 2, 8, dtype=torch.bfloat16)}, "cast one of them"),
        ({"chunks": 3}, "chunks=3 must be a power of two that divides 8"),
        ({"chunks": 16}, "chunks=16 must be a power of two that divides 8"),
        ({"chunks": 0}, "chunks=0 must be"),
        ({"dgrad_chunks": 2}, "dgrad_chunks=2 must be a power of two that divides 5"),
        ({"bias": rand(0, 4)}, r"bias is \(4,\)"),
        ({"bias": rand(0, 5, dtype=torch.float16)}, r"bias is \(5,\) torch.float16"),
    ),
)
def test_bad_input(kwargs: dict, message: str) -> None:
    arguments = {"x": rand(0, 2, 8), "weight": rand(1, 5, 8), **kwargs}
    with pytest.raises(ValueError, match=message):
        ops.linear(**arguments)


def test_main_grad_must_be_float32_of_the_same_shape() -> None:
    for bad in (torch.zeros(5, 8, dtype=torch.bfloat16), torch.zeros(8, 5), torch.zeros(8, 5).t()):
        w = rand(1, 5, 8).requires_grad_()
        w.main_grad = bad
        with pytest.raises(ValueError, match=r"main_grad is .* expected a contiguous float32"):
            ops.linear(rand(0, 2, 8), w).sum().backward()


def test_unsupported_dtype_is_named() -> None:
    with pytest.raises(TypeError, match=r"linear: x is torch.float64; expected float32, .* cast it"):
        ops.linear(rand(0, 2, 8).double(), rand(1, 5, 8).double())
