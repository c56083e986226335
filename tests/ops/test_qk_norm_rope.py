"""qk_norm_rope equals rms_norm followed by rope, bit for bit."""

from __future__ import annotations

import pytest
import torch
from ops.op_checks import by_dtype, rand

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.kernels import select

EPS = 1e-6


def inputs(dtype: torch.dtype, d: int = 32, t: int = 7) -> tuple[torch.Tensor, ...]:
    packed = rand(0, t, 9, d, dtype=dtype) * 3  # queries and keys as views of one projection
    positions = torch.arange(t) * 3 % 16
    return packed[:, :6], packed[:, 6:8], rand(1, d, dtype=dtype), rand(2, d, dtype=dtype), positions, rand(3, 16, d)


@by_dtype
@pytest.mark.parametrize("implementation", ("cpu", "reference"))
@pytest.mark.parametrize("d", (24, 32))
def test_equals_the_two_ops(dtype: torch.dtype, implementation: str, d: int) -> None:
    q, k, wq, wk, positions, table = inputs(dtype, d)
    with select.use(implementation):
        ours = ops.qk_norm_rope(q, k, wq, wk, EPS, positions, table)
        both = ops.rope(ops.rms_norm(q, wq, EPS), ops.rms_norm(k, wk, EPS), positions, table)
    for o, b in zip(ours, both, strict=True):
        assert_bitwise(o, b, "fused and separate")


def test_traces() -> None:
    q, k, wq, wk, positions, table = inputs(torch.bfloat16)
    torch.library.opcheck(torch.ops.rlkernel.qk_norm_rope.default, (q, k, wq, wk, EPS, positions, table))


@pytest.mark.parametrize(
    "change,message",
    [
        ({"q": torch.zeros(7, 32)}, "q is"),
        ({"k": torch.zeros(6, 2, 32)}, "k is"),
        ({"q_weight": torch.zeros(31)}, "q_weight is"),
        ({"k_weight": torch.zeros(32, dtype=torch.bfloat16)}, "k_weight is"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, "positions is"),
    ],
)
def test_refuses(change: dict[str, torch.Tensor], message: str) -> None:
    names = ("q", "k", "q_weight", "k_weight", "positions", "cos_sin")
    given = dict(zip(names, inputs(torch.float32), strict=True)) | change
    with pytest.raises(ValueError, match=f"qk_norm_rope: {message}"):
        ops.qk_norm_rope(eps=EPS, **given)


@pytest.mark.parametrize("name", ("q", "k", "v", "q_weight", "k_weight", "cos_sin", "k_cache", "v_cache"))
def test_refuses_tensors_that_require_a_gradient(name: str) -> None:
    """The error names this op, and comes before another op or the fused kernel runs."""
    names = ("q", "k", "q_weight", "k_weight", "positions", "cos_sin")
    plain = dict(zip(names, inputs(torch.float32), strict=True))
    stored = {"v": rand(4, 7, 2, 32), "k_cache": torch.zeros(2, 4, 2, 32), "v_cache": torch.zeros(2, 4, 2, 32)}
    for op, given in (("qk_norm_rope", plain), ("qk_norm_rope_store", {**plain, **stored, "slots": torch.arange(7)})):
        if name in given:
            asks = {**given, name: given[name].clone().requires_grad_()}
            with pytest.raises(RuntimeError, match=f"^{op}: {name} requires a gradient"):
                getattr(ops, op)(eps=EPS, **asks)
            with torch.no_grad():
                getattr(ops, op)(eps=EPS, **asks)


@pytest.mark.parametrize("implementation", ("cpu", "reference"))
def test_store_equals_the_ops_in_turn(implementation: str) -> None:
    q, k, wq, wk, positions, table = inputs(torch.bfloat16)
    v, slots = rand(4, 7, 2, 32, dtype=torch.bfloat16), torch.tensor([3, -1, 8, 0, 11, 5, 6])
    caches = [rand(5 + i, 3, 4, 2, 32, dtype=torch.bfloat16) for i in range(2)]
    others = [c.clone() for c in caches]
    with select.use(implementation):
        ours = ops.qk_norm_rope_store(q, k, v, wq, wk, EPS, positions, table, *caches, slots)
        q_out, k_out = ops.qk_norm_rope(q, k, wq, wk, EPS, positions, table)
        ops.store_kv_(*others, k_out, v, slots)
    for o, b in zip((ours, *caches), (q_out, *others), strict=True):
        assert_bitwise(o, b, "stored and separate")
