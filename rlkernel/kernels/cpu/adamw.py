"""adamw_ and grad_norm on the CPU: launchers of `csrc/cpu/adamw.cpp`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlkernel.kernels.adamw import AdamwInputs, coefficients
from rlkernel.kernels.cpu.library import CPU, FLOATS, code, function, pointer, threads


def adamw_(x: AdamwInputs) -> None:
    near_mean, *numbers = coefficients(x)
    tables = (
        _sizes(x.masters),
        _pointers(x.masters),
        _pointers(x.grads),
        _codes(x.grads),
        _pointers(x.exp_avgs),
        _pointers(x.exp_avg_sqs),
        _pointers(x.params) if x.params else None,
        _codes(x.params) if x.params else None,
        x.scale,
        torch.tensor(numbers, **FLOATS),
    )
    function("rlk_adamw", "p" * 10 + "liii")(
        *(pointer(t) for t in tables), len(x.masters), near_mean, x.zero_grad, threads()
    )


def grad_norm(grads: list[Tensor], loss_scale: Tensor | None, max_norm: float | None) -> tuple[Tensor, Tensor, Tensor]:
    squares = torch.empty(len(grads), dtype=torch.float64, device=CPU)
    norm, scale = torch.empty((), dtype=torch.float64, device=CPU), torch.empty((), **FLOATS)
    tables = (_sizes(grads), _pointers(grads), _codes(grads), loss_scale, squares, norm, scale)
    limit = float("inf") if max_norm is None else max_norm
    function("rlk_grad_norm", "p" * 7 + "lfi")(*(pointer(t) for t in tables), len(grads), limit, threads())
    return norm, scale, squares


def _sizes(tensors: Sequence[Tensor]) -> Tensor:
    return torch.tensor([t.numel() for t in tensors], dtype=torch.int64, device=CPU)


def _pointers(tensors: Sequence[Tensor]) -> Tensor:
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=CPU)


def _codes(tensors: Sequence[Tensor]) -> Tensor:
    return torch.tensor([code(t.dtype) for t in tensors], dtype=torch.int32, device=CPU)
