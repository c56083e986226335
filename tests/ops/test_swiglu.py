"""swiglu: accuracy, and bits that do not depend on an element's place."""

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
from rlkernel.kernels.reference import swiglu as reference

properties = settings(max_examples=25, deadline=None, derandomize=True)


def truth(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


# ---- right


@by_dtype
def test_accuracy(dtype: torch.dtype) -> None:
    gate_up, dy = 4 * rand(0, 33, 2 * 50, dtype=dtype), rand(1, 33, 50, dtype=dtype)
    assert_right(ops.swiglu, truth, (gate_up,), (dy,), f"swiglu {dtype}")


def check_reference(dtype: torch.dtype) -> None:
    gate_up, dy = 8 * rand(0, 9, 2 * 37, dtype=dtype), rand(1, 9, 37, dtype=dtype)
    assert_reference_equal(lambda: forward_backward(ops.swiglu, (gate_up,), (dy,)), f"swiglu {dtype}")


@by_dtype
def test_reference_equals_cpp(dtype: torch.dtype) -> None:
    check_reference(dtype)


def test_reference_control(monkeypatch: pytest.MonkeyPatch) -> None:
    # Stock torch is invariant here as well (it is elementwise); what differs is exp, and the comparison sees it.
    monkeypatch.setattr(reference, "exp", torch.exp)
    assert differs(lambda: check_reference(torch.float32))


def test_rounds_before_the_product() -> None:
    gate_up = rand(0, 40, 2 * 64, dtype=torch.bfloat16)
    gate, up = gate_up.chunk(2, dim=-1)
    ones = torch.cat((gate, torch.ones_like(up)), dim=-1)
    assert_bitwise(ops.swiglu(gate_up), ops.swiglu(ones) * up, "round(round(silu) * up)")


def test_extremes() -> None:
    gate = torch.tensor([0.0, -0.0, 100.0, -100.0, 1e30, -1e30, float("inf"), float("nan")])
    gate_up = torch.stack((gate, torch.ones_like(gate)), dim=-1)
    y, grad = forward_backward(ops.swiglu, (gate_up,), (torch.ones(8, 1),))
    assert y[:6, 0].tolist() == [0.0, 0.0, 100.0, 0.0, float(torch.tensor(1e30)), 0.0]
    assert bool(torch.signbit(y[[1, 3, 5], 0]).all()), "negative zeros"
    assert float(y[6]) == float("inf") and bool(y[7].isnan())
    assert grad[:6, 0].tolist() == [0.5, 0.5, 1.0, 0.0, 1.0, 0.0]


# ---- invariant


@properties
@given(st.integers(1, 40), st.integers(1, 90), st.integers(0, 10**6), st.sampled_from(DTYPES), st.integers(0, 2**16))
def test_any_row_any_width(rows: int, width: int, pick: int, dtype: torch.dtype, seed: int) -> None:
    gate_up, dy = 3 * rand(seed, rows, 2 * width, dtype=dtype), rand(seed + 1, rows, width, dtype=dtype)
    y, grad = forward_backward(ops.swiglu, (gate_up,), (dy,))
    row, column = pick % rows, pick % width
    alone = forward_backward(ops.swiglu, (gate_up[row : row + 1],), (dy[row : row + 1],))
    assert_bitwise(alone[0][0], y[row], f"row {row} alone")
    assert_bitwise(alone[1][0], grad[row], f"gradient of row {row} alone")
    one = forward_backward(ops.swiglu, (gate_up[:, [column, width + column]],), (dy[:, [column]],))
    assert_bitwise(one[0][:, 0], y[:, column], f"channel {column} alone (a tensor-parallel shard)")
    assert_bitwise(one[1][:, 1], grad[:, width + column], f"gradient of up channel {column} alone")


@by_dtype
def test_threads_are_free(dtype: torch.dtype) -> None:
    gate_up, dy = rand(0, 150, 400, dtype=dtype), rand(1, 150, 200, dtype=dtype)
    run = lambda: forward_backward(ops.swiglu, (gate_up,), (dy,))
    for i, (one, two) in enumerate(zip(with_threads(1, run), with_threads(2, run), strict=True)):
        assert_bitwise(one, two, f"1 against 2 threads, tensor {i}")


# ---- torch's machinery


def test_opcheck_and_compile() -> None:
    gate_up, dy = rand(0, 6, 20), rand(1, 6, 10)
    torch.library.opcheck(torch.ops.rlkernel.swiglu.default, (gate_up.clone().requires_grad_(),))
    torch.library.opcheck(torch.ops.rlkernel.swiglu_grad.default, (dy, gate_up))
    assert_compiles(ops.swiglu, (gate_up,), (dy,))


def test_leading_shapes_views_and_empty_batches() -> None:
    gate_up = rand(0, 2, 3, 20)
    assert_bitwise(ops.swiglu(gate_up).view(6, 10), ops.swiglu(gate_up.view(6, 20)), "leading shape")
    assert_bitwise(ops.swiglu(gate_up[:, 1]), ops.swiglu(gate_up[:, 1].contiguous()), "strided rows")
    assert ops.swiglu(rand(0, 0, 20)).shape == (0, 10)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"gate_up is \(2, 7\); its last dimension must be even"):
        ops.swiglu(rand(0, 2, 7))
