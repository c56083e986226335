"""Work beside the current stream: who waits for whom, without a GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from rlkernel.kernels.triton import streams
from rlkernel.kernels.triton.streams import Fork

GPU = torch.device("cuda", 0)


class FakeStream:
    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def wait_stream(self, other: FakeStream) -> None:
        self.said.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to two fake streams, `main` and `side`, in order."""
    found: list[str] = []
    main, side = FakeStream("main", found), FakeStream("side", found)

    @contextlib.contextmanager
    def current(stream: FakeStream) -> Iterator[None]:
        found.append(f"{stream.name} is current")
        yield
        found.append("main is current")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(streams, "_stream", lambda device: side)
    return found


def test_work_beside_waits_and_is_waited_for(said: list[str]) -> None:
    with Fork(GPU, True) as fork:
        for i in range(2):
            with fork.beside():
                said.append(f"beside {i}")
            said.append(f"here {i}")
            fork.join()
    turn = "side waits for main, side is current, beside {0}, main is current, here {0}, main waits for side"
    assert ", ".join(said) == ", ".join(turn.format(i) for i in range(2))


def test_an_exception_joins_and_is_what_the_caller_sees(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are freed on the way out: work beside may still use them, and a broken capture must not hide why."""
    with pytest.raises(ValueError, match="why"), Fork(GPU, True) as fork:
        with fork.beside():
            said.append("beside")
        raise ValueError("why")
    assert said[-1] == "main waits for side"

    def broken(self: FakeStream, other: FakeStream) -> None:
        if self.name == "main":
            raise RuntimeError("capture")

    monkeypatch.setattr(FakeStream, "wait_stream", broken)
    with pytest.raises(ValueError, match="why"), Fork(GPU, True) as fork:
        with fork.beside():
            pass
        raise ValueError("why")
    with pytest.raises(RuntimeError, match="capture"), Fork(GPU, True) as fork, fork.beside():
        pass


@pytest.mark.parametrize(("device", "wanted"), ((torch.device("cpu"), True), (GPU, False)))
def test_all_on_the_current_stream(device: torch.device, wanted: bool, said: list[str]) -> None:
    with Fork(device, wanted) as fork:
        with fork.beside():
            said.append("beside")
        fork.join()
    assert said == ["beside"]


def test_never_beside_itself(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_stream", torch.cuda.current_stream)
    with Fork(GPU, True) as fork, fork.beside():
        said.append("beside")
    assert said == ["beside"]


def test_each_thread_has_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(streams, "_of_thread", threading.local())
    mine, theirs = streams._stream(GPU), []
    thread = threading.Thread(target=lambda: theirs.append(streams._stream(GPU)))
    thread.start()
    thread.join()
    assert streams._stream(GPU) is mine and theirs[0] is not mine
    assert streams._stream(torch.device("cuda", 1)) is not mine
