"""Runs `tests/gpu` on this machine's GPU and writes `benchmarks/results/<gpu>/test_gpu.json` with what was compared.

`integrations.json` in the same folder has the rows of the compatibility tables.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SUMMED = ("cases", "tokens", "elements", "mismatches")
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]


def _by_function(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sums rows of each parametrised test: cases, tokens, elements, mismatches. Other fields: "several" if they
    differ."""
    merged: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda r: r["test"]):
        name = row["test"].split("[", 1)[0]
        others = {key: value for key, value in row.items() if key not in ("test", *SUMMED)}
        total = merged.setdefault(name, {"test": name, **dict.fromkeys(SUMMED, 0), **others})
        for key in SUMMED:
            total[key] += row.get(key, 0)
        if not row.get("refused"):
            total["max_abs_diff"] = max(total.get("max_abs_diff", 0.0), row.get("max_abs_diff", 0.0))
        for key in set(total) - {"test", "max_abs_diff", *SUMMED}:
            if row.get(key) != total[key]:
                total[key] = "several"
    return list(merged.values())


def names(report: Path) -> dict[str, list[str]]:
    """Names of failed and skipped tests in pytest's report, the latter with their reasons."""
    import xml.etree.ElementTree as ElementTree

    found: dict[str, list[str]] = {"failed": [], "skipped": []}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            found["failed"].append(name)
        elif (skipped := case.find("skipped")) is not None:
            found["skipped"].append(f"{name}: {skipped.get('message', '')}")
    return {key: sorted(set(tests)) for key, tests in found.items()}


def main() -> int:
    """Exit status of pytest; 1 without a GPU, because a run that compares nothing is never a pass."""
    parser = argparse.ArgumentParser(description=__doc__, epilog="All other arguments go to pytest.")
    _, given = parser.parse_known_args()
    import torch
    from results_io import own_cache, write_result
    from test_integrations import versions

    if not torch.cuda.is_available():
        print("test-gpu: torch sees no CUDA GPU; run it on a machine that has one")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        rows_file, report = Path(folder) / "rows.json", Path(folder) / "report.xml"
        stacks = Path(folder) / "integrations.json"
        status = subprocess.run(
            [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", f"--junitxml={report}", *given],
            cwd=ROOT,
            env={
                **os.environ,
                **own_cache("test-gpu"),
                "RLKERNEL_RECORD": str(rows_file),
                "RLKERNEL_COMPATIBILITY": str(stacks),
                "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            },
        ).returncode
        rows = [row for file in sorted(Path(folder).glob("rows.json*")) for row in json.loads(file.read_text())]
        rows = _by_function(rows)
        found = json.loads(stacks.read_text()) if stacks.exists() else []
        import xml.etree.ElementTree as ElementTree

        suite = ElementTree.parse(report).getroot().find("testsuite") if report.exists() else None
        counts = (
            {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
            if suite is not None
            else {}
        )
        more = names(report) if report.exists() else {}
    path = write_result("test_gpu", rows, pytest=counts, **more, exit_status=status)
    print(f"wrote {path}")
    if found:
        print(f"wrote {write_result('integrations', found, versions=versions())}")
    return status


if __name__ == "__main__":
    sys.exit(main())
