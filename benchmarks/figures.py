"""Performance targets on an NVIDIA H200, compared with the result files; as a script, prints them for a folder.

A ratio of times is ours over the anchor's; a share is the roofline's time over ours. "cases" counts the cases that
reach the target, and "reached" is yes if all do. A line has no numbers if its result file is missing.
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
"""Result files that the targets are read from."""
MEMORY_GIB = 1.5
"""Limit of linear_logprob's memory beyond inputs, input gradient and weight gradient."""
SHARE = 0.85
"""Smallest accepted share of the memory roofline, for memory-bound ops."""


def _rows(folder: Path, name: str) -> list[Row]:
    path = folder / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def _line(op: str, anchor: str, target: str, found: list[Row], value: Callable[[Row], float | None],
          good: Callable[[float], bool]) -> Row:  # fmt: skip
    """One line of the table, from the rows of its cases. A case without a value does not reach the target."""
    values = [value(row) for row in found]
    present = [v for v in values if v is not None]
    enough = [v is not None and good(v) for v in values]

    def shown(v: float) -> str:
        """At least three digits, and more if rounding would move the value to the other side of the target."""
        return next(text for n in range(3, 18) if good(float(text := f"{v:.{n}g}")) == good(v))

    return {
        "op": op,
        "anchor": anchor,
        "target": target,
        "least": shown(min(present)) if present else "",
        "most": shown(max(present)) if present else "",
        "cases": f"{sum(enough)}/{len(values)}" if values else "",
        "copy": "",
        "reached": ("yes" if all(enough) else "no") if values else "",
    }


def _time(row: Row) -> float | None:
    """Our time over the anchor's."""
    return None if row["ours_ms"] is None or row["anchor_ms"] is None else row["ours_ms"] / row["anchor_ms"]


def _without_gradients(row: Row) -> float:
    """Peak GiB less the two bf16 gradients that the call returns."""
    t, c, v = row["shape"]
    return float(row["peak_gib"] - 2 * (t + v) * c / 2**30)


def _incremental(found: list[Row]) -> list[Row]:
    """For each case the `share` of the roofline for the bytes that the largest size moves more than the second largest,
    which excludes fixed costs such as launches."""
    sizes: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        if row.get("shape") and row.get("ours_ms") and row["share_of_roofline"]:
            sizes.setdefault((row["op"], *row["shape"][1:]), []).append(row)
    cases = []
    for rows in sizes.values():
        two = sorted(rows, key=lambda row: row["shape"][0])[-2:]
        smaller, larger = two[0], two[-1]  # equal if there is only one size
        if smaller["ours_ms"] < larger["ours_ms"]:
            floor = [row["ours_ms"] * row["share_of_roofline"] for row in (smaller, larger)]
            cases.append({"share": (floor[1] - floor[0]) / (larger["ours_ms"] - smaller["ours_ms"])})
    return cases


