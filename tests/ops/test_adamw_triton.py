"""adamw_ and grad_norm in Triton without a GPU: the bits of the definition under the interpreter.

The interpreter has to be chosen before Triton's kernels are defined, so its checks run in a process of their own: this
file as a script. It rounds the product of an fma; the correctly rounded one takes its place here. What is compiled
ahead of time: tests/kernels/test_triton_aot.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_interpreter() -> None:
    paths = [str(Path(__file__).resolve().parents[2]), *sys.path]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def main() -> None:
    import numpy as np
    import torch
    from test_adamw import State, assert_same_state
    from triton.runtime import interpreter

    from rlkernel import ops
    from rlkernel.contract import assert_bitwise
    from rlkernel.contract.orders import NORM_SEGMENT, SEGMENT
    from rlkernel.kernels import select
    from rlkernel.kernels.reference import arith
    from rlkernel.kernels.triton import adamw

    def fma(self: object, x: object, y: object, z: object) -> interpreter.TensorHandle:
        if z.data.dtype == np.float64:  # the product of two fp32 numbers is exact
            return interpreter.TensorHandle(x.data * y.data + z.data, z.dtype.scalar)
        out = arith.fma(*(torch.from_numpy(np.atleast_1d(t.data)) for t in (x, y, z)))
        return interpreter.TensorHandle(out.numpy().reshape(z.data.shape), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = fma
    adamw.BLOCK = 64

    sizes = [1, 70, 0, 256, 1000]
    for grad, param in ((torch.float32, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.float16)):
        for betas in ((0.9, 0.999), (0.4, 0.95), (0.0, 0.0)):
            for scale in (None, torch.tensor(0.3), torch.tensor(torch.nan)):
                states = []
                for implementation in ("triton", "reference"):
                    states.append(State(sizes, grad, param))
                    with select.use(implementation):
                        for step in (1, 2):
                            states[-1].update(step, betas=betas, scale=scale, zero_grad=step == 2)
                assert_same_state(*states, f"{grad}, {param}, {betas}, {scale}")

    mixed = lambda: [t for d in (torch.float32, torch.float16) for t in State(sizes, d).grads]
    offset = State([1001], torch.float32).grads[0][1:]  # not at a multiple of 16 bytes
    long = State([2 * NORM_SEGMENT + 5 * SEGMENT + 3, 9], torch.float32).grads
    for grads in (mixed(), [offset], long):
        for options in ({}, {"max_norm": 0.5}, {"max_norm": 1e9, "loss_scale": torch.tensor(64.0)}):
            with select.use("reference"):
                expected = ops.grad_norm(grads, **options)
            with select.use("triton"):
                found = ops.grad_norm(grads, **options)
            for name, ours, theirs in zip(expected._fields, found, expected, strict=True):
                assert_bitwise(ours, theirs, f"{name} under {options}")


if __name__ == "__main__":
    main()
