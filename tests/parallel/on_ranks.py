"""Runs a function on ranks, once for many checks: processes that import torch cost most of such a test."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

Function = Callable[[dict[int, ProcessGroup]], Any]


def on_ranks(function: Function, folder: Path, ranks: int = 4, backend: str = "gloo") -> list[Any]:
    """What `function` returned on each rank; JSON data.

    Args:
        function: of the groups of the first 1, 2 and 4 ranks by their size; a rank gets those that it belongs to.
        backend: with nccl, rank r has device r.
    """
    torch.multiprocessing.spawn(_rank, (function, folder, ranks, backend, sys.path), nprocs=ranks)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def _rank(rank: int, function: Function, folder: Path, ranks: int, backend: str, path: list[str]) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 4) if size <= ranks}
    found = function({size: group for size, group in groups.items() if rank < size})
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
