"""all_reduce: the sum of all ranks' fp32 partial results in a binary tree over the ranks, bias, one rounding.

Contract: orders.py, `linear`. Ranks that hold neighbouring chunks of K compute the lower levels of its tree, and this
op adds the upper ones, so the bits are those of one device. How the partial results travel changes no bit.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel.kernels import triton
from rlkernel.kernels.symmetric_memory import workspace_of
from rlkernel.ops.autograd import weight_grad
from rlkernel.ops.checks import FLOATS, check, check_optional, check_tensors
from rlkernel.ops.define import define
from rlkernel.ops.linear import bias_grad_

GATHERED_BYTES = 1 << 20
"""Largest partial result that one all-gather sends to every rank. Larger ones take two collectives that move fewer
bytes: an all-to-all, after which each rank adds one part, and an all-gather of the rounded parts."""
RANKS = (1, 2, 4, 8)

# torch 2.13 renamed the function and warns about its old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# By name, because a torch op cannot take a process group. Weak references, because a group that outlives
# `destroy_process_group` keeps gloo's threads running and can abort the process when Python exits.
_groups: dict[str, ref[dist.ProcessGroup]] = {}


def _compute(partial: Tensor, bias: Tensor | None, dtype: torch.dtype, group_name: str) -> Tensor:
    group, shape = group_of(group_name), partial.shape
    ranks, n, size = group.size(), shape[-1], partial.numel()
    flat = partial.contiguous().view(-1)
    if ranks == 1 or size == 0:
        return add_ranks(flat.view(1, size), bias, dtype, n).view(shape)
    workspace = workspace_of(group, partial.device)
    if workspace is not None:
        return triton.all_reduce.all_reduce(flat, bias, dtype, n, workspace).view(shape)
    if flat.nbytes <= GATHERED_BYTES or size % ranks:
        parts = flat.new_empty(ranks, size)
        all_gather_single(parts.view(-1), flat, group=group)
        return add_ranks(parts, bias, dtype, n).view(shape)
    parts, out = flat.new_empty(ranks, size // ranks), flat.new_empty(size, dtype=dtype)
    dist.all_to_all_single(parts.view(-1), flat, group=group)
    all_gather_single(out, add_ranks(parts, bias, dtype, n, group.rank() * parts.shape[1]), group=group)
    return out.view(shape)


def add_ranks(parts: Tensor, bias: Tensor | None, dtype: torch.dtype, n: int, first: int = 0) -> Tensor:
    """Rounded sum [L] of parts [R, L], which are elements `first` and on of partial results [..., N]."""
    if parts.is_cuda:
        return triton.all_reduce.add_ranks(parts, bias, dtype, n, first)
    ranks = parts.shape[0]
    while parts.shape[0] > 1:
        parts = parts[0::2] + parts[1::2]
    total = parts[0]
    if bias is not None:
        total = total + bias.float()[torch.arange(first, first + total.numel()) % n]
    return total.to(dtype, copy=ranks == 1)  # an op must not return its input


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.bias = inputs[1]


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    rows = dy.reshape(-1, dy.shape[-1]).contiguous()
    db = None if ctx.bias is None else weight_grad("all_reduce", ctx, 1, ctx.bias, lambda g: bias_grad_(g, rows))
    return dy.float(), db, None, None


_all_reduce = define(
    "all_reduce(Tensor partial, Tensor? bias, ScalarType dtype, str group_name) -> Tensor",
    fake=lambda partial, bias, dtype, group_name: partial.new_empty(partial.shape, dtype=dtype),
    compute=_compute,
    setup_context=_setup,
    backward=_backward,
)


def all_reduce(
    partial: Tensor,  # [..., N] fp32
    group: dist.ProcessGroup | str,
    *,
    bias: Tensor | None = None,  # [N]
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # [..., N]
    """The sum of the ranks' `partial`, neighbouring ranks first, plus bias, rounded once; equal on every rank.

    With `partial = linear(x_r, weight_r, chunks=P // R, out_dtype=float32)`, where rank r of R holds the r-th part of
    K, the result has the bits of `linear(x, weight, bias, chunks=P)`. The gradient of `partial` is that of the result,
    which every rank holds. All ranks of the group call it in the same order, and calls of a group do not overlap: they
    use one stream, or events order them. It can be captured in a CUDA graph after a first call outside.

    Args:
        partial: [..., N] fp32, of one shape on all ranks.
        group: process group of 1, 2, 4 or 8 ranks, or its name from `register_group`. GPUs that share memory by NVLink
            exchange results in symmetric memory; others go through the group's collectives.
        bias: [N], added in fp32.
        dtype: of the result.

    Raises:
        ValueError: partial is not fp32, bias does not fit, the group's size is not supported, or its name is unknown.
        TypeError: partial or bias is not a tensor.
    """
    check_tensors("all_reduce", partial=partial)
    check_optional("all_reduce", bias=bias)
    check(
        partial.dim() > 0 and partial.dtype == torch.float32,
        lambda: f"all_reduce: partial is {tuple(partial.shape)} {partial.dtype}; expected [..., N] float32",
    )
    n = partial.shape[-1]
    check(
        bias is None or (bias.shape == (n,) and bias.dtype in FLOATS),
        lambda: f"all_reduce: bias is {tuple(bias.shape)} {bias.dtype}; expected [N={n}]",  # type: ignore[union-attr]
    )
    check(dtype in FLOATS, lambda: f"all_reduce: dtype={dtype}; expected float32, bfloat16 or float16")
    out: Tensor = _all_reduce(partial, bias, dtype, group if isinstance(group, str) else register_group(group))
    return out


def register_group(group: dist.ProcessGroup, name: str | None = None) -> str:
    """Registers a group and returns the name by which torch ops find it. The registry keeps only a weak reference.

    torch.compile traces a name and not a group, so a group that a traced function names must be registered before.

    Args:
        name: default: torch's name of the group, which differs between ranks and runs. A compiled graph that is stored
            on disk needs a fixed name; the name then refers to the group that was registered last.

    Raises:
        ValueError: the group's size is not supported.
    """
    ranks = group.size()
    check(ranks in RANKS, lambda: f"all_reduce: the group has {ranks} ranks; expected one of {RANKS}")
    name = name or str(group.group_name)
    if not torch.compiler.is_compiling():  # a traced group is a stand-in for one that was registered before
        _groups[name] = ref(group)
    return name


def group_of(name: str) -> dist.ProcessGroup:
    """The group that `register_group` returned this name for.

    Raises:
        ValueError: no group has this name, or the group was freed.
    """
    known = _groups.get(name)
    group = None if known is None else known()
    if group is None:
        raise ValueError(f"no process group has the name {name!r}; pass what register_group returned")
    return group
