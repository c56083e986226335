"""pack and unpack: round trips, cu_seqlens and positions, gradients, errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import DTYPES, rand

from rlkernel import ops
from rlkernel.contract import assert_bitwise

properties = settings(max_examples=30, deadline=None, derandomize=True)


@properties
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.sampled_from((*DTYPES, torch.int64)), st.integers(0, 3))
def test_round_trip(sizes: list[int], dtype: torch.dtype, width: int) -> None:
    rows = [(10 * rand(i, n, *(width,) * (width > 0))).to(dtype) for i, n in enumerate(sizes)]
    flat, cu_seqlens, positions = ops.pack(rows)
    assert cu_seqlens.dtype == torch.int32 and positions.dtype == torch.int64
    assert cu_seqlens.tolist() == [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    assert positions.tolist() == [i for n in sizes for i in range(n)]
    back = ops.unpack(flat, cu_seqlens)
    assert len(back) == len(rows)
    for i, (a, b) in enumerate(zip(back, rows, strict=True)):
        assert_bitwise(a, b, f"sequence {i}")


def test_lists_of_token_ids() -> None:
    packed = ops.pack([[5, 6, 7], [], [8]])
    assert packed.flat.dtype == torch.int64 and packed.flat.tolist() == [5, 6, 7, 8]
    assert packed.cu_seqlens.tolist() == [0, 3, 3, 4]
    assert [x.tolist() for x in ops.unpack(*packed[:2])] == [[5, 6, 7], [], [8]]


def test_gradients_pass_through() -> None:
    rows = [rand(i, n).requires_grad_() for i, n in enumerate((3, 2))]
    flat, cu_seqlens, _ = ops.pack(rows)
    parts = ops.unpack(flat, cu_seqlens)
    (2 * parts[0].sum() + 3 * parts[1].sum()).backward()
    assert rows[0].grad.tolist() == [2.0] * 3 and rows[1].grad.tolist() == [3.0] * 2


def test_unpack_of_no_sequence() -> None:
    assert ops.unpack(torch.zeros(0), torch.zeros(1, dtype=torch.int32)) == []


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="sequences is empty"):
        ops.pack([])
    with pytest.raises(ValueError, match=r"sequences\[1\] is \(2,\) torch.float16 on cpu, sequences\[0\]"):
        ops.pack([torch.zeros(2), torch.zeros(2, dtype=torch.float16)])
    with pytest.raises(ValueError, match=r"sequences\[1\] is \(2, 3\)"):
        ops.pack([torch.zeros(2), torch.zeros(2, 3)])
    with pytest.raises(ValueError, match=r"sequences\[0\] is a scalar"):
        ops.pack([torch.zeros(())])
    flat = torch.zeros(5)
    for borders in ([0, 4], [1, 5], [0, 6, 5], []):
        with pytest.raises(ValueError, match="cu_seqlens must start at 0, never decrease and end at T=5"):
            ops.unpack(flat, torch.tensor(borders, dtype=torch.int32))
