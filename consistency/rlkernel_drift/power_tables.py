"""The result file of `power` as Markdown: what was named, the confusion of causes, operators by depth, a sentence.

Works on the JSON alone, without torch, so that the documentation can be made anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _markdown(columns: list[str], lines: list[list[str]], numbers: int) -> str:
    """A table; the last `numbers` columns are set to the right."""
    rule = ["---"] * (len(columns) - numbers) + ["--:"] * numbers
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, rule, *lines)) + "\n"


def kinds(result: dict[str, Any]) -> str:
    """One line per kind of fault: cases above the floor, named correctly, called aligned, and what else was named."""
    columns = ["fault", "group", "named otherwise", "above the floor", "named right", "called aligned"]
    lines = []
    for row in result["by_kind"]:
        other = ", ".join(f"{name} ({count})" for name, count in row["otherwise"].items())
        above = f"{row['above_floor']} of {row['cases']}"
        lines.append([row["kind"], row["group"], other, above, str(row["named_right"]), str(row["called_aligned"])])
    return _markdown(columns, lines, 3)


def confusion(result: dict[str, Any]) -> str:
    """The causes named for each planted kind, of the cases above the floor and the healthy pairs."""
    named = lambda counts: ", ".join(f"{name} ({count})" for name, count in counts.items())
    return _markdown(["planted", "named"], [[kind, named(counts)] for kind, counts in result["confusion"].items()], 0)


def depths(result: dict[str, Any]) -> str:
    """Faulty operators by layer, "named right of cases above the floor", and the range of their sizes."""
    layers = sorted(
        {name for row in result["operators"] for name in row["layers"]}, key=lambda name: (name == "", name)
    )
    lines = []
    for row in result["operators"]:
        counts = [row["layers"].get(layer, [0, 0]) for layer in layers]
        band = "{:.3g} to {:.3g}".format(*row["sizes"]) if row["sizes"] else ""
        lines.append([row["kind"], band, *(f"{right} of {above}" if above else "" for right, above in counts)])
    columns = ["fault", "size", *(f"layer {layer}" if layer else "after the layers" for layer in layers)]
    return _markdown(columns, lines, len(layers))


def sentence(result: dict[str, Any]) -> str:
    """The figures of the matrix in words."""
    above, right = result["above_floor"], result["named_right"]
    return (
        f"{result['kinds']} kinds of planted faults, {result['families']} model families, {result['seeds']} seeds: of "
        f"{above:,} faults above the noise floor {right:,} were named correctly ({right / above:.1%}) and "
        f"{result['called_aligned_above_floor']} were called aligned; of {result['below_floor']} below it "
        f"{result['below_floor_named_right']} were named correctly. "
        f"{result['false_alarms']} of {result['healthy']} healthy pairs raised an alarm.\n"
    )


def source(result: dict[str, Any]) -> str:
    """Where the figures come from."""
    seconds = result["cpu_seconds"] / (result["cases"] + result["healthy"])
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in ("torch", "transformers"))
    code = ", ".join(f"`{name}`" for name in result["code"])
    hardware = " ".join(str(value) for value in result["hardware"].values())
    return (
        f"{hardware}, {versions}, {result['date'][:10]}, hash of the analyser's modules {code}, "
        f"{seconds:.2g} s of CPU time per case in the first process: `{result['command']}`\n"
    )


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "kinds": kinds,
    "confusion": confusion,
    "depths": depths,
    "sentence": sentence,
    "source": source,
}
