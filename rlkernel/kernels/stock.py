"""Plain torch for every op: the control arm (`--backend torch`) and the baseline of the accuracy tests.

Nothing here keeps the contract. Inputs and outputs are those of the public ops.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    y = F.linear(x, weight, bias)
    return y if out_dtype is None else y.to(out_dtype)
