"""Applies to every test: puts `tests/` on the import path, and limits torch to one thread.

Test processes run in parallel, and OpenMP threads that outnumber the cores spin at barriers. A test of the number of
threads sets its own. Triton kernels that run in the interpreter have their memory accesses checked (`memory_check.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from compatibility import compat, pytest_runtest_logreport, pytest_sessionfinish, pytest_terminal_summary

__all__ = ["compat", "pytest_runtest_logreport", "pytest_sessionfinish", "pytest_terminal_summary"]

if os.environ.get("TRITON_INTERPRET") == "1":
    import memory_check
    import triton_interpreter

    memory_check.install()
    triton_interpreter.accelerate()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that run a file in a process of its own take longest, so they come first."""
    items.sort(key=lambda item: item.name != "test_in_the_interpreter")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
