"""Turns the JSON files under `benchmarks/results/` into the tables of README and docs.

A table stands between `<!-- table: GLOB STYLE -->` and `<!-- /table -->`, with GLOB relative to `benchmarks/results`.
Without a style it has the rows of the files. `steps` has one line per training step, in seconds; `wide` has one line
per case and one column per implementation; `kernels` one line per kernel and one column per target; `sums` one line for
all tests and one per kind of control; `stack=NAME` one line per feature of that stack and one column per run; `matrix`
one line per size of the rollout and one column per trainer.
`FOLDER/figures` holds the targets and `FOLDER/speed` the README's rows (`figures.py`); the other styles are in
`rlkernel_drift.power_tables`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "consistency")]

from figures import FILES, figures, speed
from results_io import has_current_kernels

from rlkernel_drift import power_tables as power

RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(
    r"(?P<head><!-- table: (?P<glob>\S+)"
    r"(?: (?P<style>wide|steps|kernels|sums|matrix|stack=\w+|kinds|confusion|depths|sentence|source))? -->\n)"
    r"(?P<body>.*?)"
    r"(?P<tail><!-- /table -->)",
    re.DOTALL,
)
HIDDEN = {"note", "curves"}


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return " x ".join(str(v) for v in value)
    return str(value).replace("|", "\\|")


def _markdown(columns: list[str], lines: list[list[Any]]) -> list[str]:
    head = [
        "| " + " | ".join(c if c.startswith("sm_") else c.replace("_", " ") for c in columns) + " |",
        "|" + " --- |" * len(columns),
    ]
    return head + ["| " + " | ".join(map(_cell, line)) + " |" for line in lines]


def _made_with(data: dict[str, Any]) -> str:
    """Machine, versions, commit (and whether kernels have changed since) and date of a result."""
    version = ", ".join(f"{name} {number}" for name, number in data["versions"].items() if name in ("torch", "triton"))
    commit = f"commit `{data['commit'][:7]}`" if data.get("commit") else "unknown commit"
    older = "" if has_current_kernels(data.get("commit")) else " (older kernels)"
    return f"{data['hardware']}, {version}, contract {data['contract']}, {commit}{older}, {data['date'][:10]}"


def _source(data: dict[str, Any], path: Path) -> list[str]:
    """Lines below a table: what was left out, and where the figures come from."""
    notes = [f"Left out: {'; '.join(data['notes'])}.", ""] if data.get("notes") else []
    if data.get("not_launched"):
        notes += [f"Not passed; never launched: {', '.join(data['not_launched'])}.", ""]
    elif data.get("passed") is False:
        notes += ["Not passed: a tool found an error in a call or gave no verdict on it.", ""]
    return ["", *notes, f"{_made_with(data)}: `{data['command']}` from `{path.relative_to(ROOT).as_posix()}`"]


def table(path: Path) -> str:
    """Markdown of one result file: its rows, then their source."""
    data = json.loads(path.read_text())
    columns: list[str] = []
    for row in data["rows"]:
        columns += [key for key in row if key not in columns and key not in HIDDEN]
    lines = _markdown(columns, [[row.get(c) for c in columns] for row in data["rows"]])
    return "\n".join(lines + _source(data, path)) + "\n"


def wide(path: Path) -> str:
    """One line per case (op and shape): milliseconds and GiB of each implementation, or why there are none."""
    data = json.loads(path.read_text())
    cases: dict[tuple[str, str], dict[str, str]] = {}
    for row in data["rows"]:
        cells = cases.setdefault((row["op"], _cell(row["shape"])), {})
        for side, peak in (("ours", "peak_gib"), ("baseline", "baseline_peak_gib")):
            ms, gib = row[f"{side}_ms"], row[peak]
            memory = "" if gib is None else f", {gib:.2f} GiB"
            found = "out of memory" if ms is None and "out of memory" in (row["note"] or "") else f"{_cell(ms)}{memory}"
            if row[side]:
                cells.setdefault(row[side], found)
    names = list(dict.fromkeys(name for cells in cases.values() for name in cells))
    lines = [[*case, *(cells.get(name) for name in names)] for case, cells in cases.items()]
    columns = ["op", "shape", *(f"{name}, ms" for name in names)]
    return "\n".join(_markdown(columns, lines) + _source(data, path)) + "\n"


def steps(paths: list[Path]) -> str:
    """One line per record of `bench_grpo`: seconds of a step and of our phases, and peak GiB."""
    sides = {"ours": "ours_ms", "TRL": "baseline_ms"}
    phases = {name: f"ours_{name}_ms" for name in ("rollout", "score", "forward", "backward", "optimizer")}
    lines = []
    made: dict[str, list[str]] = {}
    for path in paths:
        data = json.loads(path.read_text())
        made.setdefault(_made_with(data), []).append(f"`{path.stem}`")
        for row in data["rows"]:
            seconds = [None if row[key] is None else row[key] / 1e3 for key in (*sides.values(), *phases.values())]
            memory = (row["peak_gib"], row["baseline_peak_gib"])
            lines.append([row["op"], row["shape"], *seconds, *memory, row["rounds"], row["note"]])
    columns = ["step", "prompts x group x tokens", *(f"{name}, s" for name in (*sides, *phases))]
    sources = [line for how, names in made.items() for line in ("", f"{how}: {', '.join(names)}")]
    return "\n".join(_markdown([*columns, "GiB", "TRL, GiB", "rounds", "note"], lines) + sources) + "\n"


def kernels(path: Path) -> str:
    """One line per kernel, one column per target: registers per thread, shared memory per block, spills."""
    data = json.loads(path.read_text())
    found: dict[str, dict[str, str]] = {}
    for row in data["rows"]:
        name = f"{row['kernel']}{' (main)' if row['main'] else ''}"
        spilled = row["stack"] or row["spill_stores"] or row["spill_loads"]
        found.setdefault(name, {})[row["target"]] = (
            f"{row['registers']} r, {row['shared'] / 1024:.3g} KiB"
            + (f", {', '.join(row['matrix'])}" if row["matrix"] else "")
            + (f", **spills: stack {row['stack']}, {row['spill_stores']} stores**" if spilled else "")
        )
    targets = list(dict.fromkeys(row["target"] for row in data["rows"]))
    lines = [[name, *(cells.get(target) for target in targets)] for name, cells in found.items()]
    return "\n".join(_markdown(["kernel", *targets], lines) + _source(data, path)) + "\n"


INTERRUPTED = 2  # exit status of pytest
SKIPPED = re.compile(r"^.*?::\w+(?:\[.*\])?: ")
"""The test's name before the reason for skipping it."""
COUNTED = "Other numbers are not counted by token, such as weight gradients."


