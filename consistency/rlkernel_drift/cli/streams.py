"""Standard output whose reader has gone (`| head`): what is still written goes nowhere, the exit status stays."""

from __future__ import annotations

import os
import sys


def discard_stdout() -> None:
    """Sends the rest of standard output nowhere, what is in its buffer too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def emit(text: str) -> None:
    """Writes to standard output, whether or not somebody still reads."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()
