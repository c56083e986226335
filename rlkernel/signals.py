"""SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed terminal): handlers inside a block, and the exception of a command
that one of them ends; and standard output that nobody reads.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
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


def discard_stdout() -> None:
    """Redirects standard output to the null device, because the interpreter flushes it once more at exit."""
    with contextlib.suppress(AttributeError, OSError):  # none, or one without a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
