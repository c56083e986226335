"""Runs every `benchmarks/bench_*.py`, or those named, in separate processes; exit status 1 if one fails.

`python benchmarks/run.py linear_logprob "linear --rounds 9"` runs two, the second with arguments. With `--gpus 0,1`
each free GPU takes the next one, and output goes to `build/benchmarks/`. Finally the targets are printed for this
machine.
"""

from __future__ import annotations

import argparse
import importlib
import os
import queue
import shlex
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from processes import Groups, exit_on_signals, pool_of

LOGS = HERE.parent / "build" / "benchmarks"
OWN_FILES = ("media", "ranks", "vllm", "vllm_exact", "tp_leaves")
"""Benchmarks whose own `result_name` derives the name of the result file from their arguments."""


def start(
    groups: Groups, script: Path, arguments: list[str], gpu: str | None, log: Path | None, limit: float | None
) -> str:
    """Runs a script, on the given GPU if any, and returns the problem, or "" on success."""
    environment = {**os.environ, **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})}
    out = None if log is None else log.open("w")
    try:
        command = [sys.executable, str(script), *arguments]
        status = groups.run(command, limit, env=environment, stdout=out, stderr=out and subprocess.STDOUT)
        return f"exit status {status}" if status else ""
    except subprocess.TimeoutExpired:
        return f"stopped after {limit:.0f} s"
    finally:
        if out is not None:
            out.close()


def writes(name: str, arguments: list[str]) -> str:
    """Stem of the result file of a benchmark with these arguments; exits if they are invalid."""
    if name not in OWN_FILES:
        return f"bench_{name}"
    benchmark = importlib.import_module(f"bench_{name}")
    stem: str = benchmark.result_name(benchmark.options().parse_args(arguments))
    return stem


def chosen(numbers: str, visible: str | None) -> list[str]:
    """GPUs of `--gpus` as CUDA_VISIBLE_DEVICES names them. If that variable is set, numbers are indices into its list.

    Raises:
        ValueError: an entry is not the number of a visible GPU.
    """
    names = numbers.split(",")
    if not all(name.isdecimal() for name in names):
        raise ValueError(f"expected comma-separated numbers such as 0,1, got {numbers!r}")
    if visible is None:
        return names
    offered = visible.split(",") if visible else []
    if max(map(int, names)) >= len(offered):
        raise ValueError(f"{numbers}, but CUDA_VISIBLE_DEVICES={visible!r} has {len(offered)}, counted from 0")
    return [offered[int(name)] for name in names]


def main() -> int:
    scripts = {path.stem.removeprefix("bench_"): path for path in sorted(HERE.glob("bench_*.py"))}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(scripts)}; default: all")
    parser.add_argument("--gpus", help="comma-separated numbers; default: sequentially on the visible GPU")
    parser.add_argument("--limit", type=float, help="time limit of each, in seconds")
    args = parser.parse_args()
    work = [shlex.split(name) for name in args.names] or [[name] for name in scripts]
    unknown = [" ".join(words) for words in work if not words or words[0] not in scripts]
    if unknown:
        parser.error(f"unknown benchmark {', '.join(unknown)}; choose from {', '.join(scripts)}")
    files = [writes(name, arguments) for name, *arguments in work]
    for file in dict.fromkeys(files):
        same = [shlex.join(words) for words, other in zip(work, files, strict=True) if other == file]
        if len(same) > 1:
            parser.error(f"{' and '.join(same)} would write the same result file, {file}.json; run one of them")
    gpus: list[str | None] = [None]
    if args.gpus is not None:
        try:
            gpus = [*chosen(args.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))]
        except ValueError as error:
            parser.error(f"--gpus: {error}")
        LOGS.mkdir(parents=True, exist_ok=True)
    free: queue.Queue[str | None] = queue.Queue()
    for gpu in gpus:
        free.put(gpu)
    groups = Groups()

    def run(number: int) -> str:
        (name, *arguments), gpu = work[number], free.get()
        log = LOGS / f"{number}-{name}.log" if args.gpus else None
        if log is None:
            print(f"== {scripts[name].name}", flush=True)
        begin = time.perf_counter()
        try:
            wrong = start(groups, scripts[name], arguments, gpu, log, args.limit)
        finally:
            free.put(gpu)
        where = "" if log is None else f"{shlex.join(work[number])}, GPU {gpu}, {log}: "
        print(f"== {where}{time.perf_counter() - begin:.0f} s{wrong and f', {wrong}'}", flush=True)
        return wrong and f"{shlex.join(work[number])} ({wrong})"

    with pool_of(len(gpus), groups) as pool:
        failed = [what for what in pool.map(run, range(len(work))) if what]
    subprocess.run([sys.executable, str(HERE / "figures.py"), "--here"])
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
