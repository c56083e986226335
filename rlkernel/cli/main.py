"""`rlkernel`: parses the command line and hands over to the command's module.

Nothing here imports torch, so `rlkernel --help` answers at once. A user's mistake ends in one line on standard
error and exit status 2; a bug ends in a traceback.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence

from rlkernel import __version__
from rlkernel.cli import doctor, generate, train
from rlkernel.cli.errors import UserError
from rlkernel.kernels.errors import BuildError

_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or choose another place"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "change its permissions, or choose another place"),
    errno.ENAMETOOLONG: "choose a shorter name",
}
"""Errors of the file system that are no bug, wherever they come from."""
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
        if isinstance(sys.stdout, io.TextIOWrapper):  # a completion holds what the terminal's encoding may not have
            sys.stdout.reconfigure(errors="backslashreplace")
        status = COMMANDS[args.command].run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except (UserError, BuildError) as error:
        print(f"rlkernel: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has what it wanted, as `head` does
        _discard_stdout()
        return 141
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0)
        if remedy is None:
            raise
        place = f"{error.filename}: " if error.filename is not None else ""
        print(f"rlkernel: {place}{error.strerror}; {remedy}", file=sys.stderr)
        if not place:  # it may be standard output that is full
            _discard_stdout()
        return 2
    except KeyboardInterrupt as error:
        print(": ".join(["rlkernel: interrupted", *map(str, error.args)]), file=sys.stderr)
        return 130


def _discard_stdout() -> None:
    """Sends what is left nowhere, because the interpreter flushes once more at its end."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