def sums(path: Path) -> str:
    """Sums over a GPU test run: what was compared under the contract, and the controls that had to differ.

    The controls are stock ops, and wrong schedules at the first comparison in which certification saw a difference.
    """
    data = json.loads(path.read_text())
    kinds: dict[str, list[Any]] = {"rlkernel": [], "control: stock ops": [], "control: wrong schedules, refused": []}
    for row in data["rows"]:
        kind = 2 if row.get("refused") else 1 if "control" in row["test"] else 0
        kinds[list(kinds)[kind]].append(row)
    names = {"cases": "cases", "tokens": "tokens", "elements": "other numbers", "mismatches": "differing"}
    lines = []
    for kind_name, rows in kinds.items():
        if rows:
            worst = max((row["max_abs_diff"] for row in rows if "max_abs_diff" in row), default=None)
            lines.append([kind_name, len(rows), *(sum(row.get(name, 0) for row in rows) for name in names), worst])
    columns = ["log-probabilities and op results of", "tests", *names.values(), "max abs diff"]
    run = data["pytest"]
    failed = run["failures"] + run["errors"]
    interrupted = data.get("exit_status") == INTERRUPTED
    which = ", ".join(dict.fromkeys(entry.rpartition("::")[2].split("[")[0] for entry in data.get("failed", [])))
    reasons = "; ".join(dict.fromkeys(SKIPPED.sub("", entry).split(",")[0] for entry in data.get("skipped", [])))
    result = (
        f"{run['tests'] - failed - run['skipped']} tests passed, {failed} failed{which and f' ({which})'}, "
        f"{run['skipped']} skipped{f' ({reasons})' if reasons else ''}{', interrupted' if interrupted else ''}."
    )
    return "\n".join([*_markdown(columns, lines), "", COUNTED, "", f"{result} {_made_with(data)}"]) + "\n"


PAIR = re.compile(r"tensor_parallel_size (\d) against (.*), tp_leaves=8")


