"""For every test: `tests/` is on the import path (by this file's place), and torch runs one thread.

Test processes stand side by side, and OpenMP threads that outnumber the cores spin at barriers. A property over the
number of threads sets its own. Where Triton's kernels run in its interpreter, their accesses to memory are checked.
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
    triton_interpreter.quicken()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that run a whole file in a process of their own come first, so that no worker is left alone with one."""
    items.sort(key=lambda item: item.name != "test_in_the_interpreter")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
