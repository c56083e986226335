"""`rlkernel compare RUN RUN ...`: one page with the figures, differing settings and curves of several runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Adds the `compare` command."""
    parser = subparsers.add_parser(
        "compare",
        help="compare runs in one page",
        description="Write one HTML page with the figures, the settings that differ and the curves of 2 to 8 runs.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--output", default="compare.html", metavar="FILE.html", help="default: compare.html")


def run(args: argparse.Namespace) -> int:
    """Writes the page; returns the exit status."""
    from rlkernel.cli.errors import UserError
    from rlkernel.data.errors import InputError
    from rlkernel.training.pages.compare import write_comparison

    if not args.output.endswith(".html"):
        raise UserError(f"compare: --output {args.output} does not end in .html, and the page would replace that file")
    try:
        print(write_comparison([Path(folder) for folder in args.runs], Path(args.output)))
    except InputError as error:
        raise UserError(str(error)) from error
    return 0
