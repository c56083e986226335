"""How pytest-xdist workers share a GPU: which device each takes first, which tests come first, who waits for memory.

`tests/test_gpu_checks.py` runs these rules without a GPU.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest
import torch

LONG = (
    "test_vllm_gpu.py",
    "test_ranks_gpu.py",
    "test_accelerate_gpu.py",
    "test_vision_gpu.py",
    "test_turns_gpu.py",
    "test_transfer_gpu.py",
    "test_schedules_of_model_gpu.py",
    "test_demo_gpu.py",
    "test_tensor_parallel_gpu.py",
)
"""Files that start vLLM or several processes, or certify many shape classes."""


def rotated(devices: list[str], worker: str) -> list[str]:
    """Devices in another order for each worker, so that not all tests need the first one's memory."""
    first = int(worker.removeprefix("gw")) % len(devices)
    return devices[first:] + devices[:first]


def chunks(count: int, workers: int) -> list[int]:
    """How many of `count` tests pytest-xdist's worksteal scheduler hands to each worker at the start."""
    sizes: list[int] = []
    for left in range(workers, 0, -1):
        sizes.append((count - sum(sizes)) // left)
    return sizes


def long_first(items: Sequence[pytest.Item], workers: int) -> list[pytest.Item]:
    """The same tests; those that take longest, or need much memory, are the first of each worker's chunk."""
    is_long = lambda item: item.path.name in LONG or item.get_closest_marker("gpu_memory") is not None
    long = [item for item in items if is_long(item)]
    others = iter([item for item in items if not is_long(item)])
    ordered: list[pytest.Item] = []
    for worker, size in enumerate(chunks(len(items), workers)):
        first = long[worker::workers]
        ordered += [*first, *itertools.islice(others, max(size - len(first), 0))]
    return [*ordered, *others]


def require_memory(gib: int, patience: float = 300.0) -> None:
    """Waits until `gib` GiB of the current GPU are free; other processes may hold them for a while.

    Skips the test where the GPU is smaller, or after `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while True:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        if total < gib << 30:
            pytest.skip(f"needs {gib} GiB of GPU memory")
        if free >= gib << 30:
            return
        if time.monotonic() > deadline:
            pytest.skip(f"needs {gib} GiB of free GPU memory")
        time.sleep(0.5)
