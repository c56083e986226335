"""The run folder, created before training starts.

It holds config.yaml, run.json, metrics.jsonl, samples.jsonl, eval.jsonl, summary.json, report.html, model/,
checkpoints/ and, for a built-in task, tokenizer/.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlkernel.data.errors import InputError
from rlkernel.training.config import Settings, located, to_yaml
from rlkernel.training.loggers import Loggers

CONFIG, FACTS, SUMMARY = "config.yaml", "run.json", "summary.json"
REFRESH_SECONDS = 60.0


def default_output(settings: Settings) -> str:
    """`runs/<algorithm>-<task or model directory's name>`, with `-torch` for the control arm."""
    name = settings.data.task or Path(settings.model.path or "model").name
    return f"runs/{settings.algorithm}-{name}" + ("-torch" if settings.run.backend == "torch" else "")


def new_folder(wanted: str | Path) -> tuple[Path, list[Path]]:
    """Creates the run folder: `wanted` if it is absent or empty, else the first free `wanted-2`, `wanted-3`, ...

    A run claims the folder with an empty `config.yaml`, which only one of two runs started together can create.

    Returns:
        The folder, and the absolute paths of all directories created for it, innermost first.

    Raises:
        InputError: the folder cannot be created or written.
    """
    wanted = Path(wanted)
    number, folder = 1, wanted
    made = [parent for parent in wanted.absolute().parents if not parent.exists()]
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        while not _claim(folder, made):
            if wanted.name in ("", ".."):
                raise InputError(f"run folder {wanted} is not empty; choose another with --output DIR")
            number += 1
            folder = wanted.with_name(f"{wanted.name}-{number}")
    except OSError as error:
        _remove(made)
        raise InputError(
            f"run folder {folder} is not writable ({error.strerror}); choose another with --output DIR"
        ) from None
    return folder, made


def _claim(folder: Path, made: list[Path]) -> bool:
    """Takes an absent folder (and adds it to `made`) or an empty one; returns False if it is taken."""
    try:
        folder.mkdir()
        made.insert(0, folder.absolute())
    except FileExistsError:
        if not folder.is_dir() or any(folder.iterdir()):
            return False
    try:
        (folder / CONFIG).touch(exist_ok=False)
    except FileExistsError:  # another run was faster
        return False
    return True


def _remove(made: list[Path]) -> None:
    for folder in made:
        with contextlib.suppress(OSError):  # not empty: another run has a folder in it
            folder.rmdir()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a failed write to `path` into an InputError that names it and the remedy."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write {path} ({error.strerror or error}); free some space or choose another place with "
            "--output DIR, and run again"
        ) from None


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically; if the write fails, the old file stays.

    Raises:
        InputError: the file cannot be written.
    """
    work = path.with_name(f".{path.name}.new")
    with writing(path):
        try:
            work.write_text(text, encoding="utf-8", errors="backslashreplace")  # file names may not be Unicode
            os.replace(work, path)
        except OSError:
            work.unlink(missing_ok=True)
            raise


