"""Buffers that the GPUs of a process group write directly over NVLink, for collectives that are one kernel."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

CAPACITY = 16 << 20
"""Most bytes that one kernel exchanges; larger data take several."""
PROGRAMS = 128
"""Most programs of a kernel that waits for other GPUs: all must be resident at once."""
CONTROL_BYTES = 8 * PROGRAMS * (1 + 2 * 8)
"""int64 in front of the data: a counter of calls per program, and for two barriers a flag per program and rank."""
BYTES = CONTROL_BYTES + 2 * 2 * CAPACITY
"""Two halves, used in turn, each of data and results."""

_workspaces: WeakKeyDictionary[dist.ProcessGroup, dict[int | None, Workspace | None]] = WeakKeyDictionary()
"""By group and device. Not by the group's name, which another group has after `destroy_process_group`."""


@dataclass(frozen=True)
class Workspace:
    """This rank's buffer: counters and flags, which start at zero, data and results.

    Attributes:
        buffer: [BYTES] uint8.
        addresses: [R] int64, all ranks' buffers as this GPU sees them.
    """

    buffer: Tensor
    addresses: Tensor
    rank: int


def workspace_of(group: dist.ProcessGroup, device: torch.device) -> Workspace | None:
    """The group's buffers, made at the first call, which all ranks make together; None where GPUs cannot share memory.

    The capture of a CUDA graph does not make them.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    of_group = _workspaces.setdefault(group, {})
    if device.index not in of_group and not torch.cuda.is_current_stream_capturing():
        of_group[device.index] = _rendezvous(group, device)
    return of_group.get(device.index)


def _rendezvous(group: dist.ProcessGroup, device: torch.device) -> Workspace | None:
    import torch.distributed._symmetric_memory as symmetric  # not a public module: only who needs it depends on it

    def unavailable(error: RuntimeError) -> None:
        logging.getLogger("rlkernel").info("all_reduce: no symmetric memory, the group's collectives run: %s", error)

    def everywhere(done: bool) -> bool:
        """Whether all ranks have got this far; all must take the same path."""
        count = torch.tensor([int(done)], device=device)
        dist.all_reduce(count, group=group)
        return int(count) == group.size()

    buffer: Tensor | None = None
    made: Workspace | None = None
    try:
        buffer = symmetric.empty(BYTES, dtype=torch.uint8, device=device)
        buffer.zero_()
    except RuntimeError as error:
        unavailable(error)
    if not everywhere(buffer is not None) or buffer is None:
        return None
    try:
        handle = symmetric.rendezvous(buffer, group)
        addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
        made = Workspace(buffer, addresses, group.rank())
    except RuntimeError as error:
        unavailable(error)
    # The sum also orders the zeros before any rank's first signal.
    return made if everywhere(made is not None) else None
