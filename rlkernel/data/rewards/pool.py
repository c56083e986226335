"""Worker processes for rewards, with limits of time, memory and output.

Each thread of the pool talks to one worker through pipes. A worker that exceeds a limit is killed together with the
processes it started, and a new one makes the calls that are left.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlkernel.data.errors import InputError
from rlkernel.data.rewards.call import Call, Failure, Job, Outcome

START_SECONDS = 600.0
"""Limit of loading the rewards' modules, which may read a model."""
ANSWER_BYTES = 64 << 20
"""Largest outcome of one call, with what it logs in `log_extra`."""
OUTPUT_TAIL = 2000
"""Last bytes of output that are shown if a worker ends."""
HOPELESS = 16
"""A reward whose first calls of a run all fail stops the run after so many."""


@dataclass(frozen=True)
class Limits:
    """Limits of the worker processes.

    Attributes:
        workers: processes, at most.
        timeout_s: seconds of one call.
        memory_bytes: address space of one worker; None is unlimited.
        output_bytes: printed output that is kept in the log.
    """

    workers: int = 4
    timeout_s: float = 30.0
    memory_bytes: int | None = 8 << 30
    output_bytes: int = 1 << 20


class Log:
    """What rewards print, in a file of bounded size."""

    def __init__(self, limit: int):
        self._limit, self._written = limit, 0
        self._path: Path | None = None
        self._lock = threading.Lock()

    def open(self, path: Path) -> None:
        """From now on output is appended to the file; before that it is discarded."""
        self._path = path

    def write(self, data: bytes) -> None:
        with self._lock:
            if self._path is None or self._written >= self._limit:
                return
            kept = data[: self._limit - self._written]
            self._written += len(kept)
            with suppress(OSError), self._path.open("ab") as file:  # a full disk: the log does not end a run
                file.write(kept)
                if self._written == self._limit:
                    file.write(b"\n(later output is discarded: reward_pool.output_mib)\n")


class Pool:
    """Runs jobs in worker processes, which start when they are needed.

    Args:
        rewards: `name`, `function` (a reference) and `options` of each reward.

    Raises:
        InputError: a reward cannot be loaded.
    """

    def __init__(self, rewards: Sequence[Mapping[str, Any]], limits: Limits):
        self.log = Log(limits.output_bytes)
        self._rewards, self._limits = rewards, limits
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._threads = ThreadPoolExecutor(limits.workers, "rewards")
        self._lock = threading.Lock()
        self._failures = [0] * len(rewards)  # calls in a row from the start of the run; -1 once one has succeeded
        self._finalizer = weakref.finalize(self, _close, self._workers, self._threads)
        first = self._new_worker()
        self.signatures = first.start()
        self._idle.put(first)

    def submit(self, job: Job) -> Future[list[Outcome]]:
        """Queues a job; the future holds its outcomes, in no particular order.

        The future raises InputError if the rewards cannot be loaded any more, or if one of them always fails.
        """
        return self._threads.submit(self._judge, job)

    def close(self) -> None:
        """Kills the workers."""
        self._finalizer()

    def _new_worker(self) -> _Worker:
        worker = _Worker(self._rewards, self._limits, self.log)
        self._workers.append(worker)
        return worker

    def _judge(self, job: Job) -> list[Outcome]:
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            worker = self._new_worker()
        outcomes: list[Outcome] = []
        try:
            left = job.calls
            while left:
                found = worker.run(replace(job, calls=left))
                outcomes += found
                left = [call for call in left if call not in [outcome.call for outcome in found]]
                for outcome in found:
                    self._stop_if_hopeless(outcome)
        finally:
            self._idle.put(worker)
        return outcomes

    def _stop_if_hopeless(self, outcome: Outcome) -> None:
        number = outcome.call.reward
        with self._lock:
            if outcome.failure is None:
                self._failures[number] = -1
            elif self._failures[number] >= 0:
                self._failures[number] += 1
            hopeless = self._failures[number] >= HOPELESS
        if hopeless and outcome.failure is not None:
            name = self._rewards[number]["name"]
            raise failed_always(f"reward {name}", outcome.failure, f"its first {HOPELESS} calls failed")


def failed_always(who: str, failure: Failure, extent: str) -> InputError:
    """The error that stops a run, with the traceback of one failure."""
    trace = f"\n{failure.traceback.rstrip()}" if failure.traceback else ""
    return InputError(f"{who}: {failure.message}; {extent}, so the run stops{trace}")


