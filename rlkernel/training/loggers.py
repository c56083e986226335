"""Sends metrics, evaluations and tables of samples to TensorBoard, wandb and trackio, in addition to the run folder.

Nothing leaves the machine by default: TensorBoard and wandb (offline mode) write into the run folder, trackio into its
local database.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlkernel.data.errors import InputError
from rlkernel.training.config import Settings
from rlkernel.training.metric_names import renamed

PROJECT = "rlkernel"
ID_FILE = "log_id"
MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}
TABLE_ROWS = 24
TABLE_COLUMNS = ("step", "prompt", "completion", "chosen", "rejected", "reward", "advantage")


class Sink(Protocol):
    """Where numbers and tables of one run go."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Logs numbers of a step."""

    def table(self, step: int, name: str, columns: Sequence[str], rows: list[list[Any]]) -> None:
        """Logs a table of texts and numbers."""

    def close(self) -> None:
        """Writes what is buffered."""


class TensorBoard:
    """Event files in `<run folder>/tensorboard`. It has no tables.

    Args:
        resumed: step after which the run continues, or None; TensorBoard then hides the events of later steps.
    """

    def __init__(self, folder: Path, resumed: int | None):
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resumed is None else resumed + 1
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge, flush_secs=10)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Adds one scalar event per value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: list[list[Any]]) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


class Wandb:
    """A wandb run in `<run folder>/wandb`; `WANDB_MODE` and `WANDB_PROJECT` override offline mode and the project."""

    def __init__(self, folder: Path, run_id: str, config: dict[str, Any]):
        import wandb

        self._table = wandb.Table
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=run_id,
            resume="allow",
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE", "offline"),  # type: ignore[arg-type]
            config=config,
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        """Logs one row of history."""
        self._run.log(values, step=step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: list[list[Any]]) -> None:
        """Logs a `wandb.Table`."""
        self._run.log({name: self._table(columns=[*columns], data=rows)}, step=step)

    def close(self) -> None:
        """Finishes the run."""
        self._run.finish()


class Trackio:
    """A run in trackio's local database, named after the run folder and its id."""

    def __init__(self, folder: Path, run_id: str, config: dict[str, Any], resumed: bool):
        import trackio

        self._library = trackio
        with contextlib.redirect_stdout(io.StringIO()):  # it prints in the middle of the progress line
            self._run = trackio.init(
                project=PROJECT,
                name=f"{folder.name}-{run_id}",
                config=config,
                resume="allow" if resumed else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, step: int, values: dict[str, float]) -> None:
        """Logs one row."""
        self._run.log(values, step=step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: list[list[Any]]) -> None:
        """Logs a `trackio.Table`."""
        import pandas  # trackio requires it

        self._run.log({name: self._library.Table(dataframe=pandas.DataFrame(rows, columns=[*columns]))}, step=step)

    def close(self) -> None:
        """Waits until the database has everything."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._library.finish()


def sinks_of(settings: Settings) -> list[str]:
    """Names of the sinks; `run.tensorboard` adds TensorBoard."""
    return list(dict.fromkeys([*settings.run.log_to, *(["tensorboard"] if settings.run.tensorboard else [])]))


class Loggers:
    """All sinks of a run, opened with the first row, so that a run that fails before leaves nothing in them.

    Args:
        resumed: step after which the run continues, or None for a new run.

    Raises:
        InputError: a sink's library is not installed.
    """

    def __init__(self, settings: Settings, resumed: int | None):
        self._settings, self._resumed = settings, resumed
        self._sinks: list[Sink] = []
        self._samples: list[dict[str, Any]] = []
        for name in sinks_of(settings):
            try:
                importlib.import_module(MODULES[name])
            except ImportError:
                raise InputError(f"run.log_to={name} needs the extra: pip install 'rlkernel[{name}]'") from None

    def add(self, folder: Path, file: str, row: dict[str, Any]) -> None:
        """Logs a row of `metrics.jsonl`, `eval.jsonl` or `samples.jsonl`.

        Tables are logged with evaluations: the held-out samples, and the last training samples before them.
        """
        if not sinks_of(self._settings):
            return
        if file == "samples":
            self._samples = [*self._samples, row][-TABLE_ROWS:]
            return
        with _writing_to(folder):
            sinks, step = self._open(folder), row["step"]
            numbers = _numbers(row, "eval/" if file == "eval" else "")
            settings = self._settings
            named = renamed(numbers, settings.run.metric_names, settings.algorithm, settings.eval.samples)
            for sink in sinks:
                sink.log(step, named)
            if file == "eval":
                self._tables(step, row.get("samples", []))

    def _tables(self, step: int, heldout: list[dict[str, Any]]) -> None:
        for name, rows in (("heldout_samples", heldout), ("samples", self._samples)):
            columns = [key for key in TABLE_COLUMNS if rows and key in rows[0]]
            for sink in self._sinks if rows else ():
                sink.table(step, name, columns, [[_cell(row[key]) for key in columns] for row in rows])
        self._samples = []

    def _open(self, folder: Path) -> list[Sink]:
        if not self._sinks:
            run_id, config = _run_id(folder), self._settings.model_dump(mode="json")
            make: dict[str, Callable[[], Sink]] = {
                "tensorboard": lambda: TensorBoard(folder, self._resumed),
                "wandb": lambda: Wandb(folder, run_id, config),
                "trackio": lambda: Trackio(folder, run_id, config, self._resumed is not None),
            }
            for name in sinks_of(self._settings):
                try:
                    self._sinks.append(make[name]())
                except Exception as error:  # such as a login that is missing in wandb's online mode
                    reason = " ".join(str(error).split())
                    raise InputError(f"run.log_to={name} cannot be opened ({reason}); run without it") from error
        return self._sinks

    def close(self) -> None:
        """Closes all sinks, the others too if one raises."""
        with contextlib.ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)
            self._sinks = []


def _numbers(row: dict[str, Any], prefix: str) -> dict[str, float]:
    kept = {key: value for key, value in row.items() if isinstance(value, (int, float)) and not isinstance(value, bool)}
    return {f"{prefix}{key}": value for key, value in kept.items() if key not in ("step", "rows")}


def _cell(value: Any) -> Any:
    """A chat as text; numbers and texts as they are."""
    if isinstance(value, list):
        return "\n".join(f"{message['role']}: {message['content']}" for message in value)
    return value


def _run_id(folder: Path) -> str:
    """The run's id in wandb and trackio: made once, and read again when the run is resumed."""
    file = folder / ID_FILE
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:8])
    return file.read_text()


@contextlib.contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"run.log_to: cannot write the logs of {folder} ({error.strerror or error}); free some space, or run "
            "with run.log_to=[]"
        ) from None
