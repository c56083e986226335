"""Rewards in worker processes: each bad reward drops its own completions, and the others keep their values."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlkernel.data.errors import InputError
from rlkernel.data.rewards import Limits, Reward, Rewards, TrainerState
from rlkernel.data.rewards.pool import HOPELESS

TEXTS = ["a", "bad", "ccc", "dd"]
GOOD = [1.0, None, 3.0, 2.0]

REWARDS = """
import asyncio, os, sys, time

def count(completions, **_):
    return [float(len(text)) for text in completions]

def loops(completions):
    while "bad" in completions: pass
    return count(completions)

def regex(completions):  # holds the interpreter's lock
    import re
    if "bad" in completions: re.match("(a+)+$", "a" * 60 + "b")
    return count(completions)

def forks_and_loops(completions):
    if "bad" in completions:
        for _ in range(3):
            if os.fork() == 0: time.sleep(100)
        while True: pass
    return count(completions)

def forks_and_returns(completions):
    os.fork()
    return count(completions)

def forks_and_exits(completions):
    if os.fork() == 0: sys.exit(1)
    return count(completions)

def allocates(completions):
    if "bad" in completions: bytearray(50 << 30)
    return count(completions)

def prints(completions):
    if "bad" in completions:
        for _ in range(200): print("x" * (1 << 20))
    return count(completions)

def exits(completions):
    if "bad" in completions: os._exit(3)
    return count(completions)

def crashes(completions):
    print("about to crash", file=sys.stderr)
    if "bad" in completions: os.abort()
    return count(completions)

def leaves(completions):
    if "bad" in completions: sys.exit(0)
    return count(completions)

def changes_directory(completions):
    found = os.path.exists("r.py")
    os.chdir("/")
    return count(completions) if found else [0.0]

def closes_its_streams(completions):
    sys.stdout.close(); sys.stderr.close()
    return count(completions)

def raises(completions):
    if "bad" in completions: raise KeyError("gone")
    return count(completions)

def nan(completions):
    return [float("nan") if text == "bad" else float(len(text)) for text in completions]

async def waits(completions):
    await asyncio.sleep(100 if "bad" in completions else 0.01)
    return count(completions)

def coroutine(completions):
    return waits(completions)

def states(completions, trainer_state, log_metric, log_extra):
    log_metric("step", trainer_state.global_step)
    if "bad" in completions: raise ValueError
    log_extra("text", completions)
    return count(completions)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)


def batch(texts: list[str]) -> dict[str, list[Any]]:
    return {"prompts": ["p"] * len(texts), "completions": texts, "completion_ids": [[1]] * len(texts)}


@contextmanager
def pool_of(*names: str, **limits: Any) -> Iterator[Rewards]:
    made = [Reward(name, f"r.py:{name}") for name in names]
    with closing(Rewards(made, Limits(**{"workers": 2, "timeout_s": 1.0, **limits}))) as rewards:
        yield rewards


