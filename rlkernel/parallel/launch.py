"""Joins the ranks that torchrun has started on this machine, and ends all of them, with the reason, when one dies.

A rank that waits in a collective for a dead one would wait until the timeout, and under NCCL no Python code runs in the
meantime. A thread therefore watches the other ranks' processes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from rlkernel.parallel.ranks import RankError, Ranks
from rlkernel.parallel.torchrun import is_launched

POLL_SECONDS, GRACE_SECONDS = 0.5, 10.0


@contextlib.contextmanager
def joined(device: str, timeout_s: float) -> Iterator[Ranks]:
    """The ranks of this run inside the block: those that torchrun has started, or this process alone.

    On GPUs rank r takes device r and NCCL; ranks that share a GPU use gloo, through host memory.

    Args:
        device: "cpu" or "cuda".
        timeout_s: seconds that a rank waits for the others in a collective, at most.

    Raises:
        RankError: another rank has failed while this one was inside the block; or the number of ranks is not a power
            of two, or they are on several machines.
    """
    if not is_launched():
        yield Ranks()
        return
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if size & (size - 1):
        raise RankError(f"torchrun has started {size} ranks; expected a power of two (--nproc-per-node 1, 2, 4, 8)")
    if local != size:
        raise RankError(f"torchrun has started {size} ranks, {local} of them on this machine; start all on one machine")
    backend, place = "gloo", None
    if device == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(place)
        if torch.cuda.device_count() >= local:
            backend = "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=timeout_s)
    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("ranks", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=place if "nccl" in backend else None,
    )
    ranks = Ranks(rank=rank, size=size)
    watchdog = Watchdog(ranks, dist.PrefixStore("watch", store), ranks.gather(os.getpid()))
    watchdog.start()
    ranks = replace(ranks, cause_of=watchdog.cause_of)
    try:
        with ranks.explained():
            yield ranks
            dist.barrier()  # the last one to end may still need the others, such as rank 0, which writes the model
    except BaseException as error:
        if not isinstance(error, RankError):
            watchdog.report(error)
        raise
    watchdog.finish()
    dist.destroy_process_group()


class Watchdog(threading.Thread):
    """Finds out why a rank has failed, and ends this process if another rank has died and the main thread hangs.

    Args:
        ranks: this one and the others.
        store: where ranks leave their reasons; it outlives them, because torchrun's agent keeps it.
        processes: process id of each rank.
    """

    def __init__(self, ranks: Ranks, store: dist.Store, processes: list[int]):
        super().__init__(name="rlkernel-ranks", daemon=True)
        self.ranks, self.store, self.processes, self.finished = ranks, store, processes, False

    def report(self, error: BaseException) -> None:
        """Leaves the reason for which this rank ends."""
        text = next(iter(f"{error}".strip().splitlines()), type(error).__name__)
        with contextlib.suppress(RuntimeError):
            self.store.set(f"failed/{self.ranks.rank}", text)

    def finish(self) -> None:
        """Ends the thread; called after a collective that all ranks have reached."""
        self.finished = True

    def cause(self) -> str | None:
        """Why another rank has failed: its own reason, or that its process is gone; None if all are well."""
        others = [rank for rank in range(self.ranks.size) if rank != self.ranks.rank]
        with contextlib.suppress(RuntimeError):  # the store is gone with the rank that kept it
            for rank in others:
                if self.store.check([f"failed/{rank}"]):
                    return f"rank {rank} has failed: {self.store.get(f'failed/{rank}').decode()}"
        for rank in others:
            if not is_alive(self.processes[rank]):
                return self._first(
                    f"rank {rank} (process {self.processes[rank]}) has died without a message, as after kill -9 or "
                    "when the machine runs out of memory"
                )
        return None

    def _first(self, cause: str) -> str:
        """The cause that the first rank has found: that rank ends too, and would be the cause for the others."""
        with contextlib.suppress(RuntimeError):
            return self.store.compare_set("cause", "", cause).decode()
        return cause

    def cause_of(self, error: BaseException) -> str | None:
        """`cause`, if it explains an error of this rank; a broken collective waits a moment for it."""
        is_collective = isinstance(error, RuntimeError) and ("gloo" in str(error) or isinstance(error, dist.DistError))
        if not is_collective and not isinstance(error, KeyboardInterrupt):
            return None
        until = time.monotonic() + (GRACE_SECONDS if is_collective else 0.0)
        while (cause := self.cause()) is None and time.monotonic() < until:
            time.sleep(0.05)
        if cause is None and is_collective and "timed out" in str(error).lower():
            return self._first(
                f"another rank did not answer rank {self.ranks.rank} within run.rank_timeout_s; raise it if rank 0's "
                "rewards or a rank's rollout may take longer"
            )
        return cause

    def run(self) -> None:
        """Polls the other processes; torchrun's SIGTERM does not reach a main thread that waits inside NCCL."""
        while not self.finished:
            time.sleep(POLL_SECONDS)
            if all(map(is_alive, self.processes)):
                continue
            time.sleep(GRACE_SECONDS)  # a broken gloo collective raises in the main thread, which says more
            if not self.finished:
                print(
                    f"rlkernel: rank {self.ranks.rank}: {self.cause()}; this rank ends too", file=sys.stderr, flush=True
                )
                os._exit(1)


def is_alive(process: int) -> bool:
    """Whether a process of this machine runs; one that has ended and was not waited for does not."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # no /proc, as on macOS, or it ended just now
        return not Path("/proc/self").exists()
