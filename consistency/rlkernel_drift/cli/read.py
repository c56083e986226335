"""`rlkernel-drift inspect` checks and describes a capsule, `report` writes HTML and PNG from the JSON of a verdict, and
`layout` compares media, placeholders, positions, masks and scored tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkernel_drift.cli.compare import add_pictures, write_pictures
from rlkernel_drift.errors import DriftError

if TYPE_CHECKING:
    from rlkernel_drift.verdict import Verdict


def add_inspect(subparsers: Any) -> None:
    """Adds the `inspect` command."""
    words = "check a capsule and describe its content"
    parser = subparsers.add_parser("inspect", help=words, description=words.capitalize() + ".")
    parser.add_argument("path", metavar="CAPSULE", nargs="?")
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of a verdict instead")
    parser.set_defaults(run=run_inspect)


def run_inspect(args: argparse.Namespace) -> int:
    """Prints the summary; returns 0."""
    import json

    if args.schema:
        from rlkernel_drift.verdict import json_schema

        print(json.dumps(json_schema(), indent=1))
        return 0
    if args.path is None:
        raise DriftError("inspect needs the path of a capsule, or --schema")
    from rlkernel_drift.capsule import read_capsule
    from rlkernel_drift.output import printable

    capsule = read_capsule(args.path)
    m = capsule.manifest
    kinds = sorted({operator.kind for operator in m.operators})
    rows = {
        "side": f"{m.side}, engine {m.engine or '?'}, contract {m.contract or 'none'}",
        "model": f"{m.model.name or '?'} ({m.model.family or '?'}), vocabulary {m.model.vocab_size}",
        "tokens": f"{capsule.tokens} in {capsule.sequences} sequences, {int(capsule.mask.sum())} count",
        "log-probabilities": ", ".join(capsule.logprobs) or "none",
        "sampling": ", ".join(f"{key} {value}" for key, value in m.sampling.model_dump().items()),
        "kept sets": f"{len(capsule.kept.ids)} ids" if capsule.kept else "none",
        "logits rows": str(len(capsule.distribution.rows)) if capsule.distribution else "none",
        "weights": _weights(m.weights) if m.weights else "none",
        "operators": f"{len(m.operators)} ({', '.join(kinds)})" if kinds else "none",
        "left out": "; ".join(m.left_out) or "nothing",
        "text": "redacted" if m.redacted else f"{len(m.vocabulary)} token texts",
    }
    for key, value in rows.items():
        print(f"{key:18} {printable(value)}")
    return 0


def _weights(weights: Any) -> str:
    version = "no version" if weights.version is None else f"version {weights.version}"
    return f"{version}, {len(weights.tensors)} tensors"


def add_report(subparsers: Any) -> None:
    """Adds the `report` command."""
    words = "write the report of a verdict"
    parser = subparsers.add_parser("report", help=words, description=words.capitalize() + ".")
    parser.add_argument("verdict", metavar="VERDICT.json", help="written by --json")
    add_pictures(parser)
    parser.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> int:
    """Writes the requested files; returns 0 for every verdict, because this command compares nothing."""
    if not (args.html or args.png):
        raise DriftError("report needs --html FILE or --png FILE")
    write_pictures(read_verdict(args.verdict), args)
    return 0


def read_verdict(path: str) -> Verdict:
    """A verdict from its JSON, which is not trusted.

    Raises:
        DriftError, CapsuleError: unreadable, too large or deep, or not a verdict; the message names the field.
    """
    from pydantic import ValidationError

    from rlkernel_drift.capsule.tensor_file import DEFAULT_LIMITS, parse_json
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
        raise DriftError(f"{path} is not a verdict of this version: {where}: {first['msg']}") from None


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
