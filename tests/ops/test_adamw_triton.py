"""adamw_ and grad_norm in Triton's interpreter: the bits of the reference, without a GPU.

The interpreter rounds the product of an fma, so these tests replace it by a correctly rounded fma.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET") != "1":
    from triton_interpreter import run

    def test_in_the_interpreter() -> None:
        run(__file__)

else:
    import numpy as np
    from test_adamw import State, assert_same_state
    from triton.runtime import interpreter

    from rlkernel import ops
    from rlkernel.contract import assert_bitwise
    from rlkernel.contract.orders import NORM_SEGMENT, SEGMENT
    from rlkernel.kernels import select
    from rlkernel.kernels.reference import arith
    from rlkernel.kernels.triton import adamw

    SIZES = [1, 70, 0, 256, 1000]
    NUMBERS = ((torch.float32, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.float16))

    def fma(self: object, x: object, y: object, z: object) -> interpreter.TensorHandle:
        if z.data.dtype == np.float64:  # the product of two fp32 numbers is exact
            return interpreter.TensorHandle(x.data * y.data + z.data, z.dtype.scalar)
        out = arith.fma(*(torch.from_numpy(np.atleast_1d(t.data)) for t in (x, y, z)))
        return interpreter.TensorHandle(out.numpy().reshape(z.data.shape), z.dtype.scalar)

    @pytest.fixture(autouse=True)
    def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)
        monkeypatch.setattr(adamw, "BLOCK", 64)

    @pytest.mark.parametrize("grad,param", NUMBERS)
    def test_update(grad: torch.dtype, param: torch.dtype) -> None:
        for betas in ((0.9, 0.999), (0.4, 0.95), (0.0, 0.0)):
            for scale in (None, torch.tensor(0.3), torch.tensor(torch.nan)):
                states = []
                for implementation in ("triton", "reference"):
                    states.append(State(SIZES, grad, param))
                    with select.use(implementation):
                        for step in (1, 2):
                            states[-1].update(step, betas=betas, scale=scale, zero_grad=step == 2)
                assert_same_state(*states, f"{grad}, {param}, {betas}, {scale}")

    def test_norm() -> None:
        mixed = lambda: [t for d in (torch.float32, torch.float16) for t in State(SIZES, d).grads]
        offset = State([1001], torch.float32).grads[0][1:]  # not 16-byte aligned
        long = State([2 * NORM_SEGMENT + 5 * SEGMENT + 3, 9], torch.float32).grads
        for grads in (mixed(), [offset], long):
            for options in ({}, {"max_norm": 0.5}, {"max_norm": 1e9, "loss_scale": torch.tensor(64.0)}):
                with select.use("reference"):
                    expected = ops.grad_norm(grads, **options)
                with select.use("triton"):
                    found = ops.grad_norm(grads, **options)
                for name, ours, theirs in zip(expected._fields, found, expected, strict=True):
                    assert_bitwise(ours, theirs, f"{name} under {options}")
