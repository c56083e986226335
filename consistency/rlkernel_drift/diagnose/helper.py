"""A second process for work on the CPU, which reports to the first one."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

import torch

Report = TypeVar("Report")
Work = Callable[[Callable[[Report], None]], None]


class Helper(Generic[Report]):
    """A process that is forked from this one, and ends with the context.

    Args:
        work: what the process runs; its argument is a function that sends a report. It runs torch on one thread and
            must not call backward, because the threads of the parent process do not exist in a fork.
    """

    def __init__(self, work: Work[Report]) -> None:
        self._reports, theirs = multiprocessing.Pipe(duplex=False)
        self._process = multiprocessing.get_context("fork").Process(target=_run, args=(work, theirs), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of other threads
            self._process.start()
        theirs.close()

    def report(self, seconds: float) -> Report | None:
        """The next report, if it comes within so many seconds; None if the process has ended."""
        with contextlib.suppress(EOFError, OSError):
            if self._reports.poll(seconds):
                return self._reports.recv()
        return None

    def __enter__(self) -> Helper[Report]:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._reports.close()


def _run(work: Work[Report], reports: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    torch.set_num_threads(1)
    work(reports.send)
