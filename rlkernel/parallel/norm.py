"""The gradient norm of the contract (`ops.grad_norm`) when gradients are sharded over ranks: the same bits.

Sums of squares over segments of 16384 elements of a tensor are computed where the elements are. Every rank receives all
of them, and adds segments and tensors in the contract's order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard

from rlkernel.contract.lane_sum import lane_sum
from rlkernel.contract.orders import NORM_SEGMENT
from rlkernel.ops.adamw import GradNorm
from rlkernel.parallel.collectives import all_gather, world_size

_SEGMENTS_AT_ONCE = 1024  # bounds the fp64 scratch memory to 384 MiB


def grad_norm(grads: Sequence[Tensor], max_norm: float | None = None) -> GradNorm:
    """`ops.grad_norm` for tensors and DTensors, with the same bits on any number of ranks; waits for the device.

    Args:
        grads: fp32, bf16 or fp16, on one device. DTensors may be cut along dimension 0 over one mesh dimension
            (FSDP2, HSDP); any other is gathered.
        max_norm: largest norm; None: no clipping.
    """
    parts = [_segments_of(grad) for grad in grads]
    for group in {part.group: None for part in parts if part.group is not None}:
        _exchange([part for part in parts if part.group is group], group)
    return norm_of([part.squares for part in parts], max_norm)


def aligned_squares(
    shard: Tensor,  # [n] fp32
    sizes: Sequence[int],
    group: ProcessGroup | None = None,
) -> list[Tensor]:  # [ceil(size / NORM_SEGMENT)] fp64 each
    """Sums of squares of all segments of tensors in one buffer, which the ranks share evenly, for `norm_of`.

    Args:
        shard: this rank's part of the buffer, a multiple of NORM_SEGMENT elements; each tensor begins at a multiple of
            it, with zeros between and after them.
        sizes: number of elements of each tensor, in the order of the buffer.
        group: the ranks that share the buffer; default: all.
    """
    mine = segment_squares(shard)
    everything = mine.new_empty(world_size(group) * mine.numel())
    all_gather(everything, mine, group)
    counts = [-(-size // NORM_SEGMENT) for size in sizes]
    return list(everything[: sum(counts)].split(counts))


def segment_squares(x: Tensor) -> Tensor:  # [n] -> [ceil(n / NORM_SEGMENT)] fp64
    """Sum of squares of each segment; the square of an fp32 number is exact in fp64."""
    found = []
    for part in x.reshape(-1).split(_SEGMENTS_AT_ONCE * NORM_SEGMENT):
        padded = torch.nn.functional.pad(part.float(), (0, -part.numel() % NORM_SEGMENT))
        found.append(lane_sum(padded.view(-1, NORM_SEGMENT).double().square()))
    return torch.cat(found) if found else x.new_empty(0, dtype=torch.float64)


def norm_of(squares: Sequence[Tensor], max_norm: float | None) -> GradNorm:  # [ceil(size / NORM_SEGMENT)] fp64 each
    """The norm from the sums of squares of each tensor's segments."""
    # All tensors at once, because hundreds of them would take thousands of launches; added zeros change no sum.
    of_tensors = lane_sum(torch.nn.utils.rnn.pad_sequence(list(squares), batch_first=True))
    norm = math.sqrt(float(lane_sum(of_tensors)))  # torch.sqrt may call a vector library that is off by one ulp
    limit = math.inf if max_norm is None else float(torch.tensor(max_norm, dtype=torch.float32))
    scale = math.nan if not math.isfinite(norm) else limit / norm if norm > limit else 1.0
    device = of_tensors.device
    return GradNorm(
        torch.tensor(norm, dtype=torch.float64, device=device),
        torch.tensor(scale, dtype=torch.float32, device=device),
        of_tensors,
    )


class _Segments:
    """Sums of squares of one tensor's segments, of which a rank knows some.

    Attributes:
        squares: [S] fp64, zeros where another rank has the elements.
        group: the ranks that share the tensor; None: this rank has all of it.
        cut: segments that several ranks share, ascending.
        elements: [C, NORM_SEGMENT] fp32, this rank's elements of the cut segments, zeros elsewhere.
    """

    def __init__(self, squares: Tensor, group: ProcessGroup | None, cut: Sequence[int], elements: Tensor):
        self.squares, self.group, self.cut, self.elements = squares, group, cut, elements


def _segments_of(grad: Tensor) -> _Segments:
    if isinstance(grad, DTensor):
        sharded = [i for i, place in enumerate(grad.placements) if not isinstance(place, Replicate)]
        if len(sharded) == 1 and type(place := grad.placements[sharded[0]]) is Shard and place.dim == 0:
            group = grad.device_mesh.get_group(sharded[0])
            rows, width = grad.shape[0], grad.numel() // max(1, grad.shape[0])
            step = -(-rows // dist.get_world_size(group))  # torch.chunk's, with a shorter or empty end
            borders = [min(r * step, rows) * width for r in range(dist.get_world_size(group) + 1)]
            return _cut_segments(grad.to_local().reshape(-1).float(), borders, group)
        grad = grad.full_tensor()
    return _Segments(segment_squares(grad), None, (), grad.new_empty(0))


def _cut_segments(local: Tensor, borders: Sequence[int], group: ProcessGroup) -> _Segments:
    """This rank's segments of a flattened tensor whose elements borders[r] to borders[r + 1] are rank r's."""
    begin, end = borders[dist.get_rank(group)], borders[dist.get_rank(group) + 1]
    size, segment = borders[-1], NORM_SEGMENT
    cut = sorted({b // segment for b in borders if b % segment and b < size})
    squares = local.new_zeros(-(-size // segment), dtype=torch.float64)
    first, last = -(-begin // segment), squares.numel() if end == size else end // segment
    if first < last:
        squares[first:last] = segment_squares(local[first * segment - begin :][: (last - first) * segment])
    elements = local.new_zeros(len(cut), segment)
    for row, s in zip(elements, cut, strict=True):
        low, high = max(begin, s * segment), min(end, (s + 1) * segment)
        if low < high:
            row[low - s * segment : high - s * segment] = local[low - begin : high - begin]
    return _Segments(squares, group, cut, elements)


def _exchange(parts: Sequence[_Segments], group: ProcessGroup) -> None:
    """Completes the sums on every rank; each number that is added has zeros from all ranks except one."""
    elements = torch.cat([part.elements for part in parts])
    if elements.numel():
        dist.all_reduce(elements, group=group)
    squares = torch.cat([part.squares for part in parts])
    dist.all_reduce(squares, group=group)
    of_cut = segment_squares(elements).split([len(part.cut) for part in parts])
    for part, whole, cut in zip(parts, squares.split([len(part.squares) for part in parts]), of_cut, strict=True):
        part.squares = whole.clone()
        part.squares[list(part.cut)] = cut
