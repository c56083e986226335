"""Performance targets on an NVIDIA H200, compared with the result files; as a script, prints them for a folder.

A ratio of times is ours over the baseline's; a share is the roofline's time over ours. "cases" counts the cases that
reach the target, and "reached" is yes if all do. A line has no numbers if its result file is missing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
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


Target = tuple[str, Callable[[float], bool]]


def at_least(low: float, unit: str) -> Target:
    return f">= {low}{unit}", lambda value: value >= low


def at_most(high: float, unit: str) -> Target:
    return f"<= {high}{unit}", lambda value: value <= high


def below(high: float, unit: str) -> Target:
    return f"< {high}{unit}", lambda value: value < high


def _line(op: str, baseline: str, target: Target, found: list[Row], value: Callable[[Row], float | None]) -> Row:
    """One line of the table, from the rows of its cases. A case without a value does not reach the target."""
    text, good = target
    values = [value(row) for row in found]
    present = [v for v in values if v is not None]
    enough = [v is not None and good(v) for v in values]

    def shown(v: float) -> str:
        """At least three digits, and more if rounding would move the value to the other side of the target."""
        return next(digits for n in range(3, 18) if good(float(digits := f"{v:.{n}g}")) == good(v))

    return {
        "op": op,
        "baseline": baseline,
        "target": text,
        "least": shown(min(present)) if present else "",
        "most": shown(max(present)) if present else "",
        "cases": f"{sum(enough)}/{len(values)}" if values else "",
        "copy": "",
        "reached": ("yes" if all(enough) else "no") if values else "",
    }


def _ratio(row: Row) -> float | None:
    return row["ratio"]  # type: ignore[no-any-return]


def _time(row: Row) -> float | None:
    """Our time over the baseline's."""
    return None if row["ours_ms"] is None or row["baseline_ms"] is None else row["ours_ms"] / row["baseline_ms"]


def _without_gradients(row: Row) -> float:
    """Peak GiB less the two bf16 gradients that the call returns."""
    t, c, v = row["shape"]
    return float(row["peak_gib"] - 2 * (t + v) * c / 2**30)


def _linear(rows: list[Row]) -> Iterator[Row]:
    for op, what in (
        ("linear", "forward"),
        ("linear_between", "forward, intermediate row counts"),
        ("linear_dgrad", "input gradient"),
    ):
        for kind, low in (("geometric mean", 0.98), ("smallest", 0.9)):
            found = [row for row in rows if row["op"] == f"{op}: {kind}"]
            yield _line(f"linear, {what}, {kind}", "torch's cuBLAS", at_least(low, "x of its speed"), found, _ratio)


def _attention(rows: list[Row]) -> Iterator[Row]:
    for op, by, what, baseline, low in (
        ("attention forward", "triton", "attention forward, Triton anchor", "FlashAttention-3", 0.6),
        ("attention forward", "certified", "attention forward, certified schedule", "FlashAttention-3", 0.6),
        ("attention backward", "triton", "attention backward", "cuDNN", 0.55),
        ("paged decode", "triton", "paged decode", "FlashAttention-3", 0.9),
    ):
        found = [row for row in rows if row["op"] == op and row["ours"].split(":")[0] == by]
        found = [row for row in found if row["baseline"] in (baseline, None)]
        yield _line(what, baseline, at_least(low, "x of its speed"), found, _ratio)


def _linear_logprob(rows: list[Row]) -> Iterator[Row]:
    rows = [r for r in rows if r["op"].startswith("linear_logprob fwd+bwd") and r["baseline"].startswith("TRL")]
    of = lambda op, ours: [r for r in rows if r["op"] == f"linear_logprob fwd+bwd{op}" and r["ours"] == ours]
    for ours, op, high, known, memory in (
        ("rlkernel", "linear_logprob", 0.9, "inputs and gradients", _without_gradients),
        ("rlkernel, main_grad", "linear_logprob, main_grad", 0.9, "inputs and main_grad", lambda row: row["peak_gib"]),
        ("rlkernel, keep_probs", "linear_logprob, keep_probs", 0.72, "", None),
    ):
        for suffix, how in (("", ""), (", without rest", ", no pause between samples")):
            name = f"{op}, forward + backward{how}"
            yield _line(name, "TRL chunked", at_most(high, "x of its time"), of(suffix, ours), _time)
        if memory is not None:
            yield _line(f"{op}, memory beyond {known}", "", at_most(MEMORY_GIB, " GiB"), of("", ours), memory)
    for what, found in (
        ("with rows, TRL on the same rows",
         [r for r in rows if r["op"].endswith("rows left out") and r["ours"] == "rlkernel"]),
        ("without rows, TRL on the rows of the loss", [r for r in rows if r["baseline"].endswith("rows left out")]),
    ):  # fmt: skip
        yield _line(f"linear_logprob {what}", "TRL chunked", below(1, "x of its time"), found, _time)


