"""Process-wide settings, torch's and rlkernel's, that blocks in several threads may override at the same time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from torch.compiler import is_dynamo_compiling

T = TypeVar("T")


class Setting:
    """Changes one of torch's settings for blocks that may overlap, in one thread or in several.

    The last block to end restores the value that was found, unless another one was set meanwhile.

    Args:
        read, write: get and set the setting.
        inside: the value that a block needs, given the one that it finds.
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None], inside: Callable[[Any], Any]) -> None:
        self._read, self._write, self._inside = read, write, inside
        self._lock = threading.Lock()
        self._depth = 0
        self._found: Any = None

    @contextlib.contextmanager
    def changed(self) -> Iterator[None]:
        """A block with the setting as it needs it."""
        with self._lock:
            found = self._read()
            if self._inside(found) != found:
                self._write(self._inside(found))
                self._found = found
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if self._depth == 0 and self._found is not None:
                    if self._read() == self._inside(self._found):
                        self._write(self._found)
                    self._found = None


class Switch(Generic[T]):
    """One of rlkernel's settings, which blocks may override: of the open blocks of all threads, the last to begin wins.
    Dynamo traces it.

    Args:
        lock: held while the value changes; default: its own.
        changed: called after every change, under the lock.

    Attributes:
        now: the current value.
    """

    def __init__(self, value: T, lock: Any = None, changed: Callable[[], None] = lambda: None) -> None:
        self.now = value
        self._default = value  # from `set`; holds outside all blocks
        self._blocks: tuple[list[T], ...] = ()  # for each open block a list of its one value
        self._lock, self._changed = lock or threading.Lock(), changed

    def set(self, value: T) -> None:
        """Sets the value, also in the blocks that are open."""
        with self._alone():
            self._default = value
            for block in self._blocks:
                block[0] = value
            self._decide(self._blocks)

    @contextlib.contextmanager
    def block(self, value: T) -> Iterator[None]:
        """A block with another value."""
        own = [value]
        with self._alone():
            self._decide((*self._blocks, own))
        try:
            yield
        finally:
            with self._alone():  # another thread's block may have begun or ended since
                self._decide(tuple(block for block in self._blocks if block is not own))

    def _alone(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if is_dynamo_compiling() else self._lock  # Dynamo cannot trace a lock

    def _decide(self, blocks: tuple[list[T], ...]) -> None:
        self._blocks = blocks
        self.now = blocks[-1][0] if blocks else self._default
        self._changed()
