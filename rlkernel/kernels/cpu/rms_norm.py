"""rms_norm on the CPU: launchers of `csrc/cpu/rms_norm.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels.cpu.library import FLOATS, code, function, pointer, threads


def _rows(x: Tensor) -> tuple[int, int]:
    """Rows of x [..., C], and C."""
    return x.numel() // x.shape[-1], x.shape[-1]


def _forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
    x, weight = x.contiguous(), weight.contiguous()
    residual = None if residual is None else residual.contiguous()
    y = torch.empty_like(x)
    r = None if residual is None else torch.empty_like(x)
    function("rlk_rms_norm", "pppppllfii")(
        x.data_ptr(),
        pointer(residual),
        weight.data_ptr(),
        y.data_ptr(),
        pointer(r),
        *_rows(x),
        eps,
        code(x.dtype),
        threads(),
    )
    return y, r


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _forward(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, r = _forward(x, residual, weight, eps)
    assert r is not None
    return y, r


def rms_norm_dgrad(dy: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    dr = None if dr is None else dr.contiguous()
    dx = torch.empty_like(x)
    function("rlk_rms_norm_dgrad", "pppppllfii")(
        dy.data_ptr(),
        pointer(dr),
        x.data_ptr(),
        weight.data_ptr(),
        dx.data_ptr(),
        *_rows(x),
        eps,
        code(x.dtype),
        threads(),
    )
    return dx


def _wgrad_(grad: Tensor, dy: Tensor, x: Tensor, eps: float) -> None:
    dy, x = dy.contiguous(), x.contiguous()
    function("rlk_rms_norm_wgrad", "pppllfii")(
        dy.data_ptr(), x.data_ptr(), grad.data_ptr(), *_rows(x), eps, code(x.dtype), threads()
    )


def rms_norm_grad(dy: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dw = torch.zeros(weight.shape, **FLOATS)
    return rms_norm_grad_(dw, dy, dr, x, weight, eps), dw.to(weight.dtype)


def rms_norm_grad_(grad: Tensor, dy: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    _wgrad_(grad, dy, x, eps)
    return rms_norm_dgrad(dy, dr, x, weight, eps)