def to_json(value: Any, **options: Any) -> str:
    """Strict JSON: NaN and infinities become null, because other parsers refuse them."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_clean(value), allow_nan=False, **options)


def _clean(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return value


class RunFolder:
    """An open run folder.

    Args:
        settings: the resolved settings, saved as `config.yaml`.
        contract: contract id, written with every line of metrics.
        resume: an existing run folder and the step after which the run continues in it, -1 from its start; default: a
            new folder.

    Attributes:
        refresh: called after the first step and then at most once per minute; the session writes the report with it.

    Raises:
        InputError: the folder cannot be written, another process runs in it, or a library of `run.log_to` is missing.
    """

    def __init__(self, settings: Settings, contract: str, resume: tuple[Path, int] | None = None):
        self.contract = contract
        self.refresh: Callable[[], object] = lambda: None
        self._refresh_at = -math.inf
        self._lock = -1
        self._loggers = Loggers(settings, None if resume is None else resume[1])
        if resume is None:
            self.folder, self._made = new_folder(settings.run.output or default_output(settings))
        else:
            self.folder, self._made = resume[0], []
        self._absolute = self.folder.absolute()  # a reward may change the working directory
        self.resumed = resume is not None
        try:
            self._lock = _locked(self.folder)
            write_text(self.folder / CONFIG, to_yaml(located(settings)))
        except BaseException:
            self.abandon()
            raise

    def rewind(self, step: int) -> None:
        """Removes the lines of later steps from the logs, and an incomplete last line; -1 removes all."""
        for path in self._absolute.glob("*.jsonl"):
            rows = read_jsonl(path)
            write_text(path, "".join(_line(row) for row in rows if row["step"] <= step))

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Appends one JSON line to `<name>.jsonl`, unbuffered, so that a killed run keeps its measurements.

        Metrics, evaluations and samples also go to the sinks of `run.log_to`.

        Raises:
            InputError: the line cannot be written; no part of it stays in the file.
        """
        path = self.folder / f"{name}.jsonl"
        line = _line(row).encode(errors="backslashreplace")
        with writing(path), open(path, "ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                while line:
                    line = line[file.write(line) :]
            except OSError:
                file.truncate(end)
                raise
        self._loggers.add(self._absolute, name, row)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Writes one line of `metrics.jsonl`, with step and contract id."""
        self.append("metrics", {"step": step, "contract": self.contract, **values})
        started = time.monotonic()
        if started >= self._refresh_at:
            self.refresh()
            # The report of a long run takes seconds; it must not cost more than one percent of the run.
            self._refresh_at = started + max(REFRESH_SECONDS, 100 * (time.monotonic() - started))

    def abandon(self) -> None:
        """Removes the files and folders of a run that failed before its first step; a resumed run keeps them."""
        self.close()
        if self.resumed:
            return
        with contextlib.suppress(OSError):  # the failure that ended the run is the one to report
            for path in self._absolute.iterdir():
                with contextlib.suppress(OSError):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        _remove(self._made)

    def close(self) -> None:
        """Closes the sinks and releases the folder."""
        self._loggers.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FollowedFolder(RunFolder):
    """The run folder as ranks other than 0 see it: they write nothing.

    Args:
        contract: contract id.
        folder: the folder that rank 0 has opened.
        resumed: whether the run continues in it.
    """

    def __init__(self, contract: str, folder: Path, resumed: bool):
        self.contract, self.folder, self.resumed = contract, folder, resumed

    def rewind(self, step: int) -> None:
        """Does nothing, like all methods here."""

    def append(self, name: str, row: dict[str, Any]) -> None: ...

    def log(self, step: int, values: dict[str, Any]) -> None: ...

    def abandon(self) -> None: ...

    def close(self) -> None: ...


def _locked(folder: Path) -> int:
    """A descriptor that holds the folder's lock until it is closed; the lock ends with the process.

    Raises:
        InputError: another process holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    for left in range(5, -1, -1):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if left:  # `is_locked` may hold it for a moment
                time.sleep(0.02)
                continue
            os.close(descriptor)
            raise InputError(f"run folder {folder} is in use by another process; wait for it or stop it") from None
    return descriptor


def is_locked(folder: Path) -> bool:
    """Whether a process runs in the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def repeat_command(algorithm: str, folder: Path) -> str:
    """The shell command that repeats the run of a folder, from any working directory.

    It changes to the directory that the run was started in, because reward modules are imported from there.
    """
    words = [sys.executable, "-m", "rlkernel.cli.main", "train", algorithm, "--config", str(folder.absolute() / CONFIG)]
    return f"cd {shlex.quote(os.getcwd())} && {shlex.join(words)}"


def _line(row: dict[str, Any]) -> str:
    return to_json(row, ensure_ascii=False) + "\n"


def read_jsonl(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """Rows of a file that `RunFolder.append` wrote; an absent file has none.

    A last line that a killed run left incomplete is ignored.

    Args:
        last_bytes: read only the rows that are completely in the last bytes of the file; default: all rows.

    Raises:
        InputError: a line is damaged; names the file and the line.
    """
    if not path.exists():
        return []
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = 0 if last_bytes is None else max(0, size - last_bytes)
        file.seek(start)
        if start:
            file.readline()
        rows = []
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                try:
                    row = json.loads(line)
                except ValueError:
                    row = None
                if not isinstance(row, dict):
                    counted = f"line {number}" if not start else "a line near the end"
                    raise InputError(f"{path}: {counted} is damaged (expected a JSON object); remove that line")
                rows.append(row)
        return rows
