"""Runs every `benchmarks/bench_*.py`, or those named, in a process of its own; exit status 1 where one fails.

`python benchmarks/run.py linear_logprob "linear --rounds 9"` runs two, the second with arguments of its own; with
`--gpus 0,1` a GPU takes the next one when it is free, and what they print goes to `build/benchmarks/`. Afterwards the
figures to reach are printed, of this machine's results.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
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
OWN_FILES = ("vllm", "vllm_exact")
"""Benchmarks whose result file is named after some of their arguments, by `result_name` of their own."""


def start(
    groups: Groups, script: Path, arguments: list[str], gpu: str | None, log: Path | None, limit: float | None
) -> str:
    """Runs a script, on one GPU where that is named, and returns what went wrong: "" where nothing did."""
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
    """Stem of the result file of a benchmark with these arguments; exits where it does not take them."""
    if name not in OWN_FILES:
        return f"bench_{name}"
    benchmark = importlib.import_module(f"bench_{name}")
    stem: str = benchmark.result_name(benchmark.options().parse_args(arguments))
    return stem


def chosen(numbers: str, visible: str | None) -> list[str]:
    """GPUs of `--gpus` as CUDA_VISIBLE_DEVICES names them; under an allocation a number counts in its list.

    Raises:
        ValueError: an entry is no number, is there twice, or lies outside the allocation.
    """
    entries = [entry.strip() for entry in numbers.split(",")]
    for entry in entries:
        if not (entry.isascii() and entry.isdigit()):
            raise ValueError(f"{entry!r} in {numbers!r} is no GPU; expected numbers with commas, as 0,1")
    places = [int(entry) for entry in entries]
    if len(set(places)) < len(places):
        raise ValueError(f"{numbers!r} has a GPU twice; name each once")
    if visible is None:
        return [str(place) for place in places]
    # CUDA reads the list up to its first entry that is none
    offered = list(itertools.takewhile(lambda name: name not in ("", "-1"), map(str.strip, visible.split(","))))
    for place in places:
        if place >= len(offered):
            raise ValueError(f"{place}, but CUDA_VISIBLE_DEVICES={visible!r} has {len(offered)}; count in it from 0")
    return [offered[place] for place in places]


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
    files = [writes(name, arguments) for name, *arguments in work]
    for file in dict.fromkeys(files):
        same = [shlex.join(words) for words, other in zip(work, files, strict=True) if other == file]
        if len(same) > 1:
            parser.error(f"{' and '.join(same)} would write one result file, {file}.json; run one of them")
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
