"""Runs every `benchmarks/bench_*.py`, or those named, in a process of its own; exit status 1 where one fails.

`python benchmarks/run.py linear_logprob scaling` runs two. Afterwards the figures to reach are printed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    scripts = {path.stem.removeprefix("bench_"): path for path in sorted(HERE.glob("bench_*.py"))}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(scripts)}; default: all")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in scripts]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(scripts)}")
    failed = []
    for name in args.names or scripts:
        print(f"== {scripts[name].name}", flush=True)
        begin = time.perf_counter()
        if subprocess.run([sys.executable, str(scripts[name])]).returncode:
            failed.append(name)
        print(f"== {time.perf_counter() - begin:.0f} s", flush=True)
    subprocess.run([sys.executable, str(HERE / "figures.py")])
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
