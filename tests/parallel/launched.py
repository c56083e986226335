"""Runs a function in 1, 2, 4 processes as `accelerate launch` does: its environment, gloo, and FSDP2 on a CPU.

One new process imports the caller's module, and all others are forked from it, so imports are paid once.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch


def on_processes(work: Callable[..., Any], plan: list[tuple[int, Any]], folder: Path) -> list[list[Any]]:
    """For each (number of processes, argument) of the plan: what `work(argument)` returned on each; JSON data.

    Args:
        work: a function of a module that `sys.path` finds.
    """
    torch.multiprocessing.start_processes(_fork_all, (work.__module__, work.__name__, plan, folder, sys.path), nprocs=1)
    return [
        [json.loads((folder / f"{number}.{rank}.json").read_text()) for rank in range(processes)]
        for number, (processes, _) in enumerate(plan)
    ]


def _fork_all(_: int, module: str, name: str, plan: list[tuple[int, Any]], folder: Path, path: list[str]) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    work = getattr(importlib.import_module(module), name)
    for number, (processes, argument) in enumerate(plan):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        args = (work, argument, processes, port, folder / f"{number}")
        torch.multiprocessing.start_processes(_process, args, nprocs=processes, start_method="fork")


def _process(rank: int, work: Callable[..., Any], argument: Any, processes: int, port: int, stem: Path) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    os.environ.update({key: str(value) for key, value in numbers.items()})
    found = work(argument)
    stem.with_name(f"{stem.name}.{rank}.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def accelerate_state(fsdp: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """A block whose trainer gets a new state of accelerate, and the arguments that make it shard.

    accelerate shards on accelerators only and ignores FSDP on a CPU, so the block sets the type itself.

    Args:
        fsdp: entries of `fsdp_config`; None: DDP.
    """
    from accelerate import state
    from accelerate.utils import DistributedType

    stock = state.AcceleratorState.__init__

    def __init__(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        stock(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    state.AcceleratorState.__init__ = __init__
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    state.AcceleratorState._reset_state()
    if torch.distributed.is_initialized():
        state.PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU
    config = {"version": 2, "cpu_ram_efficient_loading": False, **(fsdp or {})}
    try:
        yield {} if fsdp is None else {"fsdp": True, "fsdp_config": config}
    finally:
        state.AcceleratorState.__init__ = stock
