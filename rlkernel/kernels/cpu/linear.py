"""linear on the CPU: launchers of `csrc/cpu/linear.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels.cpu.library import CPU, code, function, pointer, threads


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, chunks: int, dgrad_chunks: int, out_dtype: torch.dtype | None
) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    (m, k), n = x.shape, weight.shape[0]
    y = torch.empty(m, n, dtype=out_dtype or x.dtype, device=CPU)
    function("rlk_linear", "ppppllliiii")(
        x.data_ptr(),
        weight.data_ptr(),
        pointer(bias),
        y.data_ptr(),
        m,
        n,
        k,
        chunks,
        code(x.dtype),
        code(y.dtype),
        threads(),
    )
    return y


def linear_dgrad(dy: Tensor, weight: Tensor, chunks: int) -> Tensor:
    dy, weight = dy.contiguous(), weight.contiguous()
    n, k = weight.shape
    dx = torch.empty(dy.shape[0], k, dtype=dy.dtype, device=CPU)
    function("rlk_linear_dgrad", "pppllliii")(
        dy.data_ptr(), weight.data_ptr(), dx.data_ptr(), dy.shape[0], n, k, chunks, code(dy.dtype), threads()
    )
    return dx


def linear_wgrad_(grad: Tensor, dy: Tensor, x: Tensor) -> None:
    dy, x = dy.contiguous(), x.contiguous()
    n, k = grad.shape
    function("rlk_linear_wgrad", "ppplllii")(
        dy.data_ptr(), x.data_ptr(), grad.data_ptr(), x.shape[0], n, k, code(x.dtype), threads()
    )


def linear_wgrad(dy: Tensor, x: Tensor) -> Tensor:
    grad = torch.zeros(dy.shape[1], x.shape[1], dtype=torch.float32, device=CPU)
    linear_wgrad_(grad, dy, x)
    return grad.to(dy.dtype)


def bias_grad_(grad: Tensor, dy: Tensor) -> None:
    dy = dy.contiguous()
    function("rlk_bias_grad", "ppllii")(
        dy.data_ptr(), grad.data_ptr(), dy.shape[0], dy.shape[1], code(dy.dtype), threads()
    )
