"""The figures to reach on an NVIDIA H200, and what the result files say: measured, and reached or not.

A line without its result file is "not measured". A ratio of times is ours over the anchor's, a share is the roofline's
time over ours; "reached" asks it of every case that the line names. As a script it prints them for a folder of results.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
FILES = ("bench_linear", "bench_dispatch", "bench_attention", "bench_linear_logprob", "bench_memory_bound")
"""The result files that the figures are read from."""
MEMORY_GIB = 1.5
"""Most memory that a bounded linear_logprob may need beside inputs, the input gradient and main_grad."""
SHARE = 0.85
"""Least share of the memory roofline of an op that memory bounds."""


def _rows(folder: Path, name: str) -> list[Row]:
    path = folder / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def _line(op: str, anchor: str, reach: str, found: list[Row], value: Callable[[Row], float | None],
          good: Callable[[float], bool], unit: str = "") -> Row:  # fmt: skip
    """One line of the table over the rows of its cases; a case without a value is not reached."""
    values = [value(row) for row in found]
    there = [v for v in values if v is not None]
    enough = [v is not None and good(v) for v in values]

    def shown(v: float) -> str:
        """Three digits, and as many more as it takes not to look like the other side of the line."""
        return next(text for n in range(3, 18) if good(float(text := f"{v:.{n}g}")) == good(v))

    measured = ", ".join("none" if v is None else f"{shown(v)}{unit}" for v in values)
    if len(there) > 4:
        measured = f"{shown(min(there))} to {shown(max(there))}{unit}, {sum(enough)} of {len(values)} cases reach it"
    reached = all(enough)
    return {
        "op": op,
        "anchor": anchor,
        "reach": reach,
        "measured": measured or "not measured",
        "reached": ("yes" if reached else "no") if values else "",
    }


def _time(row: Row) -> float | None:
    """Our time over the anchor's."""
    return None if row["ours_ms"] is None or row["anchor_ms"] is None else row["ours_ms"] / row["anchor_ms"]


def _beside_gradients(row: Row) -> float:
    """GiB without the gradients of hidden states and weight, in bf16, which the call returns."""
    t, c, v = row["shape"]
    return float(row["peak_gib"] - 2 * (t + v) * c / 2**30)


def _further(found: list[Row]) -> list[Row]:
    """Of the two largest sizes of each case: `share` of the roofline of what the larger adds to the other, and the
    microseconds, `fixed_us`, that are left of either where each of its bytes takes as long as those."""
    sizes: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        if row.get("shape") and row.get("ours_ms") and row["share_of_roofline"]:
            sizes.setdefault((row["op"], *row["shape"][1:]), []).append(row)
    cases = []
    for rows in sizes.values():
        two = sorted(rows, key=lambda row: row["shape"][0])[-2:]
        smaller, larger = two[0], two[-1]  # one and the same where there is one size
        if smaller["ours_ms"] < larger["ours_ms"]:
            floor = [row["ours_ms"] * row["share_of_roofline"] for row in (smaller, larger)]
            share = (floor[1] - floor[0]) / (larger["ours_ms"] - smaller["ours_ms"])
            cases.append({"share": share, "fixed_us": 1e3 * (larger["ours_ms"] - floor[1] / share)})
    return cases


