"""layer_norm and gelu: accurate against fp64, the same bits in any batch; stock torch shows that the check can fail."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from op_checks import assert_reference_equal, assert_right, by_dtype, forward_backward, rand
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_bitwise


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return ops.layer_norm(x, weight, bias, 1e-6)


@by_dtype
@pytest.mark.parametrize("width", (20, 32, 1280))
def test_layer_norm_accuracy(dtype: torch.dtype, width: int) -> None:
    inputs = [rand(0, 9, width, dtype=dtype) * 3 + 1, rand(1, width, dtype=dtype) + 1, rand(2, width, dtype=dtype)]
    truth = lambda x, w, b: F.layer_norm(x, (width,), w, b, 1e-6)
    assert_right(norm, truth, inputs, [rand(3, 9, width)], f"layer_norm {dtype} C={width}")


@by_dtype
@pytest.mark.parametrize("approximate", ("none", "tanh"))
def test_gelu_accuracy(dtype: torch.dtype, approximate: str) -> None:
    x = torch.cat((torch.linspace(-9, 9, 1001), rand(0, 999))).to(dtype)
    op = lambda x: ops.gelu(x, approximate)
    truth = lambda x: F.gelu(x, approximate=approximate)
    assert_right(op, truth, [x], [rand(1, 2000)], f"gelu {approximate} {dtype}")


@by_dtype
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    x, weight, bias = rand(0, 50, 72, dtype=dtype), rand(1, 72, dtype=dtype), rand(2, 72, dtype=dtype)
    run = lambda x: ops.gelu(ops.gelu(norm(x, weight, bias)), "tanh")
    upstream = rand(3, 50, 72)
    whole = forward_backward(run, [x], [upstream])
    for rows in (slice(0, 1), slice(7, 20), slice(49, 50)):
        part = forward_backward(run, [x[rows]], [upstream[rows]])
        for name, a, b in zip(("out", "dx"), part, whole, strict=True):
            assert_bitwise(a, b[rows], f"{name} of rows {rows}")
    assert_reference_equal(lambda: forward_backward(run, [x[:5]], [upstream[:5]]), "composed")


def test_micro_batches_continue_main_grad() -> None:
    x, upstream = rand(0, 30, 16, dtype=torch.bfloat16), rand(1, 30, 16)
    grads = []
    for cut in (30, 11):
        weight, bias = (rand(i, 16, dtype=torch.bfloat16).requires_grad_() for i in (2, 3))
        for p in (weight, bias):
            p.main_grad = torch.zeros(16)  # type: ignore[attr-defined]
        for rows in (slice(0, cut), slice(cut, 30)):
            norm(x[rows], weight, bias).backward(upstream[rows].bfloat16())
        assert weight.grad is None and bias.grad is None
        grads.append((weight.main_grad, bias.main_grad))  # type: ignore[attr-defined]
    assert_bitwise(grads[0][0], grads[1][0], "weight gradient")
    assert_bitwise(grads[0][1], grads[1][1], "bias gradient")


def test_refusals() -> None:
    x = rand(0, 2, 4)
    with pytest.raises(ValueError, match=r"layer_norm: x is \(2, 4\), weight \(3,\)"):
        ops.layer_norm(x, rand(1, 3), rand(1, 4), 1e-6)
    with pytest.raises(ValueError, match="approximate='erf'"):
        ops.gelu(x, "erf")
