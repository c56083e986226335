"""Progress of a run: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table

from rlkernel import ops
from rlkernel.ops.warmup import compile_cpu_kernels
from rlkernel.signals import discard_stdout


def ready_kernels(device: str) -> None:
    """Compiles the CPU kernels where that is still to be done; without a compiler says what is slow, in one line on
    standard error.

    Raises:
        BuildError: there is a compiler, and the build failed.
    """
    if device != "cpu" or ops.is_stock() or compile_cpu_kernels():
        return
    print(
        "rlkernel: there is no C++ compiler, so the readable reference ops run, about a thousand times slower than the "
        "compiled ones (`rlkernel train grpo` without data takes most of a day instead of minutes); stop with Ctrl-C, "
        "install g++ or clang++ (apt-get install g++) or name a compiler in CXX, and start again",
        file=sys.stderr,
        flush=True,
    )
    # Python's warning would repeat this in the middle of the live line.
    warnings.filterwarnings("ignore", "rlkernel: the slow reference runs", RuntimeWarning)


def clock(seconds: float) -> str:
    """`m:ss` or `h:mm:ss`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def count(number: float) -> str:
    """A count with three digits: 950, 12.3k, 1.20M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.0f}"


class Screen(Console):
    """Standard output, which raises BrokenPipeError if the reader closes the pipe; rich would exit with status 1."""

    def __init__(self) -> None:
        super().__init__(highlight=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Called by rich when the pipe is closed."""
        raise BrokenPipeError


class Display:
    """Progress of a run.

    Args:
        console: where to print; default standard output.
        plain_every: seconds between plain lines if the output is not a terminal.
    """

    def __init__(self, console: Console | None = None, plain_every: float = 5.0):
        self.console = console or Screen()
        self._plain_every = plain_every
        self._progress: Progress | None = None
        self._total = 0
        self._first: tuple[int, float] | None = None  # the phase's first step, and when it ended
        self._printed = 0.0

    def say(self, text: str) -> None:
        """Prints one line, without interpreting markup. A run goes on silently when the reader of its output ends."""
        try:
            self.console.print(text, markup=False)
        except BrokenPipeError:
            self.console.quiet = True
            discard_stdout()

    def start(self, title: str, total: int) -> None:
        """Opens a phase of `total` steps."""
        self.stop()
        self._title, self._total = title, total
        self._first, self._printed = None, 0.0
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[left]}"),
                # The only column with a ratio takes the rest of the line.
                TextColumn("{task.fields[line]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
                console=self.console,
                expand=True,
            )
            self._task = self._progress.add_task(title, total=total, left="", line="")
            self._progress.start()

    def step(self, step: int, values: dict[str, str]) -> None:
        """Shows step `step` (from 1) of the phase with its figures, and the time left."""
        now = time.perf_counter()
        line, left = "  ".join(f"{name} {value}" for name, value in values.items()), ""
        if self._first is None:  # it builds kernels, so its time predicts nothing
            self._first = (step, now)
        else:
            before, then = self._first
            left = f"left {clock((now - then) / (step - before) * (self._total - step))}"
        if self._progress is not None:
            self._progress.update(self._task, completed=step, line=line, left=left)
            return
        if step in (1, self._total) or now - self._printed >= self._plain_every:
            self._printed = now
            self.say("  ".join(filter(None, (f"{self._title} {step}/{self._total}", line, left))))

    def stop(self) -> None:
        """Closes the phase."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def summary(self, title: str, rows: list[tuple[str, str]]) -> None:
        """The table at the end."""
        table = Table(title=title, show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column(overflow="fold")  # of a long path too, every character
        for name, value in rows:
            table.add_row(name, value)
        self.console.print(table)

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()
