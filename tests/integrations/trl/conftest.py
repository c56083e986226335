"""Each test of TRL has a port of its own.

TRL gives the vLLM in its process port 29500 if nobody listens there, and tests that run side by side would race for it.
"""

from __future__ import annotations

import socket

import pytest


@pytest.fixture(autouse=True)
def own_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
