"""Handles SIGINT and SIGTERM, so that what is finished can be saved before a command ends."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def handling(handle: Callable[[int], None]) -> Iterator[None]:
    """Inside the block, both signals call `handle` with their number; only in the main thread, as Python requires."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda caught, _: handle(caught)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