def figures(folder: Path) -> list[Row]:
    """The table of a results folder: op, anchor, target, least, most, cases, copy, reached.

    "copy" is torch's copy of the same bytes: its milliseconds, or its smallest and largest share of the roofline.
    """
    lines = []
    rows = _rows(folder, "bench_linear")
    for op, what in (
        ("linear", "forward"),
        ("linear_between", "forward, intermediate row counts"),
        ("linear_dgrad", "input gradient"),
    ):
        for kind, low in (("geometric mean", 0.98), ("smallest", 0.90)):
            found = [row for row in rows if row["op"] == f"{op}: {kind}"]
            lines.append(_line(f"linear, {what}, {kind}", "torch's cuBLAS", f">= {low}x of its speed", found,
                               lambda row: row["ratio"], lambda v, low=low: v >= low))  # fmt: skip

    lines.append(_line("dispatch overhead of a warm call", "", "< 1 us", _rows(folder, "bench_dispatch"),
                       lambda row: row["ours_ms"] * 1e3, lambda v: v < 1.0))  # fmt: skip

    rows = _rows(folder, "bench_attention")
    for op, by, what, anchor, low in (
        ("attention forward", "triton", "attention forward, Triton anchor", "FlashAttention-3", 0.60),
        ("attention forward", "certified", "attention forward, certified schedule", "FlashAttention-3", 0.60),
        ("attention backward", "triton", "attention backward", "cuDNN", 0.55),
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
    for ours, op, high, known, memory in (
        ("rlkernel", "linear_logprob", 0.90, "inputs and gradients", _without_gradients),
        ("rlkernel, main_grad", "linear_logprob, main_grad", 0.90, "inputs and main_grad", lambda row: row["peak_gib"]),
        ("rlkernel, keep_probs", "linear_logprob, keep_probs", 0.72, "", None),
    ):
        for found, how in ((trl, ""), (hot, ", no pause between samples")):
            lines.append(_line(f"{op}, forward + backward{how}", "TRL chunked", f"<= {high}x of its time",
                               [row for row in found if row["ours"] == ours], _time,
                               lambda v, high=high: v <= high))  # fmt: skip
        if memory is not None:
            found = [row for row in trl if row["ours"] == ours]
            lines.append(_line(f"{op}, memory beyond {known}", "", f"<= {MEMORY_GIB} GiB", found, memory,
                               lambda v: v <= MEMORY_GIB))  # fmt: skip

    without = [row for row in against if row["op"].endswith("rows left out") and row["ours"] == "rlkernel"]
    within = [row for row in against if row["anchor"].endswith("rows left out")]
    for what, found in (
        ("linear_logprob with rows, TRL on the same rows", without),
        ("linear_logprob without rows, TRL on the rows of the loss", within),
    ):
        lines.append(_line(what, "TRL chunked", "< 1x of its time", found, _time, lambda v: v < 1.0))

    rows = _rows(folder, "bench_memory_bound")
    for op, high in (("logprob", 0.33), ("logprob fwd+bwd", 0.75)):
        found = [row for row in rows if row["op"] == op]
        lines.append(_line(f"{op}, 4096 x 151936", "HBM", f"<= {high} ms", found,
                           lambda row: row["ours_ms"], lambda v, high=high: v <= high))  # fmt: skip
        lines[-1]["copy"] = ", ".join(f"{row['copy_ms']:.3g} ms" for row in found if row.get("copy_ms"))
    cases = [(op, [row for row in rows if row["op"].split()[0] == op])
             for op in ("rms_norm", "swiglu", "rope", "policy_loss", "adamw", "grad_norm", "embedding")]  # fmt: skip
    # The largest shape has its own line, because small shapes are launch-bound.
    for name in ("policy_loss", "rope", "swiglu", "rms_norm"):
        at, (_, of_op) = next((i, case) for i, case in enumerate(cases) if case[0] == name)
        largest = max((row.get("shape", []) for row in of_op), key=math.prod, default=[])
        at_largest = [row for row in of_op if row.get("shape", []) == largest]
        if len(at_largest) < len(of_op):
            size = " x ".join(map(str, largest)) if len(largest) > 1 else f"{largest[0]:,} tokens"
            cases.insert(at + 1, (f"{name}, {size} (largest shape)", at_largest))
    for name, found in cases:
        lines.append(_line(name, "bytes / 4.3 TB/s", f">= {SHARE} of the roofline", found,
                           lambda row: row["share_of_roofline"], lambda v: v >= SHARE))  # fmt: skip
        copies = [row["copy_share_of_roofline"] for row in found if row.get("copy_share_of_roofline")]
        lines[-1]["copy"] = f"{min(copies):.3g} to {max(copies):.3g}" if copies else ""
        if incremental := _incremental(found):
            lines.append(_line(f"{name}, incremental bytes", "bytes / 4.3 TB/s", f">= {SHARE} of the roofline",
                               incremental, lambda row: row["share"], lambda v: v >= SHARE))  # fmt: skip
    return lines


def speed(folder: Path) -> list[Row]:
    """Six rows for the README, whole steps first: what, against which anchor, and the range of ratios of speed."""
    rollouts = [row for path in sorted(folder.glob("bench_vllm_qwen*_nano.json")) for row in _rows(folder, path.stem)]
    losses = [row for row in _rows(folder, "bench_linear_logprob") if row["op"] == "linear_logprob fwd+bwd"]
    attention = [row for row in _rows(folder, "bench_attention") if row["anchor"] == "FlashAttention-3"]
    found = (
        ("GRPO step of TRL, Qwen3-0.6B shape", "TRL with vLLM", _rows(folder, "bench_trl")),
        ("rollout in vLLM, Qwen3-0.6B and 8B shapes", "vLLM's default kernels",
         [r for r in rollouts if r["ours"] == "rlkernel"]),
        ("linear, forward", "cuBLAS",
         [r for r in _rows(folder, "bench_linear") if r["op"] == "linear: geometric mean"]),
        ("linear_logprob, forward and backward", "TRL, chunked",
         [r for r in losses if r["ours"] == "rlkernel" and r["anchor"].startswith("TRL")]),
        ("attention, prefill", "FlashAttention-3",
         [r for r in attention if r["op"] == "attention forward" and r["ours"].startswith("certified")]),
        ("attention, paged decode", "FlashAttention-3", [r for r in attention if r["op"] == "paged decode"]),
    )  # fmt: skip
    lines = []
    for what, anchor, rows in found:
        ratios = sorted(f"{row['ratio']:.2f}" for row in rows if row["ratio"])
        shown = " to ".join(dict.fromkeys((ratios[0], ratios[-1]))) if ratios else "not measured"
        lines.append({"what": what, "against": anchor, "speed": f"{shown}x" if ratios else shown})
    return lines


def main() -> int:
    """Prints the targets of a folder: the one given, this machine's with --here, else the H200's."""
    root = Path(os.environ.get("RLKERNEL_RESULTS", Path(__file__).resolve().parent / "results"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--here", action="store_true", help="use the folder of this machine's hardware")
    args = parser.parse_args()
    given, folder = args.folder, args.folder or root / "nvidia-h200"
    if args.here and not given:
        sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]
        from results_io import gpu_folder

        from rlkernel.environment import environment

        folder = root / gpu_folder(environment()["hardware"])
        print(f"targets of {folder}")
        if not any((folder / f"{name}.json").exists() for name in FILES):
            print("it has none of the result files that the targets are read from")
            return 0
    if given and not given.is_dir():
        parser.error(f"{folder} is not a folder of results; benchmarks/results has one per GPU")
    for line in figures(folder):
        numbers = " ".join(f"{line[name]:>8}" for name in ("least", "most", "cases"))
        print(f"{line['op']:64} {line['target']:22} {numbers} {line['reached']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
