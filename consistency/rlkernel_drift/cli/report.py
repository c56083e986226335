"""`rlkernel-drift report VERDICT.json --html FILE`: the report of a verdict that `--json` wrote."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rlkernel_drift.cli.compare import add_pictures, write_pictures

if TYPE_CHECKING:
    from rlkernel_drift.verdict import Verdict


def add_parser(subparsers: Any) -> None:
    """Adds the `report` command."""
    words = "write the report of a verdict"
    parser = subparsers.add_parser("report", help=words, description=words.capitalize() + ".")
    parser.add_argument("verdict", metavar="VERDICT.json", help="written by --json")
    add_pictures(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes what was asked for; 0, whatever the verdict says: this command compares nothing."""
    from rlkernel_drift.errors import DriftError

    if not (args.html or args.png):
        raise DriftError("report needs --html FILE or --png FILE")
    write_pictures(read_verdict(args.verdict), args)
    return 0


def read_verdict(path: str) -> Verdict:
    """A verdict from its JSON, with the bounds of every JSON that strangers send.

    Raises:
        DriftError, CapsuleError: unreadable, too large or deep, or no verdict; the message names the field.
    """
    from pydantic import ValidationError

    from rlkernel_drift.capsule.strict_json import DEFAULT_LIMITS, parse_json
    from rlkernel_drift.errors import DriftError
    from rlkernel_drift.verdict import Verdict

    try:
        with open(path, "rb") as file:
            data = file.read(DEFAULT_LIMITS.json_bytes + 1)
        return Verdict.model_validate(parse_json(data, path))
    except OSError as error:
        raise DriftError(f"cannot read {path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise DriftError(f"{path} is no verdict of this version: {where}: {first['msg']}") from None
