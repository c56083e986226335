"""Variants of `rlkernel/kernels/triton/embedding.py` that are compiled ahead of time."""

from __future__ import annotations

from aot import NVIDIA, Variant, with_pdl
from rlkernel.contract.orders import EMBEDDING_WINDOW
from rlkernel.kernels.triton.embedding import (
    GATHER_BYTES,
    GATHER_ROWS,
    PLACES,
    UNROLL,
    WINDOWS,
    embedding_kernel,
    embedding_wgrad_kernel,
    window_sums_kernel,
)

_SORTED = {"ids": "*i32:16", "source": "*i32:16", "T": "i32"}
_RUN = {"dy": "*bf16:16", "sums": "*fp32:16", "C": "i32:16", "ALL_WINDOWS": "i32", "STRIDE": "i32", "dy_row": "i32:16"}
_META = {"dy_col": 1, "WINDOW": EMBEDDING_WINDOW, "UNROLL": UNROLL, "BLOCK": 1024}
AOT: tuple[Variant, ...] = (
    *with_pdl(
        Variant(
            "embedding", embedding_kernel,
            {"ids": "*i64:16", "weight": "*bf16:16", "out": "*bf16:16", "T": "i32", "V": "i32", "C": "i32:16",
             "weight_row": "i32:16"},
            {"weight_col": 1, "ROWS": GATHER_ROWS, "BLOCK": GATHER_BYTES // 2}, num_warps=1, main=True,
            targets=NVIDIA,
        )
    ),
    *with_pdl(
        Variant(
            "embedding window_sums", window_sums_kernel, {**_SORTED, **_RUN}, {**_META, "WINDOWS": WINDOWS},
            num_warps=8,
        )
    ),
    *with_pdl(
        Variant(
            "embedding_wgrad", embedding_wgrad_kernel, {**_SORTED, **_RUN, "grad": "*fp32:16", "grad_row": "i32:16"},
            {**_META, "grad_col": 1, "HAS_SUMS": True, "PLACES": PLACES}, num_warps=4, main=True,
        )
    ),
    *with_pdl(
        Variant(
            "embedding_wgrad short", embedding_wgrad_kernel,
            {**_SORTED, "dy": "*bf16:16", "C": "i32:16", "ALL_WINDOWS": "i32", "STRIDE": "i32", "dy_row": "i32:16",
             "grad": "*bf16:16", "grad_row": "i32:16"},
            {**_META, "BLOCK": 512, "sums": None, "grad_col": 1, "HAS_SUMS": False, "PLACES": PLACES}, num_warps=4,
            main=True,
        )
    ),
)  # fmt: skip
