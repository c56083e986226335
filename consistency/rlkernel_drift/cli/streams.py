"""What is written: to streams whose reader has gone (`| head`), and to files that are whole or not there at all."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


def discard_stdout() -> None:
    """Sends the rest of standard output nowhere, what is in its buffer too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def emit(text: str) -> None:
    """Writes to standard output, whether or not somebody still reads."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()


def complain(text: str) -> None:
    """Writes a line to standard error; where nobody reads it, the exit status alone speaks."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


_FILES = ("json", "markdown", "junit", "html", "png", "table", "log")


def check_targets(args: argparse.Namespace) -> None:
    """Refuses files that cannot be written, before minutes of work and before the first of several is written.

    Raises:
        DriftError: it names the file.
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
def whole(path: str) -> Iterator[str]:
    """A file beside `path` to write, which takes its place at the end; devices and pipes are written as they are.

    Raises:
        DriftError: it cannot be written.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        yield path
        return
    target = os.path.realpath(path)
    try:
        number, beside = tempfile.mkstemp(prefix=".rlkernel-drift-", dir=os.path.dirname(target))
        os.close(number)
    except OSError as error:
        raise _unwritable(path, error.strerror) from None
    try:
        yield beside
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(beside, 0o666 & ~mask)
        os.replace(beside, target)
    except OSError as error:
        raise _unwritable(path, error.strerror) from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(beside)


def write_file(path: str, text: str) -> None:
    """Writes a file that is there as a whole or not at all."""
    with whole(path) as beside, open(beside, "w", encoding="utf-8") as file:
        file.write(text)


def at_least(low: int) -> Callable[[str], int]:
    """A type of argparse: integers from `low` on."""

    def parse(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{text} is too small; at least {low}")
        return value

    parse.__name__ = "integer"
    return parse


def _unwritable(path: str | Path, why: str | None) -> Exception:
    from rlkernel_drift.errors import DriftError

    return DriftError(f"cannot write {path}: {why}")
