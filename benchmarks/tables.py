"""Turns the JSON files under `benchmarks/results/` into the tables of README and docs.

A table stands between `<!-- table: GLOB -->` and `<!-- /table -->` in a Markdown file, GLOB relative to
`benchmarks/results`. `--check` writes nothing and fails where a table is not what its files say.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- table: (?P<glob>\S+) -->\n)(?P<body>.*?)(<!-- /table -->)", re.DOTALL)
HIDDEN = {"note"}


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


def table(path: Path) -> str:
    """Markdown of one result file: its rows, then the line that says where they come from."""
    data = json.loads(path.read_text())
    columns: list[str] = []
    for row in data["rows"]:
        columns += [key for key in row if key not in columns and key not in HIDDEN]
    lines = ["| " + " | ".join(c.replace("_", " ") for c in columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(c)) for c in columns) + " |" for row in data["rows"]]
    version = ", ".join(f"{name} {number}" for name, number in data["versions"].items() if name in ("torch", "triton"))
    lines.append("")
    lines.append(
        f"{data['hardware']}, {version}, contract {data['contract']}, kernel_sha `{data['kernel_sha']}`, "
        f"{data['date'][:10]}: `{data['command']}` "
        f"from `{path.relative_to(ROOT).as_posix()}`"
    )
    return "\n".join(lines) + "\n"


def render(text: str) -> str:
    """The Markdown text with every table block filled from its result files."""

    def fill(match: re.Match[str]) -> str:
        files = sorted(RESULTS.glob(match["glob"]))
        body = "\n".join(table(f) for f in files) if files else "No result has been recorded yet.\n"
        return f"{match[1]}{body}{match[4]}"

    return BLOCK.sub(fill, text)


def main() -> int:
    """Fills (or with --check compares) the tables of README.md and docs/**/*.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a table is out of date")
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