def matrix(path: Path) -> str:
    """Differing of compared log-probabilities: tensor-parallel rollouts against trainers on several ranks."""
    data = json.loads(path.read_text())
    cells: dict[str, dict[str, str]] = {}
    for row in data["rows"]:
        if pair := PAIR.fullmatch(row["feature"]):
            rollout, trainer = pair.groups()
            cells.setdefault(rollout, {})[trainer] = f"{row['differing']:,} of {row['numbers']:,}"
    trainers = list(next(iter(cells.values())))
    lines = [[rollout, *(found[name] for name in trainers)] for rollout, found in cells.items()]
    return "\n".join(_markdown(["tensor_parallel_size", *trainers], lines) + _source(data, path)) + "\n"


VERDICTS = ("exact", "close", "reported", "refused", "differs")


def compatibility(paths: list[Path], stack: str) -> str:
    """One line per feature of the stack, one column per test run: the verdict, and "differing of compared numbers"."""
    cells: dict[str, dict[str, str]] = {}
    order: dict[str, tuple[int, str]] = {}
    sources: list[str] = []
    columns: list[str] = []
    runs = [(path, json.loads(path.read_text())) for path in paths]
    version_of = lambda data: data["versions"].get(stack.lower(), "")
    for path, data in sorted(runs, key=lambda run: (run[1]["driver"] is not None, version_of(run[1]))):
        rows = [row for row in data["rows"] if row["stack"] == stack]
        if not rows:
            continue
        version = version_of(data)
        columns.append(f"{stack} {version}, {'CPU' if data['driver'] is None else data['hardware']}")
        sources += _source(data, path)
        for row in rows:
            verdict, feature = row["verdict"], row["feature"]
            counts = f", {row['differing']:,} of {row['numbers']:,}" if "numbers" in row else ""
            cells.setdefault(feature, {})[columns[-1]] = verdict + counts
            order.setdefault(feature, (VERDICTS.index(verdict), row["tests"][0]))
    names = sorted(cells, key=lambda feature: (*order[feature], feature))
    lines = [[name, *(cells[name].get(column, "not tested") for column in columns)] for name in names]
    if not lines:
        return "No result has been recorded yet.\n"
    return "\n".join(_markdown([stack, *columns], lines) + sources) + "\n"


def reach(folder: Path) -> str:
    """The measured targets of a results folder, then commit and date of each file that they were read from."""
    columns = ["op", "baseline", "target", "least", "most", "cases", "copy", "reached"]
    cells = [[line[c] for c in columns] for line in figures(folder) if line["least"]]
    made: dict[str, list[str]] = {}
    for path in (folder / f"{name}.json" for name in FILES):
        if path.exists():
            made.setdefault(_made_with(json.loads(path.read_text())), []).append(f"`{path.stem}`")
    sources = [line for how, names in made.items() for line in ("", f"{how}: {', '.join(names)}")]
    return "\n".join(_markdown(columns, cells) + sources) + "\n" if cells else "No result has been recorded yet.\n"


def render(text: str) -> str:
    """The Markdown text with every table block filled from its result files."""

    def fill(match: re.Match[str]) -> str:
        glob = match["glob"]
        if glob.endswith("/figures"):
            body = reach(RESULTS / glob.removesuffix("/figures"))
        elif glob.endswith("/speed"):
            columns = ["what", "against", "speed"]
            cells = [[line[c] for c in columns] for line in speed(RESULTS / glob.removesuffix("/speed"))]
            body = "\n".join(_markdown(columns, cells)) + "\n"
        elif (match["style"] or "").startswith("stack="):
            body = compatibility(sorted(RESULTS.glob(glob)), match["style"].removeprefix("stack="))
        elif match["style"] == "steps" and (records := sorted(RESULTS.glob(glob))):
            body = steps(records)
        else:
            if match["style"] in power.TABLES:
                make = lambda path: power.TABLES[match["style"]](json.loads(path.read_text()))
            else:
                make = {"wide": wide, "kernels": kernels, "sums": sums, "matrix": matrix}.get(match["style"], table)
            body = "\n".join(map(make, sorted(RESULTS.glob(glob)))) or "No result has been recorded yet.\n"
        return f"{match['head']}{body}{match['tail']}"

    return BLOCK.sub(fill, text)


def main() -> int:
    """Fills the tables of README.md and docs/**/*.md, or with --check compares them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a table is out of date")
    args = parser.parse_args()
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text()
        filled = render(text)
        if filled != text:
            stale.append(path.relative_to(ROOT).as_posix())
            if not args.check:
                path.write_text(filled)
    for name in stale:
        print(f"{'out of date' if args.check else 'written'}: {name}")
    if args.check and stale:
        print("run `make docs` and commit the result")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
