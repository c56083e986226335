"""Buffers that the GPUs of a process group read directly over NVLink, for collectives that are one kernel."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

CAPACITY = 1 << 20
"""Bytes of data per rank. Above it, the group's collectives in two steps move fewer bytes."""
BLOCKS = 32
"""Programs of a kernel that signals in the buffer: few enough to be resident at once on any GPU."""
FLAG_BYTES = 4 * 2 * BLOCKS * 8
"""int32 flags before the data: two barriers, one flag per program and rank."""

_workspaces: dict[tuple[str, int], Workspace | None] = {}


@dataclass(frozen=True)
class Workspace:
    """This rank's buffer, FLAG_BYTES of zeros and then data, and the addresses of all ranks' buffers on this GPU."""

    buffer: Tensor  # [FLAG_BYTES + CAPACITY] uint8
    addresses: Tensor  # [R] int64
    rank: int
    capacity: int = CAPACITY


def workspace_of(group: dist.ProcessGroup, device: torch.device) -> Workspace | None:
    """The group's buffers, made at the first call, which all ranks make together; None where GPUs cannot share memory.

    A capture of a CUDA graph does not make them.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    key = (group.group_name, device.index)
    if key not in _workspaces and not torch.cuda.is_current_stream_capturing():
        _workspaces[key] = _rendezvous(group, device)
    return _workspaces.get(key)


def _rendezvous(group: dist.ProcessGroup, device: torch.device) -> Workspace | None:
    made: Workspace | None = None
    try:
        buffer = symmetric.empty(FLAG_BYTES + CAPACITY, dtype=torch.uint8, device=device)
        buffer.zero_()
        handle = symmetric.rendezvous(buffer, group)
        addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
        made = Workspace(buffer, addresses, group.rank())
    except RuntimeError as error:
        logging.getLogger("rlkernel").info("all_reduce: no symmetric memory, the group's collectives run: %s", error)
    # Every rank must take the same path. The sum also orders the zeros before any rank's first signal.
    ready = torch.tensor([int(made is not None)], device=device)
    dist.all_reduce(ready, group=group)
    return made if int(ready) == group.size() else None
