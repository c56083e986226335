"""`rlkernel`: parses the command line and hands over to the command's module.

Nothing here imports torch, so `rlkernel --help` answers at once. A user's mistake ends in one line on standard
error and exit status 2; a bug ends in a traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from rlkernel import __version__
from rlkernel.cli import doctor, generate, train
from rlkernel.cli.errors import UserError
from rlkernel.kernels.errors import BuildError

COMMANDS = {"train": train, "generate": generate, "doctor": doctor}


def build_parser() -> argparse.ArgumentParser:
    """Parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="rlkernel",
        description="Reinforcement learning of language models with rollout and training equal to the last bit.",
    )
    parser.add_argument("--version", action="version", version=f"rlkernel {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS.values():
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `rlkernel` script; returns the exit status."""
    # Read when torch loads OpenMP. Idle threads then sleep instead of spinning: a busy core beside the run costs its
    # share of the time, not several times the whole.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    args = build_parser().parse_args(argv)
    try:
        status = COMMANDS[args.command].run(args)
        sys.stdout.flush()
        return status
    except (UserError, BuildError) as error:
        print(f"rlkernel: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has what it wanted, as `head` does; the interpreter must not flush again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("rlkernel: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
