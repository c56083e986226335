"""Runs every `benchmarks/bench_*.py`, or those named, in a process of its own; exit status 1 where one fails.

`python benchmarks/run.py linear_logprob "linear --rounds 9"` runs two, the second with arguments of its own; with
`--gpus 0,1` a GPU takes the next one when it is free, and what they print goes to `build/benchmarks/`. Afterwards the
figures to reach are printed.
"""

from __future__ import annotations

import argparse
import os
import queue
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOGS = HERE.parent / "build" / "benchmarks"


def start(script: Path, arguments: list[str], gpu: str | None, log: Path | None, limit: float | None) -> str:
    """Runs a script, on one GPU where that is named, and returns what went wrong: "" where nothing did."""
    environment = {**os.environ, **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})}
    out = None if log is None else log.open("w")
    try:
        done = subprocess.run(
            [sys.executable, str(script), *arguments], env=environment, stdout=out, stderr=out and subprocess.STDOUT,
            timeout=limit,
        )  # fmt: skip
        return f"exit status {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        return f"stopped after {limit:.0f} s"
    finally:
        if out is not None:
            out.close()


def main() -> int:
    scripts = {path.stem.removeprefix("bench_"): path for path in sorted(HERE.glob("bench_*.py"))}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(scripts)}; default: all")
    parser.add_argument("--gpus", help="their numbers, with commas; default: one after the other on what is visible")
    parser.add_argument("--limit", type=float, help="seconds that one may take")
    args = parser.parse_args()
    work = [shlex.split(name) for name in args.names] or [[name] for name in scripts]
    unknown = [" ".join(words) for words in work if not words or words[0] not in scripts]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(scripts)}")
    gpus = [gpu.strip() for gpu in args.gpus.split(",")] if args.gpus else [None]
    free: queue.Queue[str | None] = queue.Queue()
    for gpu in gpus:
        free.put(gpu)
    if args.gpus:
        LOGS.mkdir(parents=True, exist_ok=True)

    def run(number: int) -> str:
        (name, *arguments), gpu = work[number], free.get()
        log = LOGS / f"{number}-{name}.log" if args.gpus else None
        if log is None:
            print(f"== {scripts[name].name}", flush=True)
        begin = time.perf_counter()
        try:
            wrong = start(scripts[name], arguments, gpu, log, args.limit)
        finally:
            free.put(gpu)
        where = "" if log is None else f"{shlex.join(work[number])}, GPU {gpu}, {log}: "
        print(f"== {where}{time.perf_counter() - begin:.0f} s{wrong and f', {wrong}'}", flush=True)
        return wrong and f"{shlex.join(work[number])} ({wrong})"

    with ThreadPoolExecutor(len(gpus)) as pool:
        failed = [what for what in pool.map(run, range(len(work))) if what]
    subprocess.run([sys.executable, str(HERE / "figures.py")])
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
