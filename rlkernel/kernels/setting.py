"""A setting of torch's that is the process's, and that blocks of several threads need otherwise while they run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Setting:
    """Changes a setting for blocks that may overlap, in one thread and in several.

    The last block to end sets back what was found, unless somebody has set another value meanwhile.

    Args:
        read, write: the setting's value now, and how it is set.
        inside: the value that a block needs, of the one that it finds.
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
