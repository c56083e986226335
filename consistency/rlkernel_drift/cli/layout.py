"""`rlkernel-drift layout ROLLOUT TRAIN`: compares media, placeholders, positions, masks and scored tokens."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_layout(subparsers: Any) -> None:
    """Adds the `layout` command."""
    words = "compare media, placeholders, positions, masks and scored tokens of two files of records"
    more, kind = "Exit status 1 means that they differ.", "a .jsonl file of `write_records`, or its folder"
    parser = subparsers.add_parser("layout", help=words, description=f"{words.capitalize()}. {more}")
    for name in ("rollout", "train"):
        parser.add_argument(name, metavar=name.upper(), type=Path, help=kind)
    parser.set_defaults(run=run_layout)


def run_layout(args: argparse.Namespace) -> int:
    """Prints the comparison; returns 1 if the layouts differ, else 0."""
    from rlkernel_drift.layout import compare_layout_files
    from rlkernel_drift.output import printable

    layout = compare_layout_files(args.rollout, args.train)
    for line in str(layout).splitlines():
        print(printable(line))
    return int(bool(layout.findings))
