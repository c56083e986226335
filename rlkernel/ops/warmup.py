"""Compiles kernels and certifies schedules ahead of the calls that need them. Nothing here changes a bit.

An engine calls it before it records CUDA graphs, because a schedule cannot be certified during a recording.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels import build
from rlkernel.ops.linear import linear


def compile_cpu_kernels() -> bool:
    """Compiles the C++ kernels unless they are cached; returns False if there is no compiler.

    Raises:
        BuildError: there is a compiler, and the build failed.
    """
    if build.compiler() is None:
        return False
    build.cpu_library()
    return True


def warm_up_linear(
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
    *,
    rows: int,
    chunks: int = 1,
    out_dtype: torch.dtype | None = None,
) -> None:
    """Certifies the schedules of `linear` on a GPU for up to `rows` rows, or reads the verdicts of an earlier process.

    It calls `linear` once for each class of row counts.
    """
    if weight.device.type != "cuda":
        return
    from rlkernel.kernels.cuda.linear_shapes import BUCKETS, bucket

    with torch.inference_mode():
        for m in BUCKETS[1 : BUCKETS.index(bucket(rows)) + 1]:
            linear(weight.new_zeros(min(m, rows), weight.shape[1]), weight, bias, chunks=chunks, out_dtype=out_dtype)


def warm_up_prefill(
    device: torch.device, dtype: torch.dtype, *, heads: int, kv_heads: int, head_dim: int, tokens: int, longest: int
) -> None:
    """Certifies the kernels of `paged_attention` for long prompts on a GPU, whose compilation takes a while.

    Args:
        tokens: the largest number of new tokens per call.
        longest: the largest number of keys per sequence.
    """
    if device.type != "cuda":
        return
    from rlkernel.kernels.cuda.attention import paged_classes, prefill

    index = torch.cuda.current_device() if device.index is None else device.index
    for key in paged_classes(index, dtype, heads, kv_heads, head_dim, tokens, longest):
        prefill.verdict_of(key)
