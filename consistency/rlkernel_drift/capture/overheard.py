"""The end of what this process and those that it starts print: vLLM tells there alone why its engine does not start.

The output goes on to where it went before, line for line.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator

_LINES = 2000
_CAUSE = re.compile(r"(?:^|[\s\]])((?:[A-Za-z_][\w.]*)?(?:Error|Exception|Interrupt)): (.+)")
# What the processes around the one that failed say: that it failed.
_ECHO = re.compile(r"initialization failed|failed to start|See (?:stack trace|root cause)", re.IGNORECASE)


@contextlib.contextmanager
def overheard() -> Iterator[deque[str]]:
    """Yields the last lines of standard output and standard error while the block runs.

    Processes that the block starts keep writing through it afterwards.
    """
    heard: deque[str] = deque(maxlen=_LINES)
    threads = []
    kept = {}
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        kept[number] = os.dup(number)
        read, write = os.pipe()
        os.dup2(write, number)
        os.close(write)
        threads.append(threading.Thread(target=_pass_on, args=(read, os.dup(kept[number]), heard), daemon=True))
        threads[-1].start()
    try:
        yield heard
    finally:
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(kept[number], number)
            os.close(kept[number])
        # A process that still runs holds its end open; one that failed has closed it.
        for thread in threads:
            thread.join(0.5)


def _pass_on(read: int, target: int, heard: deque[str]) -> None:
    rest = b""
    while part := os.read(read, 1 << 16):
        # Nobody may wait because the reader of our own output has gone.
        with contextlib.suppress(OSError):
            os.write(target, part)
        *lines, rest = (rest + part).split(b"\n")
        heard.extend(line.decode("utf-8", "replace") for line in lines)
        rest = rest[-(1 << 16) :]
    heard.append(rest.decode("utf-8", "replace"))
    os.close(read)
    os.close(target)


def cause(lines: list[str]) -> str | None:
    """The last error in lines of a log, what merely repeats that something failed left out; None without one."""
    found = (match for line in reversed(lines) if (match := _CAUSE.search(line)) and not _ECHO.search(line))
    match = next(found, None)
    return None if match is None else f"{match[1]}: {match[2].strip()}"
