"""What belongs to a process group ends with it, without a GPU."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from rlkernel.kernels import symmetric_memory
from rlkernel.ops.all_reduce import register_group


def test_another_group_of_the_same_name_gets_buffers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(symmetric_memory, "_rendezvous", lambda group, device: made.append(group.group_name))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for _ in range(2):
            symmetric_memory.workspace_of(dist.group.WORLD, torch.device("cuda", 0))
        dist.destroy_process_group()
    assert len(made) == 2 and made[0] == made[1] and len(symmetric_memory._workspaces) == 0


def test_a_registered_group_ends() -> None:
    """Otherwise gloo's threads run until Python ends, and sometimes abort it then."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = weakref.ref(dist.group.WORLD)
    register_group(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    assert group() is None
