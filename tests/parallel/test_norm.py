"""The norm of whole tensors in plain torch has the bits of `ops.grad_norm`; sharded ones are in `test_updates.py`."""

from __future__ import annotations

import math

import pytest
import torch

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.contract.lane_sum import lane_sum
from rlkernel.parallel.norm import grad_norm, norm_of


@pytest.mark.parametrize("value", (0.5, -0.0, 3e38, 1e-45, math.inf, math.nan))
@pytest.mark.parametrize("max_norm", (None, 0.3))
def test_bits_of_the_op(value: float, max_norm: float | None) -> None:
    torch.manual_seed(0)
    grads = [torch.randn(40000), torch.randn(3, 5).bfloat16(), torch.randn(16384)]
    grads[0][30000] = value
    for found, expected in zip(grad_norm(grads, max_norm), ops.grad_norm(grads, max_norm=max_norm), strict=True):
        assert_bitwise(found.nan_to_num(7.0), expected.nan_to_num(7.0))  # of a NaN only the place is promised


def test_more_segments_than_lanes() -> None:
    squares = [torch.rand(count, dtype=torch.float64) for count in (3000, 5, 1024)]
    found = norm_of(squares, None)
    assert_bitwise(found.squares, torch.stack([lane_sum(each) for each in squares]))
    assert not torch.equal(found.squares, torch.stack([each.cumsum(0)[-1] for each in squares]))  # the control
