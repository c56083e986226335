"""rope: accuracy, bits that depend only on the absolute position, gradient by the negative angle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import (
    DTYPES,
    assert_compiles,
    assert_reference_equal,
    assert_right,
    by_dtype,
    differs,
    forward_backward,
    rand,
    with_threads,
)
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.kernels.reference import rope as reference

properties = settings(max_examples=25, deadline=None, derandomize=True)


def table(size: int, d: int) -> Tensor:
    """cos_sin [P, D] of base 10,000."""
    angles = torch.arange(size, dtype=torch.float64)[:, None] * 10_000.0 ** (-torch.arange(0, d, 2) / d)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def truth(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Multiplication of x1 + i x2 by e^(i angle)."""
    cos, sin = cos_sin.detach().double()[positions][:, None].chunk(2, dim=-1)

    def rotate(x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, dim=-1)
        turned = torch.complex(x1, x2) * torch.complex(cos, sin)
        return torch.cat((turned.real, turned.imag), dim=-1)

    return rotate(q), rotate(k)


def data(t: int, h: int, hk: int, d: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    positions = torch.randint(0, 50, (t,), generator=torch.Generator().manual_seed(seed))
    return rand(seed, t, h, d, dtype=dtype), rand(seed + 1, t, hk, d, dtype=dtype), positions


# ---- right


@by_dtype
def test_accuracy(dtype: torch.dtype) -> None:
    q, k, positions = data(20, 4, 2, 24, dtype)
    cos_sin = table(50, 24)
    assert_right(
        lambda q, k: ops.rope(q, k, positions, cos_sin),
        lambda q, k: truth(q, k, positions, cos_sin),
        (q, k),
        (rand(8, *q.shape, dtype=dtype), rand(9, *k.shape, dtype=dtype)),
        f"rope {dtype}",
    )


def check_reference(dtype: torch.dtype) -> None:
    q, k, positions = data(9, 3, 1, 22, dtype)
    run = lambda: forward_backward(lambda q, k: ops.rope(q, k, positions, table(50, 22)), (q, k), (q, k))
    assert_reference_equal(run, f"rope {dtype}")


@by_dtype
def test_reference_equals_cpp(dtype: torch.dtype) -> None:
    check_reference(dtype)


def test_reference_control(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "fma", lambda a, b, c: a * b + c)
    assert differs(lambda: check_reference(torch.float32))


def test_position_zero_is_the_identity() -> None:
    q, k, _ = data(4, 2, 1, 16, torch.bfloat16)
    a, b = ops.rope(q, k, torch.zeros(4, dtype=torch.int64), table(1, 16))
    assert_bitwise(a, q, "q at position 0")
    assert_bitwise(b, k, "k at position 0")


def test_gradient_is_the_rotation_back() -> None:
    q, k, positions = data(12, 2, 2, 16, torch.float32)
    cos_sin = table(50, 16)
    back = cos_sin * torch.cat((torch.ones(8), -torch.ones(8)))
    _, _, dq, dk = forward_backward(lambda q, k: ops.rope(q, k, positions, cos_sin), (q, k), (q, k))
    for grad, turned in zip((dq, dk), ops.rope(q, k, positions, back), strict=True):
        assert_bitwise(grad, turned, "gradient against the table of negative angles")


# ---- invariant


def check_by_absolute_position(t: int, h: int, d: int, dtype: torch.dtype, seed: int, relative: bool = False) -> None:
    """Compares a token alone with it in a packed buffer; `relative` is a fault that the check must catch."""
    q, k, positions = data(t, h, 1, d, dtype, seed)
    cos_sin = table(50, d)
    run = lambda rows: forward_backward(
        lambda q, k: ops.rope(q, k, torch.arange(len(rows)) if relative else positions[rows], cos_sin),
        (q[rows], k[rows]),
        (q[rows], k[rows]),
    )
    whole = run(torch.arange(t))
    for rows in (torch.tensor([t - 1]), torch.randperm(t, generator=torch.Generator().manual_seed(seed))):
        for i, (a, b) in enumerate(zip(run(rows), whole, strict=True)):
            assert_bitwise(a, b[rows], f"rows {rows.tolist()} of {t}, tensor {i}")


@properties
@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 20), st.sampled_from(DTYPES), st.integers(0, 2**16))
def test_only_the_absolute_position_counts(t: int, h: int, half: int, dtype: torch.dtype, seed: int) -> None:
    check_by_absolute_position(t, h, 2 * half, dtype, seed)


