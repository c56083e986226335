"""Processes that end with all they have started, whatever ends the script that runs them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Groups:
    """Processes, each the head of a group of its own: what it started ends with it, engines and trainers too."""

    def __init__(self) -> None:
        self.lock, self.running, self.over = threading.Lock(), set[subprocess.Popen[bytes]](), False

    def run(self, command: list[str], limit: float | None, **options: Any) -> int:
        """Exit status of a command. Raises TimeoutExpired once `limit` seconds have passed."""
        with self.lock:
            if self.over:
                return -signal.SIGKILL
            process = subprocess.Popen(command, start_new_session=True, **options)
            self.running.add(process)
        try:
            self._wait(process, limit)
        finally:
            with self.lock:
                self.running.discard(process)
                self._end(process)  # also where it ended by itself: a crash leaves what it started behind
            status = process.wait()
        return status

    def end(self) -> None:
        """Ends them all; none is started afterwards."""
        with self.lock:
            self.over = True
            for process in self.running:
                self._end(process)

    def _wait(self, process: subprocess.Popen[bytes], limit: float | None) -> None:
        """Returns once it has ended, and leaves its status there: until that is taken, no other group has its number.

        Raises TimeoutExpired.
        """
        until = None if limit is None else time.monotonic() + limit
        now = 0 if until is None else os.WNOHANG
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | now) is None:
            if until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired(process.args, limit or 0.0)
            time.sleep(0.05)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        if process.returncode is None:  # not waited for: the number is still its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def pool_of(jobs: int, groups: Groups) -> Iterator[ThreadPoolExecutor]:
    """Threads that wait for processes of `groups`. Where the block ends by an exception these end first: no signal of
    the keyboard's reaches them, and the pool waits for its threads."""
    with ThreadPoolExecutor(jobs) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            groups.end()
            raise


def exit_on_signals() -> None:
    """Leaves as on an exception where the process is told to end, so that what it runs can be ended too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _stop)


def _stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
