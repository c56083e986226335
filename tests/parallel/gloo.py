"""Runs a function on four gloo ranks, once for many checks: processes that import torch cost most of such a test."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

RANKS = 4


def on_ranks(function: Callable[[dict[int, ProcessGroup]], Any], folder: Path) -> list[Any]:
    """What `function` returned on each of four ranks; JSON data.

    Args:
        function: of the groups of the first 1, 2 and 4 ranks by their size; a rank gets those that it belongs to.
    """
    torch.multiprocessing.spawn(_rank, (function, folder, sys.path), nprocs=RANKS)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def _rank(rank: int, function: Callable[[dict[int, ProcessGroup]], Any], folder: Path, path: list[str]) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 4)}
    found = function({size: group for size, group in groups.items() if rank < size})
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