def figures(folder: Path) -> list[Row]:
    """The table of a results folder: op, anchor, reach, measured, reached."""
    lines = []
    rows = _rows(folder, "bench_linear")
    for op, what in (
        ("linear", "forward"),
        ("linear_between", "forward, row counts between"),
        ("linear_dgrad", "input gradient"),
    ):
        for kind, low in (("geometric mean", 0.98), ("smallest", 0.90)):
            found = [row for row in rows if row["op"] == f"{op}: {kind}"]
            lines.append(_line(f"linear, {what}, {kind}", "torch's cuBLAS", f">= {low}x of its speed", found,
                               lambda row: row["ratio"], lambda v, low=low: v >= low))  # fmt: skip

    lines.append(_line("dispatch of a warm call (the dispatcher alone)", "", "< 1 us", _rows(folder, "bench_dispatch"),
                       lambda row: row["ours_ms"] * 1e3, lambda v: v < 1.0, " us"))  # fmt: skip

    rows = _rows(folder, "bench_attention")
    for op, by, what, anchor, low in (
        ("attention forward", "triton", "attention, Triton anchor, forward", "FlashAttention-3", 0.60),
        ("attention forward", "certified", "the same, certified kernel", "FlashAttention-3", 0.60),
        ("attention backward", "triton", "attention, backward", "cuDNN", 0.55),
        ("paged decode", "triton", "paged decode", "FlashAttention-3", 0.90),
    ):
        found = [row for row in rows if row["op"] == op and row["ours"].split(":")[0] == by]
        found = [row for row in found if row["anchor"] in (anchor, None)]
        lines.append(_line(what, anchor, f">= {low}x of its speed", found,
                           lambda row: row["ratio"], lambda v, low=low: v >= low))  # fmt: skip

    rows = [row for row in _rows(folder, "bench_linear_logprob") if row["op"].startswith("linear_logprob fwd+bwd")]
    against = [row for row in rows if row["anchor"].startswith("TRL")]
    trl = [row for row in against if row["op"] == "linear_logprob fwd+bwd"]
    hot = [row for row in against if row["op"] == "linear_logprob fwd+bwd, without rest"]
    for ours, op, high, beside, memory in (
        ("rlkernel", "linear_logprob, forward + backward", 0.90, "inputs and gradients", _beside_gradients),
        ("rlkernel, main_grad", "the same with main_grad", 0.90, "inputs and main_grad", lambda row: row["peak_gib"]),
        ("rlkernel, keep_probs", "the same, bf16 probabilities kept", 0.72, "", None),
    ):
        for found, how in ((trl, ""), (hot, ", without rest between timings")):
            lines.append(_line(op + how, "TRL chunked", f"<= {high}x of its time",
                               [row for row in found if row["ours"] == ours], _time,
                               lambda v, high=high: v <= high))  # fmt: skip
        if memory is not None:
            found = [row for row in trl if row["ours"] == ours]
            lines.append(_line(f"{op}, memory beside {beside}", "", f"<= {MEMORY_GIB} GiB", found, memory,
                               lambda v: v <= MEMORY_GIB, " GiB"))  # fmt: skip

    # Prompts: callers leave their rows out before the call, as both trainers do, or hand over all of them.
    without = [row for row in against if row["op"].endswith("rows left out") and row["ours"] == "rlkernel"]
    within = [row for row in against if row["anchor"].endswith("rows left out")]
    for what, found in (
        ("linear_logprob, rows without gradient not given to either", without),
        ("linear_logprob over all rows, TRL without those that have no gradient", within),
    ):
        lines.append(_line(what, "TRL chunked", "< 1x of its time", found, _time, lambda v: v < 1.0))

    rows = _rows(folder, "bench_memory_bound")
    for op, high in (("logprob", 0.33), ("logprob fwd+bwd", 0.75)):
        lines.append(_line(f"{op}, 4096 x 151936", "HBM", f"<= {high} ms", [row for row in rows if row["op"] == op],
                           lambda row: row["ours_ms"], lambda v, high=high: v <= high, " ms"))  # fmt: skip
        copies = [row["copy_ms"] for row in rows if row["op"] == op and row.get("copy_ms")]
        lines[-1]["measured"] += "".join(f"; a copy of the same bytes takes {ms:.3g} ms" for ms in copies)
    cases = [(op, [row for row in rows if row["op"].split()[0] == op])
             for op in ("rms_norm", "swiglu", "rope", "policy_loss", "adamw", "grad_norm", "embedding")]  # fmt: skip
    # Launches bound the short ones.
    for name in ("policy_loss", "rope", "swiglu", "rms_norm"):
        at, (_, of_op) = next((i, case) for i, case in enumerate(cases) if case[0] == name)
        largest = max((row.get("shape", []) for row in of_op), key=math.prod, default=[])
        those = [row for row in of_op if row.get("shape", []) == largest]
        if len(those) < len(of_op):
            size = " x ".join(map(str, largest)) if len(largest) > 1 else f"{largest[0]:,} tokens"
            cases.insert(at + 1, (f"{name}, {size} (the largest)", those))
    for name, found in cases:
        lines.append(_line(name, "bytes / 4.3 TB/s", f">= {SHARE} of the floor", found,
                           lambda row: row["share_of_roofline"], lambda v: v >= SHARE))  # fmt: skip
        copies = [row["copy_share_of_roofline"] for row in found
                  if (row["share_of_roofline"] or 0) < SHARE and row.get("copy_share_of_roofline")]  # fmt: skip
        if len(found) == 1:
            lines[-1]["measured"] += "".join(f"; a copy of the same bytes {share:.3g}" for share in copies)
        elif copies:
            reached = sum(share >= SHARE for share in copies)
            those = "the other" if len(copies) < len(found) else "these"
            lines[-1]["measured"] += f"; of {those} {len(copies)} a copy of the same bytes reaches it in {reached}"
        behind = [row["share_after_copy"] for row in found if row.get("share_after_copy")]
        if len(behind) == 1:
            lines[-1]["measured"] += f"; where a copy evicted the cache {behind[0]:.3g}"
        elif behind:
            enough = sum(share >= SHARE for share in behind)
            lines[-1]["measured"] += f"; where a copy evicted the cache {enough} of {len(behind)} reach it"
        if further := _further(found):
            lines.append(_line(f"{name}, what more tokens add", "bytes / 4.3 TB/s", f">= {SHARE} of the floor", further,
                               lambda row: row["share"], lambda v: v >= SHARE))  # fmt: skip
            fixed = [row["fixed_us"] for row in further]
            lines[-1]["measured"] += f"; {min(fixed):.1f} to {max(fixed):.1f} us do not grow with them"
    return lines


def main() -> int:
    """Prints the figures of the folder given, by default the H200's, with --here this machine's."""
    root = Path(os.environ.get("RLKERNEL_RESULTS", Path(__file__).resolve().parent / "results"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--here", action="store_true", help="of this machine's folder")
    args = parser.parse_args()
    given, folder = args.folder, args.folder or root / "nvidia-h200"
    if args.here and not given:
        sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]
        from results_io import gpu_folder

        from rlkernel.environment import environment

        folder = root / gpu_folder(environment()["hardware"])
        print(f"figures of {folder}")
        if not any((folder / f"{name}.json").exists() for name in FILES):
            print("none of the files that they are read from is there")
            return 0
    if given and not given.is_dir():
        parser.error(f"{folder} is no folder of results; benchmarks/results has one a GPU")
    for line in figures(folder):
        print(f"{line['op']:46} {line['reach']:24} {line['measured']:44} {line['reached']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
