"""`rlkernel-drift inspect PATH`: checks a capsule and says what is in it; `--schema`: the JSON Schema of verdicts."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Adds the `inspect` command."""
    words = "check a capsule and say what is in it"
    parser = subparsers.add_parser("inspect", help=words, description=words.capitalize() + ".")
    parser.add_argument("path", metavar="CAPSULE", nargs="?")
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of a verdict instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the summary; returns 0, or raises the reader's named error."""
    import json

    from rlkernel_drift.errors import DriftError

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