def _memory_bound(rows: list[Row]) -> Iterator[Row]:
    for op, high in (("logprob", 0.33), ("logprob fwd+bwd", 0.75)):
        found = [row for row in rows if row["op"] == op]
        copy = ", ".join(f"{row['copy_ms']:.3g} ms" for row in found if row.get("copy_ms"))
        yield _line(f"{op}, 4096 x 151936", "HBM", at_most(high, " ms"), found, lambda r: r["ours_ms"]) | {"copy": copy}
    roofline = "bytes / 4.3 TB/s", at_least(SHARE, " of the roofline")
    for name in ("rms_norm", "swiglu", "rope", "policy_loss", "adamw", "grad_norm", "embedding"):
        cases = {name: [row for row in rows if row["op"].split()[0] == name]}
        # The largest shape has its own line, because small shapes are launch-bound.
        largest = max((row.get("shape", []) for row in cases[name]), key=math.prod, default=[])
        at_largest = [row for row in cases[name] if row.get("shape", []) == largest]
        if name in ("policy_loss", "rope", "swiglu", "rms_norm") and len(at_largest) < len(cases[name]):
            size = " x ".join(map(str, largest)) if len(largest) > 1 else f"{largest[0]:,} tokens"
            cases[f"{name}, {size} (largest shape)"] = at_largest
        for what, found in cases.items():
            shares = [row["copy_share_of_roofline"] for row in found if row.get("copy_share_of_roofline")]
            copy = f"{min(shares):.3g} to {max(shares):.3g}" if shares else ""
            yield _line(what, *roofline, found, lambda row: row["share_of_roofline"]) | {"copy": copy}
            if incremental := _incremental(found):
                yield _line(f"{what}, incremental bytes", *roofline, incremental, lambda row: row["share"])


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
    """The table of a results folder: op, baseline, target, least, most, cases, copy, reached.

    "copy" is torch's copy of the same bytes: its milliseconds, or its smallest and largest share of the roofline.
    """
    of = {name: _rows(folder, name) for name in FILES}
    dispatch = _line("dispatch overhead of a warm call", "", below(1, " us"), of["bench_dispatch"],
                     lambda row: row["ours_ms"] * 1e3)  # fmt: skip
    return [
        *_linear(of["bench_linear"]),
        dispatch,
        *_attention(of["bench_attention"]),
        *_linear_logprob(of["bench_linear_logprob"]),
        *_memory_bound(of["bench_memory_bound"]),
    ]


def speed(folder: Path) -> list[Row]:
    """Rows for the README, whole steps first: what, against which baseline, and the range of ratios of speed."""
    rollouts = [row for path in sorted(folder.glob("bench_vllm_qwen*_nano.json")) for row in _rows(folder, path.stem)]
    losses = [row for row in _rows(folder, "bench_linear_logprob") if row["op"] == "linear_logprob fwd+bwd"]
    attention = [row for row in _rows(folder, "bench_attention") if row["baseline"] == "FlashAttention-3"]
    found = (
        ("GRPO step of `rlkernel train`, Qwen3-0.6B shape", "TRL with vLLM", _rows(folder, "bench_grpo_8x8x1024")),
        ("GRPO step of TRL, Qwen3-0.6B shape", "TRL with vLLM", _rows(folder, "bench_trl")),
        ("rollout in vLLM, Qwen3-0.6B and 8B shapes", "vLLM's default kernels",
         [r for r in rollouts if r["ours"] == "rlkernel"]),
        ("linear, forward", "cuBLAS",
         [r for r in _rows(folder, "bench_linear") if r["op"] == "linear: geometric mean"]),
        ("linear_logprob, forward and backward", "TRL, chunked",
         [r for r in losses if r["ours"] == "rlkernel" and r["baseline"].startswith("TRL")]),
        ("attention, prefill", "FlashAttention-3",
         [r for r in attention if r["op"] == "attention forward" and r["ours"].startswith("certified")]),
        ("attention, paged decode", "FlashAttention-3", [r for r in attention if r["op"] == "paged decode"]),
    )  # fmt: skip
    lines = []
    for what, baseline, rows in found:
        ratios = sorted(f"{row['ratio']:.2f}" for row in rows if row["ratio"])
        shown = " to ".join(dict.fromkeys((ratios[0], ratios[-1]))) if ratios else "not measured"
        lines.append({"what": what, "against": baseline, "speed": f"{shown}x" if ratios else shown})
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
