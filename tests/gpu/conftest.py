"""GPU tests: `record` collects what each one compared; `benchmarks/test_gpu.py` writes it to a result file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

_ROWS: list[dict[str, Any]] = []
LONG = ("test_vllm_gpu.py", "test_transfer_gpu.py", "test_schedules_of_model_gpu.py", "test_demo_gpu.py")


def turned(devices: list[str], worker: str) -> list[str]:
    """Devices in another order for each of pytest-xdist's workers, so that all do not fill the first one's memory."""
    first = int(worker.removeprefix("gw")) % len(devices)
    return devices[first:] + devices[:first]


if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.device_count() > 1:  # which does not initialise CUDA
    _SEEN = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(i) for i in range(torch.cuda.device_count()))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(turned(_SEEN.split(","), os.environ["PYTEST_XDIST_WORKER"]))


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`record(cases=, tokens=, elements=, mismatches=, ...)`: one row of the result file, named after the test.

    What was compared, as `gpu_checks.Compared` counts it; `refused=True`: something wrong, which had to differ.
    """

    def add(**fields: Any) -> None:
        _ROWS.append({"test": request.node.name, **fields})

    return add


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start vLLM take longest, or certify much: each comes first in what pytest-xdist hands a worker. So
    does what needs most of a GPU's memory, while the others' processes hold little."""
    long = [item for item in items if item.path.name in LONG or "2^31" in item.name]
    if "RLKERNEL_RECORD" not in os.environ or not long:
        return
    step = max(len(items) // (4 * int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))), 2)
    items[:] = [item for item in items if item not in long]
    for i, item in enumerate(long):
        items.insert(i * step, item)


def pytest_sessionfinish(session: pytest.Session) -> None:
    target = os.environ.get("RLKERNEL_RECORD")
    if target and _ROWS:
        # pytest-xdist's workers each write a file of their own beside it.
        Path(target + os.environ.get("PYTEST_XDIST_WORKER", "")).write_text(json.dumps(_ROWS))
