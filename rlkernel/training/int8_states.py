"""Optimizer moments in 8 bits: blocks of 256 values, each value an entry of a table times the block's largest size.

Source: Dettmers et al., arXiv:2110.02861 (block-wise dynamic quantization). Division, product and comparison are exact
operations of IEEE arithmetic and a maximum has no order, so the bytes do not depend on threads, slices or device.
"""

from __future__ import annotations

import functools
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256


def quantize(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:  # [n] fp32 -> [n] uint8, [ceil(n/256)] fp32
    """Codes of the nearest table entries, and the largest size of each block.

    Args:
        values: a first moment (signed), or a second one (not negative). A second moment above 0 never becomes 0,
            because a step divides by its root: it becomes at least the table's smallest entry.
    """
    blocks = F.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1)
    relative = blocks / torch.where(largest > 0, largest, 1.0)[:, None]
    codes = torch.bucketize(relative, _tables(signed, values.device)[1], out_int32=True)
    return codes.to(torch.uint8).view(-1)[: values.numel()], largest


def dequantize(codes: Tensor, largest: Tensor, signed: bool) -> Tensor:  # [n] uint8, [ceil(n/256)] fp32 -> [n] fp32
    """The values that codes stand for."""
    table = _tables(signed, codes.device)[0]
    blocks = F.pad(codes, (0, -codes.numel() % BLOCK)).view(-1, BLOCK)
    return (table[blocks.int()] * largest[:, None]).view(-1)[: codes.numel()]


@functools.cache
def _tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """(256 entries ascending, 255 borders between their codes) in fp32.

    A decade [10^-(e+1), 10^-e] below 1 has half as many entries as the one above it: relative precision is highest near
    the block's largest value, and the smallest entries are about 10^-7 of it.
    """
    positive = [1.0]
    for exponent in range(7):
        count = (64 if signed else 128) >> exponent
        positive += [(0.1 + 0.9 * (i + 0.5) / count) * 10.0**-exponent for i in range(count)]
    entries = sorted([*positive, 0.0, *([-entry for entry in positive[1:]] if signed else [])])
    borders = [(low + high) / 2 for low, high in itertools.pairwise(entries)]
    if not signed:
        borders[0] = 0.0
    return tuple(torch.tensor(row, dtype=torch.float32, device=device) for row in (entries, borders))  # type: ignore[return-value]
