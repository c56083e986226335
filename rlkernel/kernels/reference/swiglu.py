"""Reference of swiglu: silu(x) = x / (1 + exp(-x)) in fp32, rounded before the product with up."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels.reference.arith import exp, fma


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    silu = (gate / (1.0 + exp(-gate))).to(gate_up.dtype)
    return (silu.float() * up).to(gate_up.dtype)


def swiglu_grad(dy: Tensor, gate_up: Tensor) -> Tensor:
    d = dy.float()
    gate, up = gate_up.float().chunk(2, dim=-1)
    below = 1.0 + exp(-gate)
    s = 1.0 / below
    dup = d * (gate / below).to(dy.dtype).float()
    dgate = (d * up) * (s * fma(gate, 1.0 - s, torch.ones_like(s)))
    return torch.cat((dgate, dup), dim=-1).to(dy.dtype)
