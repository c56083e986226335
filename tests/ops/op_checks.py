"""Shared by the tests of all ops: seeded data, autograd on new leaves, accuracy, both CPU implementations.

An op passes if it is accurate (against fp64, no worse than stock torch) and invariant (bit for bit), and if the
comparison can fail (`differs` shows that it detects stock torch).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_accurate, assert_bitwise
from rlkernel.kernels import select

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=("fp32", "bf16", "fp16"))

Op = Callable[..., Any]


def rand(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers that depend only on the seed and the shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def outputs(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def forward_backward(op: Op, inputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> list[Tensor]:
    """Outputs of `op(*inputs)`, then the gradients of every floating input under the given upstream gradients."""
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
    out = outputs(op(*leaves))
    torch.autograd.backward(out, [g.to(o.dtype) for g, o in zip(upstream, out, strict=True)])
    return [o.detach() for o in out] + [t.grad for t in leaves if t.grad is not None]


def assert_right(op: Op, truth: Op, inputs: Sequence[Tensor], upstream: Sequence[Tensor], what: str) -> None:
    """Forward and backward of `op` against `truth` in fp64, with the op on stock torch as the baseline."""
    ours = forward_backward(op, inputs, upstream)
    with ops.stock():
        base = forward_backward(op, inputs, upstream)
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    exact = forward_backward(truth, wide, upstream)
    dtype = next(t.dtype for t in inputs if t.is_floating_point())
    for i, (o, e, b) in enumerate(zip(ours, exact, base, strict=True)):
        assert_accurate(o, e, b, f"{what}, tensor {i}", dtype=dtype)


def assert_reference_equal(run: Callable[[], Any], what: str) -> None:
    """`run()` gives the same bits with the C++ kernels and with the readable reference."""
    with select.use("cpu"):
        compiled = outputs(run())
    with select.use("reference"):
        reference = outputs(run())
    for i, (a, b) in enumerate(zip(compiled, reference, strict=True)):
        assert_bitwise(a.detach(), b.detach(), f"{what}, C++ against reference, tensor {i}")


def differs(check: Callable[[], None]) -> bool:
    """Whether a bitwise check fails: the control that shows it can."""
    try:
        check()
    except AssertionError:
        return True
    return False


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def with_threads(count: int, run: Callable[[], Any]) -> Any:
    with threads(count):
        return run()


def assert_compiles(op: Op, inputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> None:
    """`torch.compile(fullgraph=True)` traces forward and backward, and changes no bit."""
    torch.compiler.reset()
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    traced = forward_backward(compiled, inputs, upstream)
    for i, (a, b) in enumerate(zip(traced, forward_backward(op, inputs, upstream), strict=True)):
        assert_bitwise(a, b, f"compiled against eager, tensor {i}")
