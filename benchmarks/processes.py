"""Child processes that are killed with all their descendants when the script ends for any reason."""

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
    """Processes that each lead a process group, so that the engines and trainers they start are killed with them."""

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
                self._end(process)  # also after a normal exit, because a crashed process can leave children
            status = process.wait()
        return status

    def end(self) -> None:
        """Kills all of them and prevents new ones."""
        with self.lock:
            self.over = True
            for process in self.running:
                self._end(process)

    def _wait(self, process: subprocess.Popen[bytes], limit: float | None) -> None:
        """Returns when the process has ended. It stays a zombie, so that its group id cannot be reused before `_end`.

        Raises TimeoutExpired.
        """
        until = None if limit is None else time.monotonic() + limit
        now = 0 if until is None else os.WNOHANG
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | now) is None:
            if until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired(process.args, limit or 0.0)
            time.sleep(0.05)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        if process.returncode is None:  # not reaped, so the pid is still its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def pool_of(jobs: int, groups: Groups) -> Iterator[ThreadPoolExecutor]:
    """Threads that wait for processes of `groups`. On an exception the processes are killed first: they do not receive
    the terminal's signals, and the pool waits for its threads."""
    with ThreadPoolExecutor(jobs) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            groups.end()
            raise


def exit_on_signals() -> None:
    """Turns SIGTERM and SIGHUP into SystemExit, so that child processes are killed too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup
            signal.signal(number, _stop)


def _stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
