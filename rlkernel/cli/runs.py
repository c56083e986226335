"""`rlkernel runs [DIR]`: a table of the runs below a folder, also of those that were killed or are still running."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlkernel.training.runs import Run

COLUMNS = ("run", "algorithm", "model", "steps", "status", "held out, before and after", "exact", "started")
PIPED_WIDTH = 200


def add_parser(subparsers: Any) -> None:
    """Adds the `runs` command."""
    parser = subparsers.add_parser(
        "runs",
        help="list the runs below a folder",
        description="List the runs below a folder, oldest first: status, steps, held-out score, exactness.",
    )
    parser.add_argument("folder", nargs="?", default="runs", metavar="DIR", help="where to look (default: runs)")


def run(args: argparse.Namespace) -> int:
    """Prints the table; returns the exit status."""
    from rich.table import Table

    from rlkernel.cli.errors import UserError
    from rlkernel.data.errors import InputError
    from rlkernel.training.display import Screen
    from rlkernel.training.runs import find_runs

    place = Path(args.folder)
    try:
        runs, damaged = find_runs(place)
    except InputError as error:
        raise UserError(str(error)) from error
    for problem in damaged:
        print(f"rlkernel: left out: {problem}", file=sys.stderr)
    if not runs:
        print(f"no runs below {place}")
        return 0
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for one in runs:
        table.add_row(*_row(one, place))
    screen = Screen()
    if not screen.is_terminal:
        screen.width = PIPED_WIDTH
    screen.print(table, markup=False)
    return 0


def _row(run: Run, place: Path) -> tuple[str, ...]:
    from rlkernel.training.pages.charts import number

    summary, model = run.summary, run.settings["model"]["path"]
    before, after, wrong = (summary.get(key) for key in ("heldout_before", "heldout_after", "mismatch_tokens"))
    return (
        str(place if run.folder == place else run.folder.relative_to(place)),
        summary["algorithm"] + ("" if summary["backend"] == "rlkernel" else f" ({summary['backend']})"),
        _model_name(Path(model)) if model else f"from scratch ({run.settings['data']['task']})",
        f"{summary['steps']:,}/{run.planned:,}",
        run.status,
        "–" if before is None else f"{run.score} {number(before)} → {number(after)}",
        "–" if wrong is None or not summary["tokens"] else "yes" if wrong == 0 else f"no: {wrong:,} tokens differ",
        (summary["started"] or "–")[:16].replace("T", " "),
    )


def _model_name(folder: Path) -> str:
    """The folder's name; for the model of another run the run's."""
    return folder.parent.name if folder.name == "model" else folder.name
