"""A GRPO step of `rlkernel train grpo` by phases, with its peak memory, against TRL with vLLM.

A row is [MODEL:]PROMPTSxGROUPxTOKENS; MODEL is 0.6b (Qwen3-0.6B's shape, the default), 8b-lora or 8b-full (Qwen3-8B's,
only ours). Random weights without an end-of-sequence token, so every completion has TOKENS tokens. Each arm is a
process on the same GPU, and their steps alternate. `--tiny` is a trial run of our arm on a CPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATHS = [str(ROOT), str(ROOT / "integrations"), str(ROOT / "benchmarks")]
sys.path[:0] = PATHS

from bench_trl import SHAPE, TINY, Arm, Size, worker

ROWS = "8x8x512,8x8x1024,8x16x1024,8x32x1024,8x64x1024,8x8x2048,8x8x4096,8x8x8192,8b-lora:8x8x2048,8b-full:8x8x2048"
PHASES = ("rollout", "score", "forward", "backward", "optimizer")
ARMS = ("rlkernel", "trl")
WARM_UP = 2
LARGE: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "tied": False,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "0.6b": ({}, []),
    "8b-lora": (LARGE, ["model.lora.rank=32"]),
    "8b-full": (LARGE, ["optimizer.offload=true"]),
}
"""Changes of the shape, and settings of our arm."""


def parsed(row: str) -> tuple[str, Size]:
    """(model, size) of a row's name.

    Raises:
        ValueError: the name has another form, or names an unknown model.
    """
    model, _, numbers = row.rpartition(":")
    prompts, group, tokens = map(int, numbers.split("x"))
    if (model or "0.6b") not in MODELS:
        raise ValueError(f"row {row!r}: the model is one of {', '.join(MODELS)}")
    return model or "0.6b", Size(prompts, group, tokens)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs within a group."""
    return [len(set(ids)) / 1000 + i % 8 / 100 for i, ids in enumerate(completion_ids)]


def ours(model: str, size: Size, folder: str, steps: int, tiny: bool, changes: list[str]) -> None:
    """Our arm: a run of the trainer that waits for a line on standard input before each step. `changes`: settings."""
    import torch

    from rlkernel.training.config import resolve
    from rlkernel.training.display import Display
    from rlkernel.training.session import run_training

    scratch = Path(tempfile.mkdtemp())
    vocabulary = (TINY if tiny else SHAPE)["vocab_size"]
    lines = (json.dumps({"prompt": text}) for text in size.texts(vocabulary))
    (scratch / "prompts.jsonl").write_text("\n".join(lines) + "\n")

    class Turns(Display):
        """Waits for its turn before each step and reports after it."""

        def say(self, text: str) -> None:
            print(text, file=sys.stderr)

        def start(self, title: str, total: int) -> None:
            print("READY", flush=True)
            self._wait()

        def step(self, step: int, values: dict[str, str]) -> None:
            seconds = time.perf_counter() - self.began
            (log,) = scratch.glob("run*/metrics.jsonl")
            metrics = json.loads(log.read_text().splitlines()[-1])
            row = {name: metrics.get(f"seconds_{name}", 0.0) for name in PHASES}
            row |= {name: metrics[name] for name in ("loss", "grad_norm", "length", "exact_frac", "tokens")}
            row |= {"seconds": seconds, "peak_gib": metrics["memory_mib"] / 1024, "reserved_gib": 0.0}
            if torch.cuda.is_available():
                row["reserved_gib"] = torch.cuda.memory_reserved() / 2**30
                torch.cuda.empty_cache()  # for the other arm's step
            print("ROW " + json.dumps(row), flush=True)
            if step < steps:
                self._wait()

        def stop(self) -> None:
            pass

        def _wait(self) -> None:
            sys.stdin.readline()
            self.began = time.perf_counter()

    chosen = {
        "run.output": str(scratch / "run"),
        "model.path": folder,
        "data.train": str(scratch / "prompts.jsonl"),
        "rewards": [f"{Path(__file__).resolve()}:reward"],
    }
    overrides = [
        f"rollout.prompts={size.prompts}", f"rollout.group_size={size.group}", f"rollout.max_tokens={size.tokens}",
        f"train.steps={steps}", "train.gradient_checkpointing=true", "data.heldout_rows=0", "eval.every=0",
        f"engine.max_num_seqs={size.prompts * size.group}", "run.probe_rollouts=0", "run.samples=0", "run.save=false",
        *MODELS[model][1], *changes,
    ]  # fmt: skip
    run_training(resolve("grpo", options=chosen, overrides=overrides), display=Turns())


def measure(
    row: str, folder: str, steps: int, tiny: bool, names: list[str], limit: float, changes: Sequence[str] = ()
) -> dict[str, Any]:
    """The figures of one row; arms that end early, or that run past `limit` seconds, leave a note."""
    model, size = parsed(row)
    begin, notes = time.monotonic(), list[str]()
    options = [f"--set={change}" for change in changes]
    arms: dict[str, Arm] = {}

    def end() -> None:
        for arm in list(arms.values()):  # a copy, because the timer's thread calls it too
            arm.process.kill()

    def attempt(name: str, act: Callable[[], Any]) -> Any:
        """The result of one turn of an arm; None if it ended, which is noted."""
        try:
            return act()
        except (RuntimeError, OSError) as error:
            late = time.monotonic() - begin >= limit
            notes.append(f"{name}: {f'stopped after {limit:.0f} s' if late else _reason(str(error))}")
            arms.pop(name).process.kill()
            return None

    timer = threading.Timer(limit, end)
    timer.start()
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    try:
        for name in names:  # sequentially, because vLLM measures free memory while it starts
            arms[name] = Arm(name, folder, steps, tiny, __file__, "--rows", row, *options)
            attempt(name, functools.partial(arms[name].wait, "READY"))
        for step in range(steps):
            for name in list(arms)[:: 1 if step % 2 else -1]:
                found = attempt(name, arms[name].step)
                if found is not None:
                    rows[name].append(found)
                    shown = {key: float(f"{value:.4g}") for key, value in found.items()}
                    print(f"[{time.monotonic() - begin:5.0f} s] {row} step {step + 1} {name} {shown}", flush=True)
        for arm in arms.values():
            arm.process.wait()
    finally:
        timer.cancel()
        end()
    return result(model, size, rows, min(WARM_UP, steps - 1), [*changes, *notes])


