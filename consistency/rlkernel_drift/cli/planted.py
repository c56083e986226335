"""`rlkernel-drift demo` plants a fault in a tiny model and shows the verdict; `power` measures detection of all."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlkernel_drift.cli.compare import add_outputs, write
from rlkernel_drift.cli.streams import at_least
from rlkernel_drift.errors import DriftError

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


def add_demo(subparsers: Any) -> None:
    """Adds the `demo` command."""
    words = "plant a fault in a tiny model and show the verdict"
    parser = subparsers.add_parser("demo", help=words, description=f"{words.capitalize()}: {', '.join(DEMOS)}.")
    parser.add_argument("name", metavar="NAME", nargs="?", help="one of " + ", ".join(DEMOS))
    parser.add_argument("--family", default="llama", choices=("qwen3", "llama", "qwen2"))
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--out", metavar="DIR", help="keep both capsules and the models here")
    add_outputs(parser)
    parser.set_defaults(run=run_demo)


def run_demo(args: argparse.Namespace) -> int:
    """Plants the fault, compares, diagnoses, prints; returns the verdict's exit status."""
    if args.name not in DEMOS:
        what = "needs a NAME" if args.name is None else f"has no {args.name!r}"
        raise DriftError(f"demo {what}; choose one of: {', '.join(DEMOS)}")
    import torch

    from rlkernel_drift.faults import KINDS
    from rlkernel_drift.faults.world import healthy_world, record_world
    from rlkernel_drift.power import judge_pair

    # the models are too small for more threads
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


def add_power(subparsers: Any) -> None:
    """Adds the `power` command."""
    words = "measure what the diagnosis finds: planted faults and healthy pairs"
    parser = subparsers.add_parser("power", help=words, description=words.capitalize() + ".")
    parser.add_argument("--seeds", type=at_least(0), default=1, metavar="N", help="seeds per fault; default 1")
    parser.add_argument("--healthy", type=at_least(0), default=60, metavar="N", help="healthy pairs; default 60")
    parser.add_argument("--kind", action="append", metavar="NAME", help="only this fault; repeatable")
    parser.add_argument("--jobs", type=at_least(1), default=1, metavar="N", help="processes; default 1")
    parser.add_argument("--log", metavar="FILE", help="cases as JSON lines; a run with the same file resumes")
    parser.add_argument("--json", metavar="FILE", help="write the summary; the cases are in --log")
    parser.add_argument("--table", metavar="FILE", help="write the table as Markdown (- for standard output)")
    parser.set_defaults(run=run_power)


def run_power(args: argparse.Namespace) -> int:
    """Runs all cases; returns 0 if 95% are named right, none is called aligned, and there is no false alarm."""
    import torch

    from rlkernel_drift.power import Case, plan, run_matrix, summary, write_result
    from rlkernel_drift.power_tables import kinds

    torch.set_num_threads(1)
    cases = plan(args.seeds, args.healthy, args.kind)
    if not cases:
        raise DriftError("--seeds 0 and --healthy 0 leave no case to run")

    def show(case: Case) -> None:
        if not case.right and (case.above or case.group == "healthy"):
            print(f"{case.kind}, {case.family}, seed {case.seed}: named {case.named}", flush=True)

    results = run_matrix(cases, args.jobs, Path(args.log) if args.log else None, show)
    figures = write_result(Path(args.json), results, args.typed) if args.json else summary(results)
    if args.table == "-":
        print(kinds(figures))
    elif args.table:
        Path(args.table).write_text(kinds(figures), encoding="utf-8")
    share = figures["named_right_share"]
    print(
        f"{figures['kinds']} kinds, {figures['cases']} cases, {figures['above_floor']} above the floor: "
        f"{figures['named_right']} named right{f' ({share:.1%})' if share is not None else ''}, "
        f"{figures['called_aligned_above_floor']} called aligned; {figures['healthy']} healthy pairs, "
        f"{figures['false_alarms']} false alarms"
    )
    good = (
        (share is None or share >= 0.95) and not figures["called_aligned_above_floor"] and not figures["false_alarms"]
    )
    return 0 if good else 1
