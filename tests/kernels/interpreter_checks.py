"""Shared by the tests in Triton's interpreter: exact inputs and the accuracy check."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlkernel.contract import assert_accurate

by_dtype = pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=("fp32", "fp16"))


def whole(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small integers, whose sums of products are exact."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(ours: Tensor, reference: Tensor, what: str, dtype: torch.dtype | None = None) -> None:
    assert ours.dtype == reference.dtype and ours.shape == reference.shape, what
    assert_accurate(ours, reference, None, what, dtype=dtype)
