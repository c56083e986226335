"""`rlkernel-drift demo NAME`: a tiny model, a planted fault, the verdict; `--out` keeps the capsules and models."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

DEMOS = {
    "stale-weights": "stale weights",
    "partial-sync": "one stale tensor",
    "temperature": "temperature",
    "top-p": "top-p",
    "off-by-one": "off by one",
    "retokenised": "retokenised",
    "missing-bos": "dropped first token",
    "chat-template": "dropped system prompt",
    "positions": "positions restart",
    "padding": "attended padding",
    "rope-base": "rope base",
    "lora-missing": "missing LoRA",
    "lora-scale": "LoRA scale",
    "tied-embedding": "head is the embedding",
    "fp8-weights": "eight-bit weights",
    "prefix-cache": "stale prefix cache",
    "bf16-logits": "bfloat16 logits",
    "faulty-layer": "attention scale in one layer",
    "healthy": "",
}


def add_parser(subparsers: Any) -> None:
    """Adds the `demo` command."""
    words = "plant a fault in a tiny model and show the verdict"
    parser = subparsers.add_parser("demo", help=words, description=f"{words.capitalize()}: {', '.join(DEMOS)}.")
    parser.add_argument("name", metavar="NAME", nargs="?", help="one of " + ", ".join(DEMOS))
    parser.add_argument("--family", default="llama", choices=("qwen3", "llama", "qwen2"))
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--out", metavar="DIR", help="keep both capsules and the models here")
    from rlkernel_drift.cli.compare import add_outputs

    add_outputs(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plants, compares, diagnoses, prints; returns the verdict's exit status."""
    from rlkernel_drift.errors import DriftError

    if args.name not in DEMOS:
        what = "needs a NAME" if args.name is None else f"{args.name!r} is unknown"
        raise DriftError(f"demo {what}; there are: {', '.join(DEMOS)}")
    import torch

    from rlkernel_drift.cli.compare import write
    from rlkernel_drift.faults.kinds import KINDS
    from rlkernel_drift.faults.world import healthy_world, record_world
    from rlkernel_drift.power import judge_pair

    # The models are so small that a second thread only waits.
    torch.set_num_threads(1)
    kind = KINDS.get(DEMOS[args.name])
    family = args.family if kind is None or args.family in kind.families else kind.families[0]
    world = healthy_world(family, args.seed, kind.dtype if kind else None, with_previous=bool(kind and kind.previous))
    recorded = record_world(world, kind.plant if kind else None)
    if args.json != "-":
        fault = f"{kind.name} {world.planted or ''}" if kind else "nothing"
        print(f"planted in a tiny {family} ({world.dtype}, rollout by {world.rollout.path}): {fault}\n")
    verdict = judge_pair(recorded).model_copy(update={"command": args.typed})
    if args.out:
        _keep(Path(args.out), recorded)
    return write(verdict, args)


def _keep(folder: Path, recorded: Any) -> None:
    from rlkernel_drift.capsule import write_capsule

    write_capsule(recorded.rollout, folder / "rollout")
    write_capsule(recorded.train, folder / "train")
    recorded.world.base.save_pretrained(folder / "model")
    if recorded.world.previous is not None:
        recorded.world.previous.save_pretrained(folder / "previous")
