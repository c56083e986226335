"""Collectives whose sums have a fixed order: all-to-all or all-gather moves the data, `tree_sum` adds it in rank order.

A ring, or whichever algorithm NCCL selects, adds in an order that depends on the number of ranks and on sizes. A
reduce-scatter by all-to-all moves as many bytes as a ring.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rlkernel.ops.all_reduce import all_gather_single
from rlkernel.parallel.tree import require_power_of_two, tree_sum

CHUNK = 1 << 22
"""Elements per rank that one all-to-all of `reduce_scatter` moves, at most; it bounds the scratch memory."""


def world_size(group: ProcessGroup | None = None) -> int:
    """Number of ranks; 1 in a process without process groups."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def reduce_scatter(output: Tensor, input: Tensor, group: ProcessGroup | None = None) -> None:  # [n], [W * n] fp32
    """Writes part r of the sum of all ranks' inputs to rank r's output, in the tree over ranks.

    Args:
        output: [n] fp32, contiguous.
        input: [W * n] fp32, contiguous, unchanged.
        group: of W ranks; default: all.

    Raises:
        ValueError: W is not a power of two, or a tensor is not fp32 or has another size.
    """
    size = world_size(group)
    _check("reduce_scatter", size, input=input, output=output)
    if input.numel() != size * output.numel():
        raise ValueError(
            f"reduce_scatter: input has {input.numel()} elements and output {output.numel()}; expected input to have "
            f"{size} times as many, one part for each rank"
        )
    parts, output = input.view(size, -1), output.view(-1)
    if size == 1:
        output.copy_(parts[0])
        return
    for start in range(0, output.numel(), CHUNK):
        output[start : start + CHUNK].copy_(tree_sum(all_to_all(parts[:, start : start + CHUNK], group).unbind()))


def all_to_all(input: Tensor, group: ProcessGroup | None = None) -> Tensor:  # [W, ...] -> [W, ...]
    """Row r of the result is rank r's row of this rank's number."""
    sent = _where_moved(input.contiguous(), group)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.to(input.device)


def all_gather(output: Tensor, input: Tensor, group: ProcessGroup | None = None) -> None:  # [W * n], [n]
    """Writes the inputs of all ranks to every rank's output, in rank order; input may be its own part of output."""
    if world_size(group) == 1:
        output.copy_(input)
        return
    moved = _where_moved(output, group)
    all_gather_single(moved, _where_moved(input, group), group=group)
    if moved is not output:
        output.copy_(moved)


def all_reduce(tensor: Tensor, group: ProcessGroup | None = None) -> None:
    """Replaces an fp32 tensor on every rank by the sum of all ranks', in the tree over ranks.

    Raises:
        ValueError: the number of ranks is not a power of two, or the tensor is not contiguous fp32.
    """
    size = world_size(group)
    _check("all_reduce", size, tensor=tensor)
    padded = torch.nn.functional.pad(tensor.view(-1), (0, -tensor.numel() % size))
    part = padded.new_empty(padded.numel() // size)
    reduce_scatter(part, padded, group)
    padded = torch.empty_like(padded)
    all_gather(padded, part, group)
    tensor.view(-1).copy_(padded[: tensor.numel()])


def _where_moved(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """The tensor, or a copy in host memory where gloo moves the data, which ranks that share a GPU use."""
    return tensor.cpu() if tensor.is_cuda and dist.get_backend(group) == "gloo" else tensor


def _check(name: str, size: int, **tensors: Tensor) -> None:
    require_power_of_two(f"{name}: the number of ranks", size)
    for argument, tensor in tensors.items():
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            kind = f"{tensor.dtype}{'' if tensor.is_contiguous() else ', not contiguous'}"
            raise ValueError(f"{name}: {argument} is {kind}; expected contiguous float32, in which leaves are added")
