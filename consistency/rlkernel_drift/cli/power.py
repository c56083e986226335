"""`rlkernel-drift power`: plants every kind of fault; says what was named, what missed, what alarmed falsely."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlkernel_drift.cli.streams import at_least
from rlkernel_drift.errors import DriftError


def add_parser(subparsers: Any) -> None:
    """Adds the `power` command."""
    words = "measure what the diagnosis finds: planted faults and healthy pairs"
    parser = subparsers.add_parser("power", help=words, description=words.capitalize() + ".")
    parser.add_argument("--seeds", type=at_least(0), default=5, metavar="N", help="seeds a fault and family; default 5")
    parser.add_argument("--healthy", type=at_least(0), default=200, metavar="N", help="healthy pairs; default 200")
    parser.add_argument("--kind", action="append", metavar="NAME", help="only this fault; repeatable")
    parser.add_argument("--jobs", type=at_least(1), default=1, metavar="N", help="processes; default 1")
    parser.add_argument("--log", metavar="FILE", help="cases as JSON lines; a run with the same file goes on")
    parser.add_argument("--json", metavar="FILE", help="write summary and cases")
    parser.add_argument("--table", metavar="FILE", help="write the table as Markdown (- for standard output)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the matrix; 0 where at least 95% are named right, none is called aligned and nothing alarms falsely."""
    import torch

    from rlkernel_drift.power import Case, plan, run_matrix, summary, write_result
    from rlkernel_drift.power_tables import kinds

    torch.set_num_threads(1)
    cases = plan(args.seeds, args.healthy, args.kind)
    if not cases:
        raise DriftError("--seeds 0 and --healthy 0 leave no case to run: nothing measured is no pass")
    count = 0

    def tell(case: Case) -> None:
        nonlocal count
        count += 1
        if not case.right and (case.above or case.group == "healthy"):
            print(f"{case.kind}, {case.family}, seed {case.seed}: named {case.named}", flush=True)

    results = run_matrix(cases, args.jobs, Path(args.log) if args.log else None, tell)
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
