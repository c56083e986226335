"""Writing: to streams whose reader may have closed (`| head`), and to files, atomically."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rlkernel_drift.errors import DriftError


def discard_stdout() -> None:
    """Discards the rest of standard output, including its buffer."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def emit(text: str) -> None:
    """Writes to standard output; a closed pipe is ignored."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()


def complain(text: str) -> None:
    """Writes a line to standard error; a closed pipe is ignored."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


_FILES = ("json", "markdown", "junit", "html", "png", "table", "log")


def check_targets(args: argparse.Namespace) -> None:
    """Refuses output files that cannot be written, before any work is done.

    Raises:
        DriftError: the message names the file.
    """
    names = _FILES + (("out",) if args.command == "floor" else ())
    for path in (Path(value) for name in names if (value := getattr(args, name, None)) and value != "-"):
        if path.is_dir():
            raise _unwritable(path, "it is a folder")
        if not path.parent.is_dir():
            raise _unwritable(path, "its folder does not exist")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise _unwritable(path, "no permission")


@contextlib.contextmanager
def atomic_file(path: str) -> Iterator[str]:
    """Yields the path of a temporary file that replaces `path` at the end; devices and pipes are written directly.

    Raises:
        DriftError: the file cannot be written.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        yield path
        return
    target = os.path.realpath(path)
    temporary = os.path.join(os.path.dirname(target), f".rlkernel-drift-{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, target)
    except OSError as error:
        raise _unwritable(path, error.strerror) from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def write_file(path: str, text: str) -> None:
    """Writes a file atomically."""
    with atomic_file(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(text)


def at_least(low: int) -> Callable[[str], int]:
    """An argparse type for integers of at least `low`."""

    def parse(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{text} is too small; at least {low}")
        return value

    parse.__name__ = "integer"
    return parse


def _unwritable(path: str | Path, why: str | None) -> DriftError:
    return DriftError(f"cannot write {path}: {why}")
