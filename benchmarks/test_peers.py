"""Runs other projects' own tests without and with rlkernel, and records the tests that pass only without it.

`python benchmarks/test_peers.py` runs transformers' common tests of models without and with `apply`, and writes
`benchmarks/results/cpu/peers-transformers.json`. `--trl FOLDER` runs TRL's tests of its trainers in a checkout of TRL
without and with the flag, and writes `peers-trl.json`. Nothing is written if a listed test has no reason.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
SUITES = ROOT / "tests" / "integrations" / "peers"
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(SUITES)]

Outcomes = dict[str, tuple[str, str]]


def outcomes(report: Path) -> Outcomes:
    """Outcome and message of each test in pytest's report, by class and name."""
    found: Outcomes = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{(case.get('classname') or '').rpartition('.')[2]}::{case.get('name')}"
        found[name] = ("passed", "")
        for kind, tag in (("skipped", "skipped"), ("failed", "error"), ("failed", "failure")):
            if (entry := case.find(tag)) is not None:
                found[name] = (kind, entry.get("message") or "")
    return found


def rows(suite: str, stock: Outcomes, ours: Outcomes, reason: Callable[[str], str]) -> list[dict[str, Any]]:
    """One row for the tests that pass in both, then one row per reason why others do not.

    Raises:
        SystemExit: a test fails only with rlkernel, and its message matches no known reason.
    """
    passed = sorted(name for name, (outcome, _) in stock.items() if outcome == "passed")
    alone: dict[str, list[str]] = {}
    unknown = []
    for name in passed:
        outcome, message = ours.get(name, ("failed", "it was not run"))
        if outcome != "passed":
            try:
                alone.setdefault(reason(f"{name}: {message}"), []).append(name)
            except KeyError:
                unknown.append(f"{name}: {message[:300]}")
    if unknown:
        raise SystemExit(
            "\n".join(["nothing written; tests that pass only without rlkernel, for no known reason:", *unknown])
        )
    both = len(passed) - sum(map(len, alone.values()))
    total = f"pass in both, of {len(passed):,} that pass in stock"
    found: list[dict[str, Any]] = [{"suite": suite, "tests": total, "number": both, "reason": ""}]
    for why, names in sorted(alone.items()):
        short = dict.fromkeys(name.partition("::")[2].partition("[")[0] for name in names)
        listed = ", ".join(f"`{name}`" for name in short)
        found.append({"suite": suite, "tests": listed, "number": len(names), "reason": why, "note": names})
    return found


def run(mode: str, report: Path, folder: Path, arguments: list[str]) -> Outcomes:
    """Outcomes of pytest, run in a folder with RLKERNEL_PEERS set to the mode.

    Raises:
        SystemExit: pytest did not run the tests.
    """
    paths = [str(SUITES), str(ROOT), str(ROOT / "consistency"), str(ROOT / "integrations")]
    path = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    done = subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env={**os.environ, "RLKERNEL_TEST_INTEGRATIONS": "1", "RLKERNEL_PEERS": mode, "PYTHONPATH": path},
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"nothing written; pytest {' '.join(arguments)} ended with {done.returncode}")
    return outcomes(report)


def main() -> int:
    """Writes the record; exits with 1 if a test fails for no known reason."""
    import hf_suite
    import trl_suite
    from results_io import write_result
    from test_integrations import versions

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl", type=Path, help="a checkout of TRL; run its tests instead of transformers'")
    args, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        here = Path(temporary)
        if args.trl is None:
            name, reason, ours = "transformers", hf_suite.reason, "record"
            suites = {"transformers: common tests of models": str(SUITES / "test_peers_hf.py")}
        else:
            name, reason, ours = "trl", trl_suite.reason, "strict"
            suites = {
                f"TRL: {kind}": f"tests/test_{kind.lower()}_trainer.py" for kind in ("GRPO", "RLOO", "DPO", "SFT")
            }
            options = ["-p", "trl_suite", *options]
        table = []
        for suite, tests in suites.items():
            both = [run(mode, here / f"{mode}.xml", args.trl or ROOT, [*options, tests]) for mode in ("stock", ours)]
            table += rows(suite, *both, reason)
    print(f"wrote {write_result(f'peers-{name}', table, folder='cpu', versions=versions())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
