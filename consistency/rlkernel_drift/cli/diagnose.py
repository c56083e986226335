"""`rlkernel-drift diagnose ROLLOUT TRAIN --model DIR`: compares, then names the cause by scoring hypotheses."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkernel_drift.cli.compare import add_options, options_of, write

if TYPE_CHECKING:
    from rlkernel_drift.diagnose.context import References


def add_diagnose(subparsers: Any) -> None:
    """Adds the `diagnose` command."""
    words = "name the cause of a difference, with the model"
    parser = subparsers.add_parser("diagnose", help=words, description=words.capitalize() + ".")
    parser.add_argument("rollout", metavar="ROLLOUT", help="a capsule")
    parser.add_argument("train", metavar="TRAIN", help="a capsule of the same tokens, or hf:DIR to score them")
    parser.add_argument("--model", metavar="DIR", help="the trainer's model; default that of TRAIN where it is hf:DIR")
    parser.add_argument("--previous", metavar="DIR", help="the weights before the last update")
    parser.add_argument("--adapter", metavar="DIR", help="LoRA adapter that the trainer applies to the model")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default cpu")
    add_options(parser)
    parser.set_defaults(run=run_diagnose)


def _model(args: argparse.Namespace) -> str | None:
    return args.model or (args.train.partition(":")[2] if args.train.startswith("hf:") else None)


def references(args: argparse.Namespace) -> References:
    """Loads the models of the options."""
    from rlkernel_drift.cli.capture import device_of
    from rlkernel_drift.diagnose.context import References
    from rlkernel_drift.errors import DriftError
    from rlkernel_drift.scoring.model import ReferenceModel
    from rlkernel_drift.scoring.weights import read_adapter

    path = _model(args)
    if path is None:
        raise DriftError("diagnose needs --model DIR, the trainer's model, or logits rows in the train capsule")
    device = device_of(args.device)
    model = ReferenceModel.load(path, device)
    previous = ReferenceModel.load(args.previous, device) if args.previous else None
    adapter = read_adapter(Path(args.adapter), model) if args.adapter else None
    return References(model, previous, adapter)


def run_diagnose(args: argparse.Namespace) -> int:
    """Compares and diagnoses; returns the comparison's exit status."""
    from rlkernel_drift.cli.capture import device_of
    from rlkernel_drift.compare import compare_sources, unusable
    from rlkernel_drift.diagnose.attach import diagnose_verdict
    from rlkernel_drift.errors import DriftError
    from rlkernel_drift.inputs import open_input
    from rlkernel_drift.inputs.model import Engines, scored

    try:
        options = options_of(args)
        device_of(args.device)
        rollout = open_input(args.rollout, "rollout")
        train = scored(open_input(args.train, "train"), rollout, Engines(device=args.device))
        verdict = compare_sources(rollout, train, options)
        if rollout.capsule is None or train.capsule is None:
            raise DriftError("diagnose needs the tokens of both sides: capsules, not metrics files")
        models = None if _model(args) is None and train.capsule.distribution else lambda: references(args)
        verdict = diagnose_verdict(verdict, rollout.capsule, train.capsule, models, options.floor)
    except DriftError as error:
        verdict = unusable(error, args.typed)
    return write(verdict, args)
