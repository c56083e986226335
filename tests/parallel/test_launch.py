"""Why a rank has failed, and that a rank whose main thread waits for a dead one ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch.distributed as dist

from rlkernel.parallel import launch
from rlkernel.parallel.launch import Watchdog, is_alive, joined
from rlkernel.parallel.ranks import RankError, Ranks, in_order

BROKEN = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")


@pytest.fixture
def dead() -> int:
    """Process id of a zombie."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process.pid


def test_causes(dead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.0)
    assert is_alive(os.getpid()) and not is_alive(dead)
    well = Watchdog(Ranks(rank=1, size=2), dist.HashStore(), [os.getpid()] * 2)
    assert well.cause_of(BROKEN) is None
    assert "run.rank_timeout_s" in (well.cause_of(RuntimeError("gloo: Timed out waiting 4000ms")) or "")
    store = dist.HashStore()
    watchdog = Watchdog(Ranks(rank=1, size=2), store, [dead, os.getpid()])
    assert f"rank 0 (process {dead}) has died without a message" in (watchdog.cause_of(BROKEN) or "")
    assert watchdog.cause_of(ValueError("of its own")) is None
    Watchdog(Ranks(rank=0, size=2), store, [dead, os.getpid()]).report(ValueError("a bad reward\nTraceback"))
    assert watchdog.cause_of(BROKEN) == "rank 0 has failed: a bad reward"


def test_all_ranks_name_the_first_to_die(dead: int) -> None:
    store, alive = dist.HashStore(), os.getpid()
    first = Watchdog(Ranks(rank=1, size=3), store, [alive, alive, dead])
    second = Watchdog(Ranks(rank=0, size=3), store, [alive, dead, dead])  # rank 1 has ended because of rank 2
    assert first.cause_of(BROKEN) == second.cause_of(BROKEN)
    assert f"rank 2 (process {dead}) has died" in (second.cause() or "")


def test_a_waiting_rank_ends(dead: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Ended(Exception):
        pass

    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(launch, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(launch.os, "_exit", end)
    with pytest.raises(Ended, match="1"):
        Watchdog(Ranks(rank=0, size=2), dist.HashStore(), [os.getpid(), dead]).run()
    assert f"rank 0: rank 1 (process {dead}) has died" in capsys.readouterr().err


def test_without_torchrun() -> None:
    with joined("cpu", 1.0) as ranks:
        assert ranks == Ranks() and ranks.gather([1, None]) == [[1, None]]


def test_order_of_leaves() -> None:
    ranks = Ranks(leaves=4)
    assert in_order(ranks.over_leaves(ranks.deal(range(10)), list)) == list(range(10))


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    for size, local, message in ((3, 3, "has started 3 ranks; expected a power of two"), (4, 2, "one machine")):
        monkeypatch.setenv("WORLD_SIZE", str(size))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
        with pytest.raises(RankError, match=message), joined("cpu", 1.0):
            pass
