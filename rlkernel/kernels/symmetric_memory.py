"""Buffers that the GPUs of a process group write directly over NVLink, for collectives that are one kernel."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

CAPACITY = 16 << 20
"""The most bytes that one kernel exchanges; larger data take several launches."""
PROGRAMS = 128
"""The most programs of a kernel that waits for other GPUs, because all must be resident at once."""
CONTROL_BYTES = 8 * PROGRAMS * (1 + 2 * 8)
"""int64 words before the data: per program a counter of calls, and for two barriers one flag per rank."""
BYTES = CONTROL_BYTES + 2 * 2 * CAPACITY
"""Two halves that alternate between calls, each with data and results."""

_workspaces: WeakKeyDictionary[dist.ProcessGroup, dict[int | None, Workspace | None]] = WeakKeyDictionary()
"""By group and device. Not by the group's name, which another group can get after `destroy_process_group`."""


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
    """The group's buffers, or None if the GPUs cannot share memory.

    The first call outside a CUDA graph capture allocates them; all ranks must make that call together.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    of_group = _workspaces.setdefault(group, {})
    if device.index not in of_group and not torch.cuda.is_current_stream_capturing():
        of_group[device.index] = _rendezvous(group, device)
    return of_group.get(device.index)


def _rendezvous(group: dist.ProcessGroup, device: torch.device) -> Workspace | None:
    import torch.distributed._symmetric_memory as symmetric  # not public, so imported only if needed

    def unavailable(error: RuntimeError) -> None:
        logging.getLogger("rlkernel").info("all_reduce: no symmetric memory, using the group's collectives: %s", error)

    def everywhere(done: bool) -> bool:
        """Whether the step succeeded on all ranks, which must take the same path."""
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
