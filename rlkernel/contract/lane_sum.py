"""The order in which sums of squares are added, over segments, over a tensor's segments and over tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.contract.orders import SEGMENT


def lane_sum(x: Tensor) -> Tensor:  # [..., n] -> [...]
    """Sum over the last dimension: lane j of SEGMENT adds the elements j, j + SEGMENT, ...; neighbours form a tree."""
    rows = torch.nn.functional.pad(x, (0, -x.shape[-1] % SEGMENT)).unflatten(-1, (-1, SEGMENT))
    lanes = x.new_zeros(*x.shape[:-1], SEGMENT)
    for row in rows.unbind(-2):
        lanes = lanes + row
    while lanes.shape[-1] > 1:
        lanes = lanes[..., 0::2] + lanes[..., 1::2]
    return lanes[..., 0]
