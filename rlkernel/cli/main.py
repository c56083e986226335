"""`rlkernel`: parses the command line and runs the command's module.

Nothing here imports torch, so that `rlkernel --help` answers at once. A user's mistake prints one line on standard
error, with exit status 2; a bug prints a traceback.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import sys
from collections.abc import Sequence

from rlkernel import __version__
from rlkernel.cli import compare, data, doctor, fetch, generate, report, runs, train
from rlkernel.cli.errors import UserError
from rlkernel.kernels.errors import BuildError
from rlkernel.parallel.torchrun import is_launched
from rlkernel.signals import Interrupted, discard_stdout

_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or choose another place"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "change its permissions, or choose another place"),
    errno.ENAMETOOLONG: "choose a shorter name",
}
"""Remedies for file-system errors that are not bugs."""
COMMANDS = {
    "train": train, "generate": generate, "data": data, "fetch": fetch, "runs": runs, "report": report,
    "compare": compare, "doctor": doctor,
}  # fmt: skip


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
    # OpenMP reads it when torch loads. Idle threads then sleep: on a shared machine, spinning slows a run down
    # several times.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    args = build_parser().parse_args(argv)
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Where no command handles it, Ctrl-C ends the process. KeyboardInterrupt would be swallowed while torch imports
        # numpy, which is then used half imported, and would print a traceback of torch's exit handlers.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):  # a completion may not fit the terminal's encoding
            sys.stdout.reconfigure(errors="backslashreplace")
        status = COMMANDS[args.command].run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except (UserError, BuildError) as error:
        print(f"{_name()}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe has closed it, as `head` does
        discard_stdout()
        return 141
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0)
        if remedy is None:
            raise
        place = f"{error.filename}: " if error.filename is not None else ""
        print(f"{_name()}: {place}{error.strerror}; {remedy}", file=sys.stderr)
        if not place:  # standard output itself may be full
            discard_stdout()
        return 2
    except KeyboardInterrupt as error:
        print(": ".join([_name(), "interrupted", *map(str, error.args)]), file=sys.stderr)
        return 128 + (error.signal if isinstance(error, Interrupted) else signal.SIGINT)


def _name() -> str:
    """What messages begin with: several ranks share one standard error."""
    return f"rlkernel: rank {os.environ['RANK']}" if is_launched() else "rlkernel"


if __name__ == "__main__":
    sys.exit(main())
