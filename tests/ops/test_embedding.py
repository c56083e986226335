"""embedding: the forward is a copy, and no split of the tokens changes the gradient."""

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
from rlkernel.kernels import select

properties = settings(max_examples=25, deadline=None, derandomize=True)


def tokens(t: int, v: int, seed: int = 0) -> Tensor:
    return torch.randint(0, v, (t,), generator=torch.Generator().manual_seed(seed))


# ---- right


@by_dtype
def test_accuracy(dtype: torch.dtype) -> None:
    ids, weight, dy = tokens(200, 9), rand(0, 9, 20, dtype=dtype), rand(1, 200, 20, dtype=dtype)
    assert_right(
        lambda w: ops.embedding(ids, w), lambda w: torch.nn.functional.embedding(ids, w), (weight,), (dy,), "embedding"
    )


@by_dtype
def test_forward_is_a_copy(dtype: torch.dtype) -> None:
    ids, weight = tokens(30, 9), rand(0, 9, 21, dtype=dtype)
    weight[3, 0], weight[4, 1] = float("nan"), -0.0
    assert_bitwise(ops.embedding(ids, weight), weight[ids], "rows")


@by_dtype
def test_reference_equals_cpp(dtype: torch.dtype) -> None:
    ids, weight, dy = tokens(40, 6), rand(0, 6, 70, dtype=dtype), rand(1, 40, 70, dtype=dtype)
    run = lambda: forward_backward(lambda w: ops.embedding(ids, w), (weight,), (dy,))
    assert_reference_equal(run, f"embedding {dtype}")


def test_gradient_is_the_ascending_chain() -> None:
    ids, dy = tokens(50, 3), rand(1, 50, 17)
    grad = torch.zeros(3, 17)
    torch.ops.rlkernel.embedding_wgrad_(grad, dy, ids)
    for v in range(3):
        chain = torch.zeros(17)
        for row in dy[ids == v]:
            chain = chain + row
        assert_bitwise(grad[v], chain, f"id {v}")


# ---- invariant


def check_micro_batches(pieces: list[int], v: int, c: int, dtype: torch.dtype, seed: int) -> None:
    total = sum(pieces)
    ids, weight, dy = tokens(total, v, seed), rand(seed, v, c, dtype=dtype), rand(seed + 1, total, c, dtype=dtype)
    weight.requires_grad_()
    sums = []
    for split in ([total], pieces):
        weight.main_grad = torch.zeros(v, c)
        for i, g in zip(ids.split(split), dy.split(split), strict=True):
            weight.grad = None
            ops.embedding(i, weight).backward(g)
            if weight.grad is not None:  # stock torch: accumulated in fp32 as frameworks do
                weight.main_grad += weight.grad
        sums.append(weight.main_grad)
    assert_bitwise(sums[1], sums[0], f"gradient over {pieces}")


@properties
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(1, 12),
    st.integers(1, 80),
    st.sampled_from(DTYPES),
    st.integers(0, 2**16),
)
def test_micro_batch_split(pieces: list[int], v: int, c: int, dtype: torch.dtype, seed: int) -> None:
    check_micro_batches(pieces, v, c, dtype, seed)


@by_dtype
def test_micro_batch_control(dtype: torch.dtype) -> None:
    check_micro_batches([10, 30, 20], 3, 16, dtype, 0)
    with ops.stock():
        assert differs(lambda: check_micro_batches([10, 30, 20], 3, 16, dtype, 0))


@properties
@given(st.integers(1, 60), st.integers(1, 40), st.integers(2, 90), st.integers(1, 10**6), st.integers(0, 2**16))
def test_ids_and_channels_are_independent(t: int, v: int, c: int, cut: int, seed: int) -> None:
    ids, weight, dy = tokens(t, v, seed), rand(seed, v, c), rand(seed + 1, t, c)
    cut = 1 + cut % (c - 1)
    _, grad = forward_backward(lambda w: ops.embedding(ids, w), (weight,), (dy,))
    _, shard = forward_backward(lambda w: ops.embedding(ids, w), (weight[:, :cut],), (dy[:, :cut],))
    assert_bitwise(shard, grad[:, :cut], f"channels below {cut} alone")
    only = ids == ids[0]
    _, one = forward_backward(lambda w: ops.embedding(ids[only], w), (weight,), (dy[only],))
    assert_bitwise(one[ids[0]], grad[ids[0]], "one id's tokens without the others")


@by_dtype
def test_threads_are_free(dtype: torch.dtype) -> None:
    ids, weight, dy = tokens(300, 12), rand(0, 12, 200, dtype=dtype), rand(1, 300, 200, dtype=dtype)
    run = lambda: forward_backward(lambda w: ops.embedding(ids, w), (weight,), (dy,))
    for i, (one, two) in enumerate(zip(with_threads(1, run), with_threads(2, run), strict=True)):
        assert_bitwise(one, two, f"1 against 2 threads, tensor {i}")


# ---- torch's machinery


def test_opcheck_and_compile() -> None:
    ids, weight, dy = tokens(6, 5), rand(0, 5, 8), rand(1, 6, 8)
    torch.library.opcheck(torch.ops.rlkernel.embedding.default, (ids, weight.clone().requires_grad_()))
    torch.library.opcheck(torch.ops.rlkernel.embedding_wgrad_.default, (torch.zeros(5, 8), dy, ids))
    assert_compiles(lambda w: ops.embedding(ids, w), (weight,), (dy,))


def test_leading_shapes_and_empty_batches() -> None:
    weight = rand(0, 5, 8)
    ids = tokens(6, 5).view(2, 3)
    assert_bitwise(ops.embedding(ids, weight), weight[ids], "two dimensions of ids")
    assert ops.embedding(tokens(0, 5), weight).shape == (0, 8)


@pytest.mark.parametrize("implementation", ("cpu", "reference"))
@pytest.mark.parametrize("bad", (-1, 5, 2**40))
def test_id_outside_the_vocabulary(bad: int, implementation: str) -> None:
    ids = torch.tensor([0, 4, bad, 2])
    with select.use(implementation), pytest.raises(IndexError, match=rf"ids\[2\] is {bad}; .*< 5 = V"):
        ops.embedding(ids, rand(0, 5, 8))
    with select.use(implementation), pytest.raises(IndexError, match=r"ids\[2\]"):
        torch.ops.rlkernel.embedding_wgrad_(torch.zeros(5, 8), rand(1, 4, 8), ids)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"ids is torch.int32; expected int64"):
        ops.embedding(torch.zeros(2, dtype=torch.int32), rand(0, 5, 8))
    with pytest.raises(ValueError, match=r"weight is \(8,\); expected \[V, C\]"):
        ops.embedding(tokens(2, 5), rand(0, 8))
