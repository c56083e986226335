"""`rlkernel-drift`: parses the command line and calls the command's function.

Nothing here imports numpy or torch, so `--help` is fast. Exit status: 0 aligned, 1 drift, 2 unusable input (also
unexpected errors, because 1 means drift), 3 inconclusive, 4 the inputs differ.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from rlkernel_drift import __version__
from rlkernel_drift.cli.capture import add_capture, add_floor
from rlkernel_drift.cli.compare import add_compare, add_diagnose
from rlkernel_drift.cli.planted import add_demo, add_power
from rlkernel_drift.cli.read import add_inspect, add_layout, add_report
from rlkernel_drift.cli.streams import check_targets, complain, discard_stdout
from rlkernel_drift.errors import DriftError

COMMANDS = (add_compare, add_diagnose, add_layout, add_floor, add_capture, add_inspect, add_report, add_demo, add_power)


def build_parser() -> argparse.ArgumentParser:
    """Parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="rlkernel-drift",
        description="Find drift between rollout and training log-probabilities, its cause and its cost.",
        epilog="exit status: 0 aligned, 1 drift, 2 unusable input, 3 inconclusive, 4 the inputs differ",
    )
    parser.add_argument("--version", action="version", version=f"rlkernel-drift {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add_command in COMMANDS:
        add_command(subparsers)
    for subparser in dict.fromkeys(subparsers.choices.values()):
        subparser.add_argument("--traceback", action="store_true", help="show the traceback of an unexpected error")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `rlkernel-drift` script; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(arguments)
    # file names that are not UTF-8 arrive with surrogates, which outputs cannot encode
    args.typed = ["rlkernel-drift", *(a.encode("utf-8", "backslashreplace").decode() for a in arguments)]
    status = 0
    try:
        check_targets(args)
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        discard_stdout()
        return status
    except DriftError as error:
        complain(f"rlkernel-drift: {error}")
        return 2
    except KeyboardInterrupt:
        complain("rlkernel-drift: interrupted")
        return 130
    except Exception as error:
        if args.traceback or os.environ.get("RLKERNEL_DRIFT_TRACEBACK"):
            complain(traceback.format_exc())
        words = (str(error).strip().splitlines() or [""])[0]
        hint = "--traceback or RLKERNEL_DRIFT_TRACEBACK=1 shows the traceback"
        complain(f"rlkernel-drift: unexpected {type(error).__name__}: {words} ({hint})")
        return 2


if __name__ == "__main__":
    sys.exit(main())
