"""SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed terminal): handlers inside a block, and the exception of a command
that one of them ends.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


class Interrupted(KeyboardInterrupt):
    """A signal ends the command at once.

    Attributes:
        signal: the signal's number.
    """

    def __init__(self, number: int, *message: str):
        super().__init__(*message)
        self.signal = number


def end(number: int) -> None:
    """The handler that ends a command at once."""
    raise Interrupted(number)


@contextlib.contextmanager
def handled(handle: Callable[[int], None]) -> Iterator[None]:
    """Inside the block, SIGINT, SIGTERM and, unless `nohup` ignores it, SIGHUP call `handle` with their number.

    Outside the main thread the block changes nothing, because Python allows handlers only there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, lambda received, frame: handle(received)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
