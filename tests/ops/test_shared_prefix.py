"""`paged_attention(shared=...)` on a CPU: the same result as without it, and what it refuses.

The GPU kernels are compared in tests/kernels/test_triton_attention.py and tests/gpu/test_paged_gpu.py.
"""

from typing import Any

import pytest
import torch
from ops.op_checks import rand

from rlkernel import ops
from rlkernel.contract import assert_bitwise


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arguments() -> dict[str, Any]:
    table = torch.tensor([[0, 1, 2], [0, 1, 3], [4, 5, 6]], dtype=torch.int32)
    return {
        "q": rand(0, 3, 4, 8), "k_cache": rand(1, 7, 4, 2, 8), "v_cache": rand(2, 7, 4, 2, 8), "block_table": table,
        "cu_seqlens_q": int32(0, 1, 2, 3), "seq_lens_k": int32(10, 12, 9), "max_seqlen_q": 1, "max_seqlen_k": 12,
    }  # fmt: skip


def test_the_same_result() -> None:
    given = arguments()
    shared = ops.SharedPrefix(int32(0, 2, 2), int32(8, 8, 0), 2, 8)
    out = torch.empty(3, 4, 8)
    for found in (ops.paged_attention(**given, shared=shared), ops.paged_attention(**given, shared=shared, out=out)):
        for name, a, b in zip(("out", "lse"), found, ops.paged_attention(**given), strict=True):
            assert_bitwise(a, b, name)


@pytest.mark.parametrize(
    ("groups", "lengths", "change", "message"),
    [
        (int32(0, 2).long(), int32(8, 8, 0), {}, r"shared.groups is \(2,\) torch.int64; expected \[G\+1\] int32"),
        (int32(0, 2), int32(8, 8), {}, r"shared.lengths is \(2,\) torch.int32; expected \[B=3\] int32"),
        (int32(1, 2), int32(8, 8, 0), {}, r"shared.groups is \[1, 2\]...; it must rise from 0 to at most B=3"),
        (int32(0, 4), int32(8, 8, 0), {}, "it must rise from 0 to at most B=3"),
        (int32(0, 2), int32(8, 4, 0), {}, "sequence 1 has 12 keys and shares 4, the first of its group shares 8"),
        (int32(0, 2), int32(10, 10, 0), {}, "sequence 0 has 10 keys and shares 10"),
        (int32(0, 2), int32(9, 9, 0), {}, "sequence 1 .* equal pages"),
        (int32(0, 2), int32(8, 8, 8), {}, "shared.lengths must be 0 for sequences outside the groups"),
        (int32(0, 2), int32(8, 8, 0), {"window": 5}, "shared needs one query per sequence, no window"),
        (int32(0, 2), int32(8, 8, 0), {"max_seqlen_q": 2}, "shared needs one query per sequence"),
    ],
)
def test_refused(groups: torch.Tensor, lengths: torch.Tensor, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"paged_attention: .*{message}"):
        ops.paged_attention(**{**arguments(), **change}, shared=ops.SharedPrefix(groups, lengths, 2, 8))
