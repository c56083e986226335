"""`rlkernel-drift floor`: runs an engine against itself and writes the band that is normal for this stack."""

from __future__ import annotations

import argparse
from typing import Any

from rlkernel_drift.cli.capture import add_request


def add_parser(subparsers: Any) -> None:
    """Adds the `floor` command."""
    words = "measure the noise of an engine against itself"
    parser = subparsers.add_parser("floor", help=words, description=words.capitalize() + ".")
    parser.add_argument("--engine", default="hf", choices=("hf", "rlkernel", "vllm", "vllm+rlkernel"))
    parser.add_argument("--engine-args", default="{}", metavar="JSON", help="further arguments of vllm.LLM")
    add_request(parser)
    parser.add_argument("--out", metavar="FILE", help="write the floor as JSON, for compare --floor")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures, prints, writes; returns 0."""
    from rlkernel_drift.cli.capture import request_of
    from rlkernel_drift.cli.compare import write_file
    from rlkernel_drift.floor import measure_floor

    measured = measure_floor(args.engine, request_of(args))
    for name, s in measured.permutations.items():
        print(f"{name:28} mean |d| {s.mean:.3g}  p99 {s.p99:.3g}  max {s.maximum:.3g}  k3 {s.k3:.3g}")
    floor = measured.floor
    print(f"floor: mean |d| {floor.mean:.3g}, p99 {floor.p99:.3g}, max {floor.maximum:.3g} ({floor.tokens} tokens)")
    if args.out:
        write_file(args.out, floor.model_dump_json(indent=1) + "\n")
    return 0
