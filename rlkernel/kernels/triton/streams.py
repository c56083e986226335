"""A side stream for independent kernels, so that one fills the SMs that the last wave of the other leaves idle.

Callers see only the current stream: the side stream waits for it on entry and is joined on exit.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import TracebackType

import torch

_of_thread = threading.local()


def _stream(current: torch.cuda.Stream) -> torch.cuda.Stream | None:
    """This thread's side stream for `current`; None if it is part of another capture.

    torch hands out streams from a small pool, so another capture may hold it; it is unusable until that capture ends.
    """
    streams: dict[str, torch.cuda.Stream] = _of_thread.__dict__
    key = f"{current.device} {current.cuda_stream}"
    if key not in streams:
        side = torch.cuda.Stream(current.device)
        streams[key] = torch.cuda.Stream(current.device) if side == current else side
    side = streams[key]
    return None if _captured(side) and not _captured(current) else side


def _captured(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


class Fork:
    """A context in which launches inside `with fork.side_stream()` overlap those on the device's current stream.

    Neither `side_stream` nor `join` blocks the host. Memory that the side stream uses must not be written or freed
    before `join`; leaving the context joins, also after an exception. Everything runs on the current stream if `wanted`
    is false, on a CPU, and if no side stream is free.
    """

    def __init__(self, device: torch.device, wanted: bool) -> None:
        self._side: torch.cuda.Stream | None = None
        self._open = False
        if wanted and device.type == "cuda":
            self._current = torch.cuda.current_stream(device)
            self._side = _stream(self._current)

    def __enter__(self) -> Fork:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(*(() if kind is None else (RuntimeError,))):  # `error` may have invalidated a capture
            self.join()

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """Makes the side stream current; it first waits for the work queued on the main stream."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(self._current)
        self._open = True
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        """Makes later work on the main stream wait for the side stream."""
        if self._open and self._side is not None:
            self._open = False
            self._current.wait_stream(self._side)
