"""embedding on GPUs: torch's gather forward; the gradient sums each id's occurrences in packed order, no atomics.

Contract: orders.py, `embedding`. Ids are sorted stably; the first place of an id in that list owns its row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.kernels.triton.aot import Variant
from rlkernel.kernels.triton.common import next_power_of_2, on_device, options

# ---- kernels ------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["T"])
def embedding_wgrad_kernel(
    ids,  # [T] int64, ascending
    source,  # [T] int64: packed position of each
    dy,  # [T, C]
    grad,  # [V, C] fp32
    T,
    C,
    dy_row,
    dy_col,
    grad_row,
    grad_col,
    UNROLL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    token_id = tl.load(ids + place)
    before = tl.load(ids + place - 1, mask=place > 0, other=-1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < C
    if token_id != before:
        to = grad + token_id * grad_row + column.to(tl.int64) * grad_col
        total = tl.load(to, mask=inside, other=0.0)
        more = True
        while more:
            for step in tl.static_range(0, UNROLL):
                more = more & (place + step < T)
                more = more & (tl.load(ids + place + step, mask=more, other=-1) == token_id)
                token = tl.load(source + place + step, mask=more, other=0)
                # -0 is the identity of fp32 addition: past the last occurrence nothing changes.
                row = dy + token * dy_row + column.to(tl.int64) * dy_col
                total += tl.load(row, mask=inside & more, other=-0.0).to(tl.float32)
            place += UNROLL
        tl.store(to, total, mask=inside)


# ---- launchers ----------------------------------------------------------------------------------


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    return torch.index_select(weight, 0, ids)


def embedding_wgrad_(grad: Tensor, dy: Tensor, ids: Tensor) -> None:
    tokens, c = dy.shape
    if dy.numel() == 0:
        return
    ascending, source = torch.sort(ids, stable=True)
    block = min(512, next_power_of_2(c, 32))
    with on_device(dy):
        embedding_wgrad_kernel[(tokens, triton.cdiv(c, block))](
            ascending, source, dy, grad, tokens, c, dy.stride(0), dy.stride(1), grad.stride(0), grad.stride(1),
            UNROLL=8, BLOCK=block, num_warps=4, **options(),
        )  # fmt: skip


# ---- ahead of time ------------------------------------------------------------------------------

AOT: tuple[Variant, ...] = (
    Variant(
        "embedding_wgrad", embedding_wgrad_kernel,
        {"ids": "*i64:16", "source": "*i64:16", "dy": "*bf16:16", "grad": "*fp32:16", "T": "i32", "C": "i32:16",
         "dy_row": "i32:16", "grad_row": "i32:16"},
        {"dy_col": 1, "grad_col": 1, "UNROLL": 8, "BLOCK": 512},
        main=True,
    ),
)  # fmt: skip