def _close(workers: list[_Worker], threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.close()


class _Worker:
    """One worker process, started again after it was killed. One thread at a time uses it."""

    def __init__(self, rewards: Sequence[Mapping[str, Any]], limits: Limits, log: Log):
        self._rewards, self._limits, self._log = rewards, limits, log
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._lock = threading.Lock()  # of starting against closing

    def start(self) -> list[dict[str, Any]]:
        """Starts the process and returns the signatures of its rewards.

        Raises:
            InputError: a reward cannot be loaded.
        """
        path = os.pathsep.join(entry for entry in sys.path if entry)
        command = [sys.executable, "-P", "-m", "rlkernel.data.rewards.worker"]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
        with self._lock:
            if self._closed:
                raise RuntimeError("the rewards' workers are closed")
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C does not reach it, and its process group can be killed
            )
        process = self._process
        assert process.stdin and process.stdout and process.stderr
        os.set_blocking(process.stdin.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(process.stdout, selectors.EVENT_READ)
        self._selector.register(process.stderr, selectors.EVENT_READ)
        self._answers, self._tail = b"", b""
        message = {"memory_bytes": self._limits.memory_bytes, "rewards": list(self._rewards)}
        loaded = self._exchange(json.dumps(message), START_SECONDS)
        if isinstance(loaded, Failure):
            self._kill()
            raise InputError(f"rewards: a worker process {loaded.message} while it loaded them\n{loaded.traceback}")
        answer = json.loads(loaded)
        if "error" in answer:
            self._kill()
            raise InputError(answer["error"])
        self._signatures: list[dict[str, Any]] = answer["signatures"]
        return self._signatures

    def run(self, job: Job) -> list[Outcome]:
        """Outcomes of the job's calls, up to the first one that ends the process; at least of one call."""
        if self._process is None:
            self.start()
        outcomes: list[Outcome] = []
        left = list(job.calls)
        message: str | None = job.to_json()
        while left:
            answer = self._exchange(message, self._limits.timeout_s)
            message = None
            if isinstance(answer, Failure):
                self._kill()
                return outcomes + [Outcome(call, failure=answer) for call in self._in_progress(left)]
            outcome = Outcome.from_json(answer)
            outcomes.append(outcome)
            left.remove(outcome.call)
            if outcome.failure is not None and outcome.failure.reason == "memory":
                self._kill()  # what the reward keeps would make later calls fail too
                return outcomes
        return outcomes

    def _in_progress(self, left: list[Call]) -> list[Call]:
        """Those of the unanswered calls that had begun: one, or all of an async reward."""
        if self._signatures[left[0].reward]["async"]:
            return [call for call in left if call.reward == left[0].reward]
        return left[:1]

    def _exchange(self, message: str | None, seconds: float) -> bytes | Failure:
        """Sends a line, if there is one, and returns the next line of the answer, or why there is none."""
        process = self._process
        assert process is not None and process.stdin and process.stdout and process.stderr
        deadline = time.monotonic() + seconds
        unsent = b"" if message is None else message.encode() + b"\n"
        selector = self._selector
        if unsent:
            selector.register(process.stdin, selectors.EVENT_WRITE)
        while b"\n" not in self._answers:
            if len(self._answers) > ANSWER_BYTES:
                return Failure("invalid", f"logged more than {ANSWER_BYTES >> 20} MiB in one call")
            left = deadline - time.monotonic()
            if left <= 0:
                return Failure("timeout", f"ran longer than {seconds:g} s", self._output())
            for key, _ in selector.select(left):
                if key.fileobj is process.stdin:
                    try:
                        unsent = unsent[os.write(key.fd, unsent) :]
                    except BrokenPipeError:  # it has ended; the end of its answers says so too
                        unsent = b""
                    if not unsent:
                        selector.unregister(process.stdin)
                    continue
                data = os.read(key.fd, 1 << 16)
                if key.fileobj is process.stderr:
                    self._keep(data)
                    if not data:
                        selector.unregister(process.stderr)
                elif data:
                    self._answers += data
                else:
                    return self._ended(process)
        line, _, self._answers = self._answers.partition(b"\n")
        return line

    def _keep(self, output: bytes) -> None:
        self._log.write(output)
        self._tail = (self._tail + output)[-OUTPUT_TAIL:]

    def _output(self) -> str:
        text = self._tail.decode(errors="replace").rstrip()
        return f"its last output:\n{text}" if text else ""

    def _ended(self, process: subprocess.Popen[bytes]) -> Failure:
        """Describes a process that closed its pipe."""
        assert process.stderr
        os.set_blocking(process.stderr.fileno(), False)
        with suppress(BlockingIOError):
            while data := os.read(process.stderr.fileno(), 1 << 16):
                self._keep(data)
        try:
            status = process.wait(1.0)
        except subprocess.TimeoutExpired:
            return Failure("exited", "closed the pipe to the trainer", self._output())
        how = f"with status {status}" if status >= 0 else f"by signal {signal.Signals(-status).name}"
        return Failure("exited", f"ended its process {how}", self._output())

    def _kill(self) -> None:
        """Kills the process and the processes of its group."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._selector.close()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def close(self) -> None:
        """Kills the process for good; a thread that waits for its answer sees it end."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
