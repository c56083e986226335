"""What every op refuses rather than computes wrongly: tensors of two devices, second derivatives, malformed shapes."""

from __future__ import annotations

import pytest
import torch

from rlkernel import ops

X, W = torch.randn(3, 8), torch.randn(5, 8)
CU = torch.tensor([0, 3], dtype=torch.int32)


def test_two_devices() -> None:
    with pytest.raises(ValueError, match="one device"):
        ops.linear(X, W.to("meta"))
    with pytest.raises(ValueError, match="one device"):
        ops.linear_logprob(X, W.to("meta"), torch.tensor([0, 1, 2]))


def test_second_derivative() -> None:
    x = X.clone().requires_grad_(True)
    (grad,) = torch.autograd.grad(ops.linear(x, W).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_shapes() -> None:
    q = torch.randn(3, 2, 8)
    with pytest.raises(ValueError, match="linear: weight"):
        ops.linear(X, W[0])
    with pytest.raises(ValueError, match="rms_norm: weight"):
        ops.rms_norm(X, torch.tensor(1.0), 1e-6)
    with pytest.raises(ValueError, match="head dim 0"):
        ops.attention(q[..., :0], q[..., :0], q[..., :0], CU, max_seqlen_q=3)
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        ops.attention(q, q, q, CU[:0], max_seqlen_q=3)


@pytest.mark.parametrize("eps", (-1.0, float("nan"), float("inf")))
def test_rms_norm_eps(eps: float) -> None:
    with pytest.raises(ValueError, match=rf"rms_norm: eps={eps}; expected a finite number of at least 0"):
        ops.rms_norm(X, torch.ones(8), eps)


def test_autograd_sees_that_an_op_wrote_in_place() -> None:
    keys = torch.zeros(2, 4, 1, 8, requires_grad=True)
    kept, values = keys * 1.0, torch.zeros(2, 4, 1, 8)
    squared = (kept * kept).sum()  # autograd keeps `kept`
    with torch.no_grad():
        new = torch.ones(2, 1, 8)
        ops.store_kv_(kept, values, new, new, torch.tensor([0, 5]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()
    assert values._version == 1
    with torch.inference_mode():  # such tensors have no version
        pages = torch.zeros(2, 4, 1, 8)
        ops.store_kv_(pages, pages.clone(), new, new, torch.tensor([0, 5]))
    assert pages[0, 0, 0, 0] == 1
