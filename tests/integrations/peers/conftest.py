"""Marks of transformers' tests, which this project's settings do not define."""

from __future__ import annotations

import pytest

MARKS = (
    "accelerate_tests",
    "is_training_test",
    "torch_compile_test",
    *(f"flash_attn{number}_test" for number in ("", "_3", "_4")),
)


def pytest_configure(config: pytest.Config) -> None:
    for mark in MARKS:
        config.addinivalue_line("markers", f"{mark}: of transformers' tests")
