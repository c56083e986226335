"""`rlkernel-drift compare` end to end as a user runs it: two engines on one model, and two files of 100,000 tokens.

On a GPU, at Qwen3-0.6B's shape with random weights: vLLM and transformers with their defaults, and both with rlkernel.
On a CPU only the two files. `--reports DIR` keeps the verdicts and pages.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "consistency")]

from vllm_arms import entry_point, make_model, memory, temporary_folder

PRESET = "qwen3-0.6b"
FILE_TOKENS, COMPLETION = 100_000, 500
SIZES = {"cudagraph_capture_sizes": [1, 4, 8]}
TIMEOUT = 170


@dataclass(frozen=True)
class Case:
    """A comparison of two engines.

    Attributes:
        name: of the report; words: of the row. alone: nothing else runs at the same time, so that its time is valid.
        engine: further arguments of vLLM's engine.
    """

    name: str
    words: str
    rollout: str
    train: str
    options: tuple[str, ...] = ()
    alone: bool = False
    engine: tuple[tuple[str, Any], ...] = ()


CASES = (
    Case(
        "vllm-default", "vLLM default (eager), transformers default", "vllm", "hf", ("--profile", "bitwise"), alone=True
    ),
    Case(
        "vllm-graphs", "the same, vLLM in CUDA graphs", "vllm", "hf",
        ("--profile", "bitwise", "--operators", "fingerprint"),
        engine=(("compilation_config", {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", **SIZES}),),
    ),
    Case(
        "rlkernel", "vLLM with rlkernel (compiled, CUDA graphs), transformers with rlkernel", "vllm+rlkernel",
        "hf+rlkernel", ("--operators", "fingerprint"), engine=(("compilation_config", SIZES),),
    ),
    Case(
        "rlkernel-eager", "vLLM with rlkernel (eager), transformers with rlkernel", "vllm+rlkernel", "hf+rlkernel",
        ("--profile", "bitwise"), alone=True,
    ),
)  # fmt: skip


def environment(folder: Path) -> dict[str, str]:
    """Environment variables of a comparison that runs from this checkout."""
    paths = (entry_point(folder), ROOT, ROOT / "integrations", ROOT / "consistency", os.environ.get("PYTHONPATH", ""))
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if str(path)),
    }


def command(rollout: str, train: str, name: str, *options: str) -> list[str]:
    """A comparison with inputs and outputs in the working directory, so that a report contains no absolute paths."""
    files = ["--json", f"{name}.json", "--html", f"{name}.html"]
    return [sys.executable, "-m", "rlkernel_drift", "compare", rollout, train, *options, *files]


def run(commands: dict[str, list[str]], env: dict[str, str], folder: Path) -> dict[str, tuple[float, int]]:
    """Seconds and exit status of commands that run in parallel; they are killed after TIMEOUT seconds."""
    start = time.perf_counter()
    logs = {name: (folder / f"{name}.log").open("w") for name in commands}
    running = {
        name: subprocess.Popen(words, env=env, cwd=folder, stdout=logs[name], stderr=subprocess.STDOUT)
        for name, words in commands.items()
    }
    done: dict[str, tuple[float, int]] = {}
    while len(done) < len(running):
        time.sleep(0.05)
        for name, process in running.items():
            if time.perf_counter() - start > TIMEOUT:
                process.kill()
                process.wait()
            if name not in done and process.poll() is not None:
                done[name] = (time.perf_counter() - start, process.returncode)
    for name in commands:
        logs[name].close()
        if not 0 <= done[name][1] <= 1:
            print((folder / f"{name}.log").read_text(errors="replace")[-3000:], flush=True)
    return done


def row(words: str, name: str, seconds: float, status: int, reports: Path, parallel: int = 0) -> dict[str, Any]:
    """A verdict as a row of the result."""
    found: dict[str, Any] = {"comparison": words, "seconds": round(seconds, 2), "parallel": parallel, "exit": status}
    if not (reports / f"{name}.json").is_file():
        return found
    verdict = json.loads((reports / f"{name}.json").read_text())
    statistics, first = verdict.get("statistics") or {}, (verdict.get("layers") or {}).get("first")
    causes = [f["cause"] for g in verdict["gates"] for f in g["findings"] if f["severity"] == "error"]
    layers = next((g for g in verdict["gates"] if g["name"] == "layers"), {"status": "", "summary": ""})
    at = ""
    if first is not None:
        distance = "" if first["ulps"] is None else f", {first['ulps']} ulp"
        at = f"{first['operator']}{distance}, {first['rows']} of {first['of']} rows"
    return {
        **found,
        "status": verdict["status"],
        "tokens": statistics.get("tokens"),
        "equal": statistics.get("equal"),
        "mean_abs": statistics.get("mean"),
        "max_abs": statistics.get("maximum"),
        "cause": causes[-1] if causes else "",
        "operators": at or (layers["summary"] if layers["status"] == "passed" else ""),
        "html_bytes": (reports / f"{name}.html").stat().st_size,
        "note": verdict["headline"],
    }


def engines(names: list[str], reports: Path) -> Iterator[dict[str, Any]]:
    """The comparisons of two engines. Those whose time counts run alone, the others in parallel."""
    folder = Path(temporary_folder())
    model = make_model(PRESET, folder)
    chosen = [case for case in CASES if case.name in names]
    together = [case for case in chosen if not case.alone]
    # The parallel ones run first, so that the timed ones find warm vLLM caches, as in a user's second run.
    for group in [*([together] if together else []), *([case] for case in chosen if case.alone)]:
        env = environment(folder)
        commands = {}
        for case in group:
            given = {} if case.alone else {"max_model_len": 4096, "max_num_seqs": 8, **memory(8 << 30)}
            share = ("--engine-args", json.dumps(given | dict(case.engine))) if given else ()
            sides = f"{case.rollout}:{model.name}", f"{case.train}:{model.name}"
            commands[case.name] = command(*sides, case.name, *case.options, *share)
        done = run(commands, env, folder)
        for case in group:
            for kind in ("json", "html"):
                if (folder / f"{case.name}.{kind}").is_file():
                    shutil.copy(folder / f"{case.name}.{kind}", reports)
            yield row(case.words, case.name, *done[case.name], reports, len(group) - 1)


def files() -> dict[str, Any]:
    """Two capsules of 100,000 counted tokens that differ by bf16 noise, compared on two cores."""
    import numpy as np

    from rlkernel_drift.capsule import Manifest, Sampling, build_capsule, write_capsule

    generator = np.random.default_rng(0)
    count = FILE_TOKENS // COMPLETION
    prompts = [generator.integers(3, 150000, 100).tolist() for _ in range(count)]
    completions = [generator.integers(3, 150000, COMPLETION).tolist() for _ in range(count)]
    logp = -generator.exponential(1.0, (count, COMPLETION)).astype(np.float32)
    noise = generator.normal(0, 0.01, logp.shape).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        for side, stream, values in (("rollout", "recorded", logp), ("train", "train", logp + noise)):
            manifest = Manifest(side=side, engine="file", sampling=Sampling(), config={"dtype": "bfloat16"})  # type: ignore[arg-type]
            capsule = build_capsule(manifest, prompts, completions, {f"{stream}.processed": list(values)})
            write_capsule(capsule, Path(folder) / side)
        words = command("rollout", "train", "files")
        cores = sorted(os.sched_getaffinity(0))[:2]
        env = environment(Path(folder)) | {"OMP_NUM_THREADS": str(len(cores))}
        seconds, status = run({"files": ["taskset", "-c", ",".join(map(str, cores)), *words]}, env, Path(folder))[
            "files"
        ]
        found = row(f"two files of {FILE_TOKENS} tokens, {len(cores)} cores", "files", seconds, status, Path(folder))
    print(found, flush=True)
    return found


def main() -> int:
    """Prints and writes `bench_drift.json`; returns 1 if a verdict is not the expected one."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="+", choices=names, default=names)
    parser.add_argument("--reports", type=Path, help="keep verdicts and pages here")
    parser.add_argument("--folder", help="folder of the result, by default the machine's; `cpu` is the documentation's")
    args = parser.parse_args()
    import torch
    from results_io import write_result

    with tempfile.TemporaryDirectory() as temporary:
        reports = args.reports or Path(temporary)
        reports.mkdir(parents=True, exist_ok=True)
        if not torch.cuda.is_available():
            print("bench_drift: torch sees no CUDA GPU, so only the two files are compared")
            rows = [files()]
            print(f"wrote {write_result('bench_drift', rows, folder=args.folder)}")
            return 0
        from importlib.metadata import version

        versions = {name: version(name) for name in ("vllm", "transformers")}
        rows = [files()]
        for found in engines(args.case, reports):
            print(found, flush=True)
            rows.append(found)
            # after each comparison, in case the run is stopped
            path = write_result("bench_drift", rows, folder=args.folder, **versions)
    print(f"wrote {path}")
    return int(any(r["exit"] != (0 if "with rlkernel" in r["comparison"] else 1) for r in rows[1:]))


if __name__ == "__main__":
    sys.exit(main())
