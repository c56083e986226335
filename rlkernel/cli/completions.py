"""Output of `rlkernel generate`: keeps the records of every finished prompt, and reads them back for `--resume`."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from typing import IO, Any

from rlkernel.data.errors import InputError

Record = dict[str, Any]


class Output:
    """A file of JSON lines that is replaced at the end, or a device or pipe that is written as prompts finish.

    Until the end, the records of finished prompts are in `FILE.part`, so that they survive a run that is killed.

    Args:
        path: the file.
        prompts: path of the prompts file, which must be another file.
        resume: continue the file and its `FILE.part`.

    Raises:
        InputError: the file cannot be written, is the prompts file, or has a `FILE.part` that is not to be continued.
    """

    def __init__(self, path: str, prompts: str | None, resume: bool) -> None:
        self.path, self._target = path, os.path.realpath(path)
        self._part = f"{self._target}.part"
        self._file: IO[str] | None = None
        self._is_stream = os.path.exists(path) and not os.path.isfile(path)
        if os.path.isdir(self._target):
            raise InputError(f"cannot write {path!r}: it is a directory; give the name of a file with --output")
        if self._is_stream:
            if resume:
                raise InputError(f"--resume needs a file, and {path} is a device or a pipe; leave --resume out")
            return
        if os.path.exists(path):
            if prompts is not None and os.path.exists(prompts) and os.path.samefile(path, prompts):
                raise InputError(
                    f"--output {path} is the prompts file {prompts} itself; give another name with --output"
                )
            if not os.access(path, os.W_OK):
                raise _unwritable(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
        if os.path.exists(self._part) and not resume:
            raise InputError(
                f"{self._part} has the completions of a run that was cut off; continue that run with --resume, or "
                "delete the file"
            )
        try:
            with tempfile.TemporaryFile(dir=os.path.dirname(self._target)):
                pass
        except OSError as error:
            raise _unwritable(path, error) from None

    def read(self) -> Iterator[tuple[str, Record]]:
        """Yields (`file:line`, record) for the file and its `FILE.part`, of which a last line cut off is removed.

        Raises:
            InputError: a line is not a record with a seed.
        """
        if os.path.exists(self._part):
            with open(self._part, "rb+") as part:
                whole, newline, _ = part.read().rpartition(b"\n")
                part.truncate(len(whole) + len(newline))
        for file in filter(os.path.exists, (self._target, self._part)):
            with open(file, "rb") as lines:
                for number, line in enumerate(lines, 1):
                    try:
                        record = json.loads(line)
                        record["seed"] + 0
                    except (ValueError, TypeError, KeyError):
                        raise InputError(
                            f"{file}:{number}: not a record of rlkernel generate, so that it cannot be resumed; give "
                            "another file with --output"
                        ) from None
                    yield f"{file}:{number}", record

    def add(self, records: list[Record]) -> None:
        """Writes and flushes the records of a finished prompt.

        Raises:
            InputError: they cannot be written.
        """
        path = self.path if self._is_stream else self._part
        try:
            if self._file is None:
                self._file = open(path, "w" if self._is_stream else "a", encoding="utf-8")  # noqa: SIM115 (until `finish`)
            self._file.write(_lines(records))
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise _unwritable(path, error) from None

    def finish(self, records: list[Record]) -> None:
        """Replaces the file atomically by all records, if there are any, and removes `FILE.part`.

        Raises:
            InputError: the file cannot be written; `FILE.part` stays.
        """
        if self._file is not None:
            self._file.close()
        if self._is_stream or not records:
            return
        work = os.path.join(os.path.dirname(self._target), f".rlkernel-{secrets.token_hex(8)}.tmp")
        try:
            with open(work, "x", encoding="utf-8") as out:
                out.write(_lines(records))
            with contextlib.suppress(FileNotFoundError):
                shutil.copymode(self._target, work)
            os.replace(work, self._target)
        except OSError as error:
            raise _unwritable(self.path, error) from None
        finally:
            with contextlib.suppress(OSError):
                os.unlink(work)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._part)


def _lines(records: list[Record]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def _unwritable(path: str, error: OSError) -> InputError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "free some space, or give a file elsewhere with --output" if full else "give another file with --output"
    return InputError(f"cannot write {path}: {error.strerror}; {remedy}")
