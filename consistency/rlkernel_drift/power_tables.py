"""Markdown tables of the result file of `power`: kinds, confusion of causes, operators by depth, a sentence.

Needs only the JSON and not torch, so that the documentation can be built anywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

_SIZES = ("factor", "size", "epsilon")
_ANOTHER = "another operator"


def _markdown(columns: list[str], lines: list[list[str]], numbers: int) -> str:
    """A table whose last `numbers` columns are aligned right."""
    rule = ["---"] * (len(columns) - numbers) + ["--:"] * numbers
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, rule, *lines)) + "\n"


def kinds(result: dict[str, Any]) -> str:
    """One line per kind of fault: cases above the floor, named rightly, called aligned, and other named causes."""
    columns = ["fault", "group", "named otherwise", "above the floor", "named right", "called aligned"]
    lines = []
    for row in result["by_kind"]:
        other = ", ".join(f"{name} ({count})" for name, count in row["otherwise"].items())
        above = f"{row['above_floor']} of {row['cases']}"
        lines.append([row["kind"], row["group"], other, above, str(row["named_right"]), str(row["called_aligned"])])
    return _markdown(columns, lines, 3)


def confusion(result: dict[str, Any]) -> str:
    """Planted kinds against named causes, for the cases above the floor and the healthy pairs."""
    counts: dict[str, Counter[str]] = {}
    for row in result["rows"]:
        if row["above"] or row["group"] == "healthy":
            counts.setdefault(row["kind"], Counter())[_named(row)] += 1
    names = list(dict.fromkeys(name for found in counts.values() for name in found))
    columns = ["planted", *(str(i) for i, _ in enumerate(names, 1))]
    lines = [[kind, *(str(found[n]) if found[n] else "" for n in names)] for kind, found in counts.items()]
    legend = ", ".join(f"{i} {name}" for i, name in enumerate(names, 1))
    return f"Named: {legend}.\n\n" + _markdown(columns, lines, len(names))


def _named(row: dict[str, Any]) -> str:
    """The cause in the verdict; a wrong operator counts as a cause of its own."""
    wrong = row["named"] == "operator" and not row["right"]
    return _ANOTHER if wrong else str(row["named"])


def depths(result: dict[str, Any]) -> str:
    """Faulty operators by layer, "named right of cases above the floor", and the range of their sizes."""
    rows = [row for row in result["rows"] if row["group"] == "operators"]
    layers = sorted({_layer(row) for row in rows}, key=lambda name: (name == "", name))
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mine = [row for row in rows if row["kind"] == kind]
        sizes = [row["planted"][key] for row in mine for key in _SIZES if key in row["planted"]]
        above = [row for row in mine if row["above"]]
        cells = []
        for layer in layers:
            here = [row for row in above if _layer(row) == layer]
            cells.append(f"{sum(row['right'] for row in here)} of {len(here)}" if here else "")
        band = f"{min(sizes):.3g} to {max(sizes):.3g}" if sizes else ""
        lines.append([kind, band, *cells])
    columns = ["fault", "size", *(f"layer {layer}" if layer else "behind the layers" for layer in layers)]
    return _markdown(columns, lines, len(layers))


def _layer(row: dict[str, Any]) -> str:
    parts = str(row["planted"]["operator"]).split(".")
    return parts[1] if len(parts) == 3 else ""


def sentence(result: dict[str, Any]) -> str:
    """The totals of the matrix as a sentence."""
    families, seeds = len({row["family"] for row in result["rows"]}), len({r["seed"] for r in _faults(result)})
    above, right = result["above_floor"], result["named_right"]
    return (
        f"{result['kinds']} kinds of planted faults, {families} model families, {seeds} seeds: of {above:,} above the "
        f"noise floor {right:,} were named rightly ({right / above:.1%}) and {result['called_aligned_above_floor']} "
        f"called aligned; of {result['below_floor']} below it {result['below_floor_named_right']} were named rightly. "
        f"{result['false_alarms']} of {result['healthy']} healthy pairs raised an alarm.\n"
    )


def source(result: dict[str, Any]) -> str:
    """The hardware, versions and command of the figures."""
    seconds = result["cpu_seconds"] / len(result["rows"])
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in ("torch", "transformers"))
    groups = {name: dict.fromkeys(r["group"] for r in result["rows"] if r["code"] == name) for name in result["code"]}
    several = len(groups) > 1
    code = ", ".join(f"`{name}`" + (f" ({', '.join(of)})" if several else "") for name, of in groups.items())
    hardware = " ".join(str(value) for value in result["hardware"].values())
    return (
        f"{hardware}, {versions}, {result['date'][:10]}, hash of the analyser's modules {code}, "
        f"{seconds:.2g} s of CPU time a case: `{result['command']}`\n"
    )


def _faults(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["group"] != "healthy"]


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "kinds": kinds,
    "confusion": confusion,
    "depths": depths,
    "sentence": sentence,
    "source": source,
}
