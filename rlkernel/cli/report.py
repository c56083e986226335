"""`rlkernel report RUN`: writes report.html of a run again from its files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Adds the `report` command."""
    text = "write report.html of a run again, also of a run that was killed or is still running"
    parser = subparsers.add_parser("report", help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.add_argument("run", metavar="RUN", help="run folder")


def run(args: argparse.Namespace) -> int:
    """Writes the report; returns the exit status."""
    from rlkernel.cli.errors import UserError
    from rlkernel.data.errors import InputError
    from rlkernel.training.pages.report import write_report

    try:
        print(write_report(Path(args.run)))
    except InputError as error:
        raise UserError(str(error)) from error
    return 0