def test_absolute_position_control() -> None:
    # Stock torch keeps this one (it is elementwise); a position counted from the buffer's start does not.
    assert differs(lambda: check_by_absolute_position(9, 2, 16, torch.float32, 0, relative=True))


@by_dtype
def test_heads_and_threads_are_free(dtype: torch.dtype) -> None:
    q, k, positions = data(120, 12, 6, 32, dtype)
    cos_sin = table(50, 32)
    a = with_threads(1, lambda: ops.rope(q, k, positions, cos_sin))
    b = with_threads(2, lambda: ops.rope(q, k, positions, cos_sin))
    assert_bitwise(a[0], b[0], "1 against 2 threads")
    shard = ops.rope(q[:, 4:8], k[:, 2:4], positions, cos_sin)
    assert_bitwise(shard[0], a[0][:, 4:8], "a tensor-parallel shard of q")
    assert_bitwise(shard[1], a[1][:, 2:4], "a tensor-parallel shard of k")


# ---- torch's machinery


def test_opcheck_and_compile() -> None:
    q, k, positions = data(5, 2, 1, 8, torch.float32)
    cos_sin = table(50, 8)
    leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
    torch.library.opcheck(torch.ops.rlkernel.rope.default, (*leaves, positions, cos_sin, False))
    assert_compiles(lambda q, k: ops.rope(q, k, positions, cos_sin), (q, k), (q, k))


def test_a_table_that_requires_a_gradient_is_refused() -> None:
    """Its gradient would silently be omitted; without autograd the call is allowed."""
    q, k, positions = data(5, 2, 1, 8, torch.float32)
    asks = table(50, 8).requires_grad_()
    for stock in (False, True):
        with ops.stock(stock), pytest.raises(RuntimeError, match=r"rope: cos_sin requires a gradient.*\.detach\(\)"):
            ops.rope(q.requires_grad_(), k, positions, asks)
    with torch.no_grad():
        assert_bitwise(ops.rope(q, k, positions, asks)[0], ops.rope(q, k, positions, table(50, 8))[0], "no gradient")


def test_second_derivative_exists() -> None:
    q, k, positions = data(3, 1, 1, 8, torch.float32)
    q.requires_grad_()
    (dq,) = torch.autograd.grad(ops.rope(q, k, positions, table(50, 8))[0].pow(2).sum(), q, create_graph=True)
    dq.pow(2).sum().backward()
    torch.testing.assert_close(q.grad, 8 * q.detach(), rtol=1e-5, atol=1e-5)


def test_gradient_of_one_output_alone() -> None:
    q, k, positions = data(5, 2, 1, 8, torch.float32)
    k.requires_grad_()
    ops.rope(q, k, positions, table(50, 8))[1].sum().backward()
    assert q.grad is None and k.grad is not None


def test_empty_batch() -> None:
    q, k, positions = data(0, 2, 1, 8, torch.float32)
    a, b = ops.rope(q, k, positions, table(4, 8))
    assert a.shape == (0, 2, 8) and b.shape == (0, 1, 8)


@pytest.mark.parametrize(
    "changes,error,message",
    (
        ({"q": rand(0, 3, 8)}, ValueError, r"q is \(3, 8\)"),
        ({"k": rand(0, 3, 1, 6)}, ValueError, r"k is \(3, 1, 6\)"),
        ({"k": rand(0, 3, 1, 8, dtype=torch.bfloat16)}, ValueError, "torch.float32 to fit q"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, ValueError, r"expected \[T=3\] int64"),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, ValueError, r"torch.int32; expected"),
        ({"cos_sin": table(4, 8).bfloat16()}, ValueError, r"expected \[P, D=8\] float32"),
        ({"positions": torch.tensor([0, 4, 1])}, IndexError, r"positions\[1\] is 4; expected 0 <= positions < 4"),
        ({"positions": torch.tensor([0, 1, -1])}, IndexError, r"positions\[2\] is -1"),
    ),
)
def test_bad_input(changes: dict, error: type[Exception], message: str) -> None:
    arguments = {"q": rand(0, 3, 2, 8), "k": rand(1, 3, 1, 8), "positions": torch.arange(3), "cos_sin": table(4, 8)}
    with pytest.raises(error, match=message):
        ops.rope(**{**arguments, **changes})
