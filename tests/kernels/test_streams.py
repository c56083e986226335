"""`Fork`: which stream waits for which, without a GPU."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")

from rlkernel.kernels.triton import streams
from rlkernel.kernels.triton.streams import Fork

GPU = torch.device("cuda", 0)


class FakeStream:
    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def wait_stream(self, other: FakeStream) -> None:
        self.events.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Events of two fake streams, `main` and `side`, in order."""
    found: list[str] = []
    main, side = FakeStream("main", found), FakeStream("side", found)

    @contextlib.contextmanager
    def current(stream: FakeStream) -> Iterator[None]:
        found.append(f"{stream.name} is current")
        yield
        found.append("main is current")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(streams, "_stream", lambda current: side)
    return found


def test_the_side_stream_waits_and_is_joined(events: list[str]) -> None:
    with Fork(GPU, True) as fork:
        for i in range(2):
            with fork.side_stream():
                events.append(f"side {i}")
            events.append(f"here {i}")
            fork.join()
    turn = "side waits for main, side is current, side {0}, main is current, here {0}, main waits for side"
    assert ", ".join(events) == ", ".join(turn.format(i) for i in range(2))


def test_an_exception_joins_and_is_propagated(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are freed when the exception leaves, and a broken capture must not hide its cause."""
    with pytest.raises(ValueError, match="why"), Fork(GPU, True) as fork:
        with fork.side_stream():
            events.append("side")
        raise ValueError("why")
    assert events[-1] == "main waits for side"

    def broken(self: FakeStream, other: FakeStream) -> None:
        if self.name == "main":
            raise RuntimeError("capture")

    monkeypatch.setattr(FakeStream, "wait_stream", broken)
    with pytest.raises(ValueError, match="why"), Fork(GPU, True) as fork:
        with fork.side_stream():
            pass
        raise ValueError("why")
    with pytest.raises(RuntimeError, match="capture"), Fork(GPU, True) as fork, fork.side_stream():
        pass


@pytest.mark.parametrize(("device", "wanted"), ((torch.device("cpu"), True), (GPU, False)))
def test_all_on_the_current_stream(device: torch.device, wanted: bool, events: list[str]) -> None:
    with Fork(device, wanted) as fork:
        with fork.side_stream():
            events.append("side")
        fork.join()
    assert events == ["side"]


@dataclass(frozen=True)
class Named:
    """The attributes of a stream that `_stream` reads."""

    cuda_stream: int
    device: torch.device = GPU


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Streams under capture; new streams are numbered from 100 on."""
    under: set[int] = set()
    current: list[Named] = []
    numbers = itertools.count(100)

    @contextlib.contextmanager
    def stream(which: Named) -> Iterator[None]:
        current.append(which)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Named(next(numbers), device))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1].cuda_stream in under)
    monkeypatch.setattr(streams, "_of_thread", threading.local())
    return under


def test_each_stream_has_its_side_stream(captured: set[int]) -> None:
    """Autograd's thread of a GPU runs the backwards of all threads, and a captured stream must not serve another."""
    mine, theirs = streams._stream(Named(1)), []
    thread = threading.Thread(target=lambda: theirs.append(streams._stream(Named(1))))
    thread.start()
    thread.join()
    others = [theirs[0], streams._stream(Named(2)), streams._stream(Named(1, torch.device("cuda", 1)))]
    assert streams._stream(Named(1)) is mine and len({mine, *others}) == 4


def test_no_side_stream_is_the_stream_itself_or_captured_by_another(captured: set[int]) -> None:
    first = streams._stream(Named(1))
    assert first == Named(100)
    captured |= {1, 100}
    assert streams._stream(Named(1)) is first, "of one capture"
    captured.remove(1)
    assert streams._stream(Named(1)) is None
    assert streams._stream(Named(101)) == Named(102), "torch handed out the stream itself"
