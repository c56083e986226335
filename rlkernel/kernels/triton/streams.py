"""Independent launches side by side, so that one's work takes the multiprocessors which the other's last tiles leave.

The caller sees his current stream alone: what runs beside it waits for what that holds, and is waited for in turn.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import TracebackType

import torch

_of_thread = threading.local()


def _stream(current: torch.cuda.Stream) -> torch.cuda.Stream | None:
    """The one beside a stream, in this thread: under capture it stays until that ends, when no other may wait for it.
    None where it is under a capture of another: torch hands out the same few in turns."""
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
    """A block with work beside the current stream of a device: `with fork.beside()` launches it, `join` waits for it.

    Neither waits on the host. What lies in the memory that the work beside uses must not be written or freed before
    `join`; leaving the block joins, behind an exception too. Not `wanted`, on the CPU, and where no stream is free
    to run beside it, all runs on the current stream.
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
        with contextlib.suppress(*(() if kind is None else (RuntimeError,))):  # of a capture that `error` has broken
            self.join()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Makes the stream beside current, ordered behind what the block's own stream holds."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(self._current)
        self._open = True
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        """What the block's own stream runs from here on waits for the work beside it."""
        if self._open and self._side is not None:
            self._open = False
            self._current.wait_stream(self._side)
