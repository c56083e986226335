"""attention with causal=False, as in vision encoders: accurate, and the same bits alone and packed."""

from __future__ import annotations

import pytest
import torch
from attention_paths import cu
from op_checks import assert_reference_equal, assert_right, by_dtype, differs, forward_backward, rand
from torch import Tensor

from rlkernel import ops
from rlkernel.contract import assert_bitwise

LENS = [5, 70, 1, 129]


def inputs(heads: int, kv_heads: int, d: int, dtype: torch.dtype) -> list[Tensor]:
    return [rand(i, sum(LENS), h, d, dtype=dtype) for i, h in enumerate((heads, kv_heads, kv_heads))]


def run(lens: list[int]) -> object:
    return lambda q, k, v: ops.attention(q, k, v, cu(lens), max_seqlen_q=max(lens), causal=False, split=64)[0]


def by_definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group, out, first = q.shape[1] // k.shape[1], [], 0
    for n in LENS:
        a, b, c = (x[first : first + n].transpose(0, 1) for x in (q, k, v))
        b, c = b.repeat_interleave(group, 0), c.repeat_interleave(group, 0)
        out.append(((a @ b.transpose(1, 2)) * q.shape[-1] ** -0.5).softmax(-1).matmul(c).transpose(0, 1))
        first += n
    return torch.cat(out)


@by_dtype
@pytest.mark.parametrize("heads,kv_heads,d", ((2, 2, 80), (4, 2, 16), (1, 1, 20)))
def test_right(dtype: torch.dtype, heads: int, kv_heads: int, d: int) -> None:
    given = inputs(heads, kv_heads, d, dtype)
    upstream = rand(9, sum(LENS), heads, d)
    assert_right(run(LENS), by_definition, given, [upstream], f"bidirectional {dtype} D={d}")
    short = [x[:75] for x in given]
    assert_reference_equal(lambda: forward_backward(run([5, 70]), short, [upstream[:75]]), f"bidirectional D={d}")


@by_dtype
def test_a_sequence_has_the_same_bits_alone_and_packed(dtype: torch.dtype) -> None:
    given, upstream = inputs(4, 2, 80, dtype), rand(9, sum(LENS), 4, 80)
    packed = forward_backward(run(LENS), given, [upstream])
    first = 0

    def check(n: int, rows: slice) -> None:
        alone = forward_backward(run([n]), [x[rows] for x in given], [upstream[rows]])
        for name, a, b in zip(("out", "dq", "dk", "dv"), alone, packed, strict=True):
            assert_bitwise(a, b[rows], f"{name} of {n} tokens")

    for n in LENS:
        check(n, slice(first, first + n))
        first += n
    with ops.stock():
        assert differs(lambda: check(129, slice(76, 205)))


def test_refusals() -> None:
    q = rand(0, 3, 1, 16)
    with pytest.raises(ValueError, match="window=2 with causal=False"):
        ops.attention(q, q, q, cu([3]), max_seqlen_q=3, causal=False, window=2)
    with pytest.raises(TypeError, match="causal='no' must be True or False"):
        ops.attention(q, q, q, cu([3]), max_seqlen_q=3, causal="no")  # type: ignore[arg-type]
