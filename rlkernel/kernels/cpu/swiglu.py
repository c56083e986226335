"""swiglu on the CPU: launchers of `csrc/cpu/swiglu.cpp`."""

from __future__ import annotations

from torch import Tensor

from rlkernel.kernels.cpu.library import code, function, threads


def swiglu(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    t, f = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(t, f)
    function("rlk_swiglu", "ppllii")(gate_up.data_ptr(), y.data_ptr(), t, f, code(gate_up.dtype), threads())
    return y


def swiglu_grad(dy: Tensor, gate_up: Tensor) -> Tensor:
    dy, gate_up = dy.contiguous(), gate_up.contiguous()
    grad = gate_up.new_empty(gate_up.shape)
    function("rlk_swiglu_grad", "pppllii")(
        dy.data_ptr(), gate_up.data_ptr(), grad.data_ptr(), dy.shape[0], dy.shape[1], code(dy.dtype), threads()
    )
    return grad
