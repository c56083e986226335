"""`rlkernel-drift`: parses the command line and hands over to the command's module.

Nothing here imports numpy or torch, so `--help` answers at once. Exit status: 0 aligned, 1 drift, 2 unusable input,
3 inconclusive, 4 the inputs differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rlkernel_drift import __version__
from rlkernel_drift.cli import capture, compare, demo, diagnose, floor, inspect, power, report
from rlkernel_drift.errors import DriftError

COMMANDS = {
    "compare": compare,
    "diagnose": diagnose,
    "floor": floor,
    "capture": capture,
    "inspect": inspect,
    "report": report,
    "demo": demo,
    "power": power,
}


def build_parser() -> argparse.ArgumentParser:
    """Parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="rlkernel-drift",
        description="Find the drift between rollout and training log-probabilities, name its cause, say what it costs.",
        epilog="exit status: 0 aligned, 1 drift, 2 unusable input, 3 inconclusive, 4 the inputs differ",
    )
    parser.add_argument("--version", action="version", version=f"rlkernel-drift {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS.values():
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `rlkernel-drift` script; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(arguments)
    args.typed = ["rlkernel-drift", *arguments]
    try:
        return int(args.run(args))
    except DriftError as error:
        print(f"rlkernel-drift: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("rlkernel-drift: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
