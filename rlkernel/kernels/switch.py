"""Process-wide switches that blocks override: stock ops, strict mode, forced implementations."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from torch.compiler import is_dynamo_compiling

T = TypeVar("T")


class Switch(Generic[T]):
    """A value of the process. If blocks of several threads overlap, the one that began last applies.

    Dynamo can trace reads and blocks.

    Args:
        lock: taken while the value changes; by default the switch makes one.
        changed: called under the lock after every change.
    """

    def __init__(self, value: T, lock: Any = None, changed: Callable[[], None] = lambda: None) -> None:
        self.now = value  # read by users of the switch
        self._cells: tuple[list[T], ...] = ([value],)  # the default, then one cell for each open block
        self._lock, self._changed = lock or threading.Lock(), changed

    def set(self, value: T) -> None:
        """Sets the value, also inside open blocks."""
        with self._guard():
            for cell in self._cells:
                cell[0] = value
            self._update(self._cells)

    @contextlib.contextmanager
    def block(self, value: T) -> Iterator[None]:
        """Overrides the value inside the block."""
        own = [value]
        with self._guard():
            self._update((*self._cells, own))
        try:
            yield
        finally:
            with self._guard():  # blocks of other threads may have begun or ended since
                self._update(tuple(cell for cell in self._cells if cell is not own))

    def _guard(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if is_dynamo_compiling() else self._lock  # Dynamo cannot trace a lock

    def _update(self, cells: tuple[list[T], ...]) -> None:
        self._cells = cells
        self.now = cells[-1][0]
        self._changed()
