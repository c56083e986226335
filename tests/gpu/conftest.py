"""Settings of the GPU tests: `record` collects what each compared, for `benchmarks/test_gpu.py`; workers share the GPU.

The rules of sharing, which can be tested without a GPU, are in `workers.py`.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.workers import long_first, require_memory, rotated

_ROWS: list[dict[str, Any]] = []
MOST_CACHED = 1 << 30  # bytes that torch's allocator may keep for the next test

if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.device_count() > 1:  # which does not initialise CUDA
    _SEEN = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(i) for i in range(torch.cuda.device_count()))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(rotated(_SEEN.split(","), os.environ["PYTEST_XDIST_WORKER"]))


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`record(cases=, tokens=, elements=, mismatches=, ...)`: one row of the result file, named after the test.

    The counts are those of `gpu_checks.Compared`. `refused=True` marks a wrong schedule, which had to differ.
    """

    def add(**fields: Any) -> None:
        _ROWS.append({"test": request.node.name, **fields})

    return add


@pytest.fixture(autouse=True)
def gpu_memory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs tests marked `gpu_memory(gib)` one at a time, once that much is free, and bounds each worker's cache.

    An H100 has 78 GiB, an H200 139 GiB, and more than a dozen processes share one of them.
    """
    marker = request.node.get_closest_marker("gpu_memory")
    if marker is None:
        yield
    else:
        with open(tmp_path_factory.getbasetemp().parent / "gpu_memory.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            require_memory(*marker.args)
            yield
            torch.cuda.empty_cache()
    if torch.cuda.memory_reserved() > MOST_CACHED:
        torch.cuda.empty_cache()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu_memory(gib): needs so many GiB of free GPU memory")
    if "RLKERNEL_RECORD" in os.environ and getattr(config.option, "dist", "no") == "load":
        config.option.dist = "worksteal"  # no worker is left with short tests behind a long one


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "RLKERNEL_RECORD" in os.environ:
        items[:] = long_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def pytest_sessionfinish(session: pytest.Session) -> None:
    target = os.environ.get("RLKERNEL_RECORD")
    if target and _ROWS:
        # Each pytest-xdist worker writes a file of its own.
        Path(target + os.environ.get("PYTEST_XDIST_WORKER", "")).write_text(json.dumps(_ROWS))