def processes_with(text: str) -> int:
    """Living processes whose environment holds the text; a zombie has none."""
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found += text.encode() in (process / "environ").read_bytes()
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("loops", "timeout"),
        ("regex", "timeout"),
        ("forks_and_loops", "timeout"),
        ("forks_and_returns", None),
        ("forks_and_exits", None),
        ("allocates", "memory"),
        ("prints", None),
        ("exits", "exited"),
        ("crashes", "exited"),
        ("leaves", "raised"),
        ("changes_directory", None),
        ("closes_its_streams", None),
        ("raises", "raised"),
        ("nan", "invalid"),
        ("waits", "timeout"),
        ("coroutine", "timeout"),
    ],
)
def test_a_bad_reward_drops_its_completion_only(name: str, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"mark-{name}-{os.getpid()}"
    monkeypatch.setenv("RLKERNEL_TEST_MARK", mark)
    with pool_of(name, timeout_s=5.0 if name == "prints" else 1.0) as rewards:
        scores = rewards(batch(TEXTS))
        assert scores.total == ([1.0, 3.0, 3.0, 2.0] if reason is None else GOOD)
        assert scores.dropped == ({} if reason is None else {1: reason})
        assert rewards(batch(["dd"])).total == [2.0], "later calls are not affected"
    deadline = time.monotonic() + 5
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == 0, "a worker, or a process that a reward has forked, is still there"


def test_output_goes_to_a_bounded_log(tmp_path: Path) -> None:
    with pool_of("prints", timeout_s=5.0, output_bytes=5000) as rewards:
        rewards.log_to(tmp_path)
        rewards(batch(TEXTS))
    log = (tmp_path / "rewards.log").read_text()
    assert 5000 < len(log) < 5100 and log.endswith("(later output is discarded: reward_pool.output_mib)\n")


def test_results_have_the_order_of_the_completions() -> None:
    """Groups arrive in any order and are judged by several workers, and nothing of the result depends on it."""
    found = []
    for workers, seed in ((1, 0), (3, 1)):
        with pool_of("count", "states", workers=workers) as rewards:
            pending = rewards.begin(TrainerState(7, 9))
            groups = [["x" * i, "bad" if i % 3 else "y" * i] for i in range(1, 13)]
            order = list(range(len(groups)))
            random.Random(seed).shuffle(order)
            for i in order:
                pending.add(2 * i, batch(groups[i]))
            found.append(pending.result())
    assert found[0] == found[1]
    assert found[0].metrics == {"step": 7.0} and found[0].extra["text"][:4] == ["x", None, "xx", None]
    assert found[0].total[:4] == [2.0, None, 4.0, None] and found[0].reasons == {"raised": 8}


def test_a_failure_of_one_reward_drops_the_completion() -> None:
    with pool_of("count", "raises") as rewards:
        scores = rewards(batch(TEXTS))
    assert scores.total == [2.0, None, 6.0, 4.0]
    assert scores.parts == {"count": [1.0, 3.0, 3.0, 2.0], "raises": GOOD}


def test_a_reward_that_always_fails_stops_with_its_traceback() -> None:
    with pool_of("raises") as rewards, pytest.raises(InputError) as caught:
        rewards(batch(["bad", "bad"]))
    text = str(caught.value)
    assert text.startswith("reward raises: raised KeyError: 'gone' (") and "all 2 completions were dropped" in text
    assert "Traceback (most recent call last)" in text and 'if "bad" in completions: raise KeyError("gone")' in text
    with pool_of("crashes") as rewards, pytest.raises(InputError, match=r"by signal SIGABRT(.|\n)*about to crash"):
        rewards(batch(["bad", "bad"]))
    started = time.monotonic()
    message = rf"reward loops: ran longer than 0.05 s; its first {HOPELESS} calls failed"
    with pool_of("loops", timeout_s=0.05) as rewards, pytest.raises(InputError, match=message):
        rewards(batch(["bad"] * 400))
    assert time.monotonic() - started < 10, "it does not wait for 400 time limits"


def test_completions_are_judged_while_others_are_sampled() -> None:
    with pool_of("count") as rewards:
        pending = rewards.begin()
        pending.add(0, batch(["a", "b"]))
        _, _, future = pending._submitted[0]
        assert len(future.result(timeout=20)) == 2, "judged before the batch is complete"
        pending.add(2, batch(["ccc"]))
        assert pending.result().total == [1.0, 1.0, 3.0]


def test_calls_of_an_async_reward_wait_together() -> None:
    Path("slow.py").write_text(
        "import asyncio\nasync def slow(completions):\n    await asyncio.sleep(0.3)\n    return [1.0]\n"
    )
    with closing(Rewards([Reward("slow", "slow.py:slow")], Limits(workers=1))) as rewards:
        started = time.monotonic()
        assert rewards(batch(["x"] * 20)).total == [1.0] * 20
        assert time.monotonic() - started < 3


def test_errors_of_loading_are_one_line() -> None:
    with pytest.raises(InputError, match=r"^reward 'r\.py:absent': r\.py has no 'absent' \(it has: .*$"):
        Rewards([Reward("r", "r.py:absent")], Limits())
    Path("broken.py").write_text("import os\nos._exit(1)\n")
    with pytest.raises(InputError, match="a worker process ended its process with status 1 while it loaded them"):
        Rewards([Reward("r", "broken.py:f")], Limits())
    with pool_of("count") as rewards, pytest.raises(InputError, match="it takes 'x', which"):
        Path("needs.py").write_text("def f(completions, x):\n    return x\n")
        with closing(Rewards([Reward("f", "needs.py:f")], Limits())) as needy:
            needy.require(["answer"], "data")
        rewards.require([])


def test_a_worker_dies_with_its_trainer(tmp_path: Path) -> None:
    """Also in a call that never ends, and although the trainer had no chance to say so."""
    code = (
        "import os, signal, threading, time\n"
        "from rlkernel.data.rewards import Limits, Reward, Rewards\n"
        "pending = Rewards([Reward('loops', 'r.py:loops')], Limits(workers=1)).begin()\n"
        "pending.add(0, {'prompts': ['p'], 'completions': ['bad'], 'completion_ids': [[1]]})\n"
        "time.sleep(0.3)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    mark = f"mark-orphan-{os.getpid()}"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "RLKERNEL_TEST_MARK": mark}, timeout=60)
    deadline = time.monotonic() + 5
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == 0