def _reason(error: str) -> str:
    """The last line of a worker's error."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "ended"


def result(
    model: str, size: Size, rows: dict[str, list[dict[str, float]]], warm_up: int, notes: list[str]
) -> dict[str, Any]:
    """Medians over the steps after the warm-up; None where an arm has none. Peaks are over all steps."""
    measured = {name: found[warm_up:] for name, found in rows.items()}

    def median(arm: str, name: str) -> float | None:
        found = [row[name] for row in measured.get(arm, ()) if name in row]
        return statistics.median(found) if found else None

    def milliseconds(arm: str, name: str) -> float | None:
        seconds = median(arm, name)
        return None if seconds is None else seconds * 1e3

    def peak(arm: str, name: str) -> float | None:
        return max((row[name] for row in rows.get(arm, ())), default=None)

    mine, theirs = milliseconds("rlkernel", "seconds"), milliseconds("trl", "seconds")
    return {
        "op": f"GRPO step, Qwen3-{model}",
        "shape": (size.prompts, size.group, size.tokens),
        "dtype": "bfloat16",
        "ours": "rlkernel train grpo",
        "baseline": "TRL, vLLM",
        "ours_ms": mine,
        "baseline_ms": theirs,
        "ratio": theirs / mine if mine and theirs else None,
        **{f"ours_{name}_ms": milliseconds("rlkernel", name) for name in PHASES},
        **{f"baseline_{name}_ms": milliseconds("trl", name) for name in ("generate", "sync", "forward")},
        "peak_gib": peak("rlkernel", "peak_gib"),
        "baseline_peak_gib": peak("trl", "peak_gib"),
        "torch_reserved_gib": peak("rlkernel", "reserved_gib"),
        "baseline_torch_reserved_gib": peak("trl", "reserved_gib"),
        "exact_frac": min((row["exact_frac"] for row in rows.get("rlkernel", ())), default=None),
        "tokens": int(sum(row["tokens"] for row in rows.get("rlkernel", ()))),
        "warm_up": warm_up,
        "rounds": len(measured.get("rlkernel", ())),
        "note": "; ".join(notes),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text, times in seconds and memory in GiB."""
    names = (
        "ours_ms",
        "baseline_ms",
        *(f"ours_{name}_ms" for name in PHASES),
        "peak_gib",
        "baseline_peak_gib",
        "ratio",
    )
    heads = ("ours s", "TRL s", *PHASES, "GiB", "TRL GiB", "ratio")
    lines = [" ".join([f"{'row':28}", *(f"{head:>9}" for head in heads)])]
    for row in rows:
        numbers = [(row[name], 1e3 if name.endswith("_ms") else 1.0) for name in names]
        cells = ["-" if value is None else f"{value / unit:.2f}" for value, unit in numbers]
        name = f"{row['op'].removeprefix('GRPO step, ')} {'x'.join(map(str, row['shape']))}"
        lines.append(" ".join([f"{name:28}", *(f"{cell:>9}" for cell in cells), row["note"]]))
    return "\n".join(lines)


def command_line() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", help=f"comma-separated; default {ROWS}")
    steps = f"steps of each arm; the first {WARM_UP} are warm-up, or all but the last"
    parser.add_argument("--steps", type=int, default=WARM_UP + 3, help=steps)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="default: both")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds per row")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of our arm")
    parser.add_argument("--tiny", action="store_true", help="use a tiny model on the CPU and write no result")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Prints every step and a table, and one record per row; returns 1 if a token's log-probability differed."""
    args = command_line().parse_args()
    names = (args.rows or ("2x4x16" if args.tiny else ROWS)).split(",")
    if args.arm:
        model, size = parsed(names[0])
        if args.arm == "trl":
            worker("off", args.model, args.steps, args.tiny, size)
        else:
            ours(model, size, args.model, args.steps, args.tiny, args.set)
        return 0
    import torch
    from results_io import write_result

    if not args.tiny and not torch.cuda.is_available():
        print("bench_grpo: torch sees no CUDA GPU; nothing is measured")
        return 0
    rows = []
    for name in names:
        model, size = parsed(name)
        arms = [arm for arm in args.arms if arm == "rlkernel" or (model == "0.6b" and not args.tiny)]
        context = {} if args.tiny else {"max_position_embeddings": max(4096, 2 * size.prompt_tokens + size.tokens)}
        changes = {**context, **MODELS[model][0]}
        with tempfile.TemporaryDirectory() as folder:
            # In a separate process, because this one must not hold the GPU.
            code = (
                f"import sys; sys.path[:0] = {PATHS!r}; import bench_trl; "
                f"bench_trl.make_model({folder!r}, {args.tiny}, eos=None, **{changes!r})"
            )
            subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
            rows.append(measure(name, folder, args.steps, args.tiny, arms, args.limit, args.set))
        if not args.tiny:
            print(f"wrote {write_result(f'bench_grpo_{name}'.replace(':', '_'), rows[-1:])}")
    print(table(rows))
    return int(any(row["exact_frac"] not in (None, 1) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
