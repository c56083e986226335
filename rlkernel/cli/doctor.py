"""`rlkernel doctor`: this machine, which implementation each op uses and why, on CUDA what is certified."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Adds the `doctor` command."""
    parser = subparsers.add_parser("doctor", help="show the machine and which implementation each op uses, and why")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None, help="default: cuda if there is a GPU")


def examine(device: str | None = None) -> dict[str, Any]:
    """Facts on the machine and the chosen implementation of every op, as plain data.

    Args:
        device: "cpu" or "cuda"; default cuda if there is a GPU.
    """
    import torch

    import rlkernel
    from rlkernel.contract import contract_id
    from rlkernel.environment import environment
    from rlkernel.ops.report import report

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "rlkernel": rlkernel.__version__,
        "contract": contract_id(),
        "device": device,
        "environment": environment(),
        "threads": torch.get_num_threads(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if device == "cuda" else None,
        **report(device),
    }


def summary(found: dict[str, Any]) -> str:
    """One line on what `examine` found: that all is well, or the first problem with its remedy."""
    place = "GPU" if found["device"] == "cuda" else "CPU"
    ops, name = found["ops"], f"rlkernel {found['rlkernel']}"
    absent = [row for row in ops if row["implementation"] is None]
    slow = [row for row in ops if row["implementation"] == "reference" and found["device"] == "cpu"]
    if absent:
        remedy = "; name another compiler in CXX" if "\n" in (found["build_error"] or "") else ""  # that is its log
        return f"{name}: {len(absent)} of {len(ops)} ops cannot run on this {place}: {absent[0]['reason']}{remedy}"
    if slow and found["compiler"] is None:
        return (
            f"{name}: {len(slow)} of {len(ops)} ops run the readable reference on this CPU, about a thousand times "
            f"slower than compiled kernels: {slow[0]['reason']}"
        )
    if place == "CPU":
        return f"{name}: all {len(ops)} ops run compiled C++ kernels on this CPU; nothing to do."
    lost = [found["triton"] and found["triton"]["note"], found["schedules"]["unavailable"]]
    if any(lost):
        return (
            f"{name}: all {len(ops)} ops run on this GPU, some slower than they could: {'; '.join(filter(None, lost))}"
        )
    return f"{name}: all {len(ops)} ops run kernels for this GPU; nothing to do."


def _difference(first: dict[str, Any] | None, against: str = "anchor") -> str:
    if first is None:
        return ""
    of = f"result {first['result']}, " if "result" in first else ""
    where = (
        f"; {first['kind']}, {first['rows']} rows: {of}at {first['index']} {first['actual']}, "
        f"{against} {first['expected']}"
    )
    return f"{where}, {first['mismatches']} of {first['elements']} differ"


def _shape(shape: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in shape.items() if value is not False)


def _fa3_lines(found: dict[str, Any]) -> Iterator[str]:
    if found["unavailable"]:
        yield f"attention variant fa3: not available: {found['unavailable']}"
    for row in found["rows"]:
        verdict = "certified" if row["certified"] else "refused"
        difference = _difference(row["first"], "dense")
        yield f"attention variant fa3 {_shape(row['shape'])}: {verdict}; {row['reason']}{difference}"


def _schedule_lines(found: dict[str, Any]) -> Iterator[str]:
    if found["unavailable"]:
        what = "cuBLASLt's schedules are off" if found["verdicts"] else "no certified schedules"
        yield f"{what}: {found['unavailable']}"
    if found["verdicts"]:
        yield f"schedules: verdicts in {found['verdicts']}"
    for row in found["uncertified"]:
        yield f"not certified: {row['op']} {row['shape']}: {row['reason']}"
    for row in found["unsupported"]:
        yield f"{row['op']} {_shape(row['shape'])}: anchor; not for this GPU or shape: {', '.join(row['schedules'])}"
    last = None
    for row in found["rows"]:  # lines, because a table of six columns is wider than a terminal
        heading = f"{row['op']} {_shape(row['shape'])}"
        if heading != last:
            last = heading
            yield heading
        verdict = ("certified" if row["certified"] else "refused") + (", chosen" if row["chosen"] else "")
        speed = "" if row["speed"] is None else f"{row['speed']:.2f}x anchor, {row['ms']:.4f} ms; "
        yield f"  {row['schedule']}: {verdict}; {speed}{row['reason']}{_difference(row['first'])}"


def run(args: argparse.Namespace) -> int:
    """Prints a summary and the table, or JSON with --json. Exit status 1 if an op has no implementation."""
    from rlkernel.cli.errors import UserError

    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError("doctor: --device cuda, but torch sees no CUDA GPU; leave the option out or use cpu")
    found = examine(args.device)
    found = {"summary": summary(found), **found}
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        _print(found)
    return 0 if all(row["implementation"] for row in found["ops"]) else 1


def _print(found: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from rlkernel.training.display import Screen

    console = Screen()

    def say(line: str) -> None:
        console.print(line, markup=False)  # paths may look like rich's markup

    chip = f", compute capability {found['capability']}" if found["capability"] else ""
    say(found["summary"])
    say(f"contract {found['contract']}, {found['device']}: {found['environment']['hardware']}{chip}")
    say(f"compiler {found['compiler']}, cache {found['cache']}, {found['threads']} threads")
    if found["triton"] and found["triton"]["note"]:
        say(found["triton"]["note"])
    table = Table("op", "implementation", "why")
    for row in found["ops"]:
        table.add_row(row["op"], row["implementation"] or "none", escape(row["reason"]))
    console.print(table)
    if found["build_error"]:
        print(found["build_error"])
    for line in (*_fa3_lines(found["attention_fa3"]), *_schedule_lines(found["schedules"])):
        say(line)
