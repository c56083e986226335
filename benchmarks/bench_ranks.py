"""Several GPUs of one machine: the fixed-order all-reduce against NCCL's, and GRPO steps of `rlkernel train` by ranks.

`all-reduce`: op `all_reduce` on fp32 partial results of 64 KiB to 64 MiB, with the result in fp32 against NCCL's fp32
sum, and in bf16 against NCCL's bf16 sum, which sends half the bytes. Each time is that of a CUDA graph of many calls.
`grpo`: Qwen3-0.6B's shape, or 8B's, under torchrun on each number of ranks: seconds of a step, and SHA-256 of the final
weights, which must be equal and have changed. The head is not tied, because a tied random model repeats one token.
`--trl` adds TRL with FSDP2 and vLLM on as many GPUs. `--tiny` is a trial run on CPUs over gloo.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
PATHS = [str(ROOT), str(ROOT / "integrations"), str(ROOT / "benchmarks")]
sys.path[:0] = PATHS

import bench_grpo
from bench_trl import ENVIRONMENT, SHAPE, TINY
from processes import Groups, exit_on_signals
from results_io import write_result

from rlkernel import ops
from rlkernel.ops.all_reduce import add_ranks, all_gather_single, register_group

KIB = [64 << i for i in range(11)]
"""Sizes of the fp32 partial result."""
CALLS = 20
"""All-reduces of one timed graph."""
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
"""What `accelerate launch` sets for FSDP2; it starts no second process on a CPU."""
Row = dict[str, Any]


def graph_of(fn: Callable[[], object], cuda: bool) -> Callable[[], object]:
    """`CALLS` calls of a function: one CUDA graph, or a loop on a CPU."""
    fn()
    if not cuda:
        return lambda: [fn() for _ in range(CALLS)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            fn()
    return graph.replay


def milliseconds(candidates: list[Callable[[], object]], cuda: bool, rounds: int) -> list[float]:
    """Median time of one call of each candidate on the slowest rank; the candidates alternate."""
    device = "cuda" if cuda else "cpu"
    repeated, times = [graph_of(fn, cuda) for fn in candidates], torch.empty(rounds, len(candidates), device=device)
    for i in range(rounds):
        for j, run in enumerate(repeated):
            run()  # the ranks meet here
            if cuda:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                run()
                end.record()
                end.synchronize()
                times[i, j] = begin.elapsed_time(end) / CALLS
            else:
                start = time.perf_counter()
                run()
                times[i, j] = (time.perf_counter() - start) * 1e3 / CALLS
    found = times.median(0).values
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(x) for x in found]


def sums(rank: int, ranks: int, folder: str, tiny: bool, rounds: int, path: list[str]) -> None:
    """One rank of the all-reduce; rank 0 writes the rows to `folder`."""
    sys.path[:] = path
    torch.manual_seed(rank)
    cuda = not tiny
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    group, rows = register_group(dist.group.WORLD), list[Row]()
    for kib in KIB[:3] if tiny else KIB:
        partial = torch.randn(kib * 256 // 1024, 1024, device=device)
        parts = partial.new_empty(ranks * partial.shape[0], 1024)
        all_gather_single(parts, partial, group=dist.group.WORLD)
        for dtype in (torch.float32, torch.bfloat16):
            expected = add_ranks(parts.view(ranks, -1), None, dtype, 1024).view(partial.shape)
            differing = (ops.all_reduce(partial, group, dtype=dtype) != expected).sum()
            theirs = torch.zeros(partial.shape, dtype=dtype, device=device)  # added in place, so zeros stay finite
            mine, stock = milliseconds(
                [
                    functools.partial(ops.all_reduce, partial, group, dtype=dtype),
                    functools.partial(dist.all_reduce, theirs),
                ],
                cuda,
                rounds,
            )
            dist.all_reduce(differing)
            rows.append(
                {
                    "op": f"all-reduce, {ranks} ranks",
                    "shape": tuple(partial.shape),
                    "kib": kib,
                    "dtype": str(dtype).removeprefix("torch."),
                    "ours": "fixed order",
                    "baseline": "NCCL" if cuda else "gloo",
                    "ours_ms": mine,
                    "baseline_ms": stock,
                    "ratio": stock / mine,
                    "mismatches": int(differing),
                }
            )
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def all_reduce(ranks: int, tiny: bool, rounds: int) -> list[Row]:
    """Rows of the all-reduce on some ranks."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(sums, (ranks, folder, tiny, rounds, sys.path), nprocs=ranks)
        found: list[Row] = json.loads(Path(folder, "rows.json").read_text())
    return found


def weights(folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """SHA-256 of a model's safetensors files in the order of their names, and the tensors."""
    files, digest = sorted(folder.glob("*.safetensors")), hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest(), {name: tensor for file in files for name, tensor in load_file(file).items()}


def ours(
    folder: Path, model: str, size: bench_grpo.Size, ranks: int, steps: int, tiny: bool, limit: float, more: list[str]
) -> Row:
    """Seconds of each step of `rlkernel train grpo` under torchrun, and SHA-256 of the weights after the last.

    `more`: settings.
    """
    vocabulary = (TINY if tiny else SHAPE)["vocab_size"]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in size.texts(vocabulary)))
    run = folder / f"run{ranks}"
    command = [
        "-m", "rlkernel", "train", "grpo", "--model", model, "--data", str(prompts), "--out", str(run),
        "--reward", f"{bench_grpo.__file__}:reward", f"rollout.prompts={size.prompts}",
        f"rollout.group_size={size.group}", f"rollout.max_tokens={size.tokens}", f"train.steps={steps}",
        "train.gradient_checkpointing=true", "data.heldout_rows=0", "eval.every=0", "run.probe_rollouts=0",
        "run.samples=0", "train.leaves=8", "optimizer.lr=1e-4", f"engine.max_num_seqs={size.prompts * size.group}",
        f"run.device={'cpu' if tiny else 'cuda'}", *more,
    ]  # fmt: skip
    launched(command, ranks, limit, {})
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    digest, after = weights(run / "model")
    _, before = weights(Path(model))
    changed = sum(int((value != before[name]).sum()) for name, value in after.items() if name in before)
    seconds = [row["seconds"] for row in metrics]
    return {
        "seconds": seconds,
        "sha256": digest,
        "changed": changed,
        "exact_frac": min(row["exact_frac"] for row in metrics),
    }


def trl(model: str, row: str, ranks: int, steps: int, tiny: bool, limit: float) -> list[float]:
    """Seconds of each step of TRL with vLLM in each process, under FSDP2 from two ranks on."""
    command = [bench_grpo.__file__, "--arm", "trl", "--rows", row, "--model", model, "--steps", str(steps)]
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **(FSDP2 if ranks > 1 else {})}  # for vLLM's external launcher
    if tiny:
        variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
    text = launched([*command, *(["--tiny"] if tiny else [])], ranks, limit, variables)
    return [json.loads(x.removeprefix("ROW "))["seconds"] for x in text.splitlines() if x.startswith("ROW ")]


def launched(arguments: list[str], ranks: int, limit: float, variables: dict[str, str]) -> str:
    """Standard output of ranks under torchrun.

    Raises:
        RuntimeError: a rank failed; with the end of the errors.
        TimeoutExpired: it ran longer than `limit` seconds, and was killed with its ranks.
    """
    path = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])
    environment = {"OMP_NUM_THREADS": "4", **os.environ, **ENVIRONMENT, **variables, "PYTHONPATH": path}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        status = Groups().run(
            [*command, *arguments], limit, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, env=environment
        )
        out.seek(0)
        errors.seek(0)
        if status != 0:
            text = errors.read()
            reasons = [x for x in text.splitlines() if "Error: " in x] or [f"status {status}"]
            raise RuntimeError(f"{text[-8000:]}\n{ranks} ranks: {reasons[-1]}")
        return out.read()


def grpo(name: str, numbers: list[int], steps: int, tiny: bool, with_trl: bool, limit: float) -> list[Row]:
    """One row per number of ranks. Those that do not end within `limit` seconds have a note."""
    label, size = bench_grpo.parsed(name)
    changes, more = bench_grpo.MODELS[label]
    end, rows = time.monotonic() + limit, list[Row]()
    left = lambda: max(1.0, end - time.monotonic())
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as name_of_folder:
        folder = Path(name_of_folder)
        model = str(folder / "model")
        # In a separate process, because this one must not hold the GPU.
        code = (
            f"import sys; sys.path[:0] = {PATHS!r}; import bench_trl; "
            f"bench_trl.make_model({model!r}, {tiny}, eos=None, **{ {'tied': False, **changes}!r})"
        )
        subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        for ranks in numbers:
            mine, theirs, notes = Row(), list[float](), list[str]()
            try:
                mine = ours(folder, model, size, ranks, steps, tiny, left(), more)
                if with_trl:
                    theirs = trl(model, name, ranks, steps, tiny, left())
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(error, file=sys.stderr)
                notes.append(str(error).strip().splitlines()[-1][:300])
            median = lambda found: (
                statistics.median(found[bench_grpo.WARM_UP :]) * 1e3 if found[bench_grpo.WARM_UP :] else None
            )
            a, b = median(mine.get("seconds", [])), median(theirs)
            rows.append(
                {
                    "op": f"GRPO step, Qwen3-{label}, {ranks} rank{'s' * (ranks > 1)}",
                    "shape": (size.prompts, size.group, size.tokens),
                    "dtype": "bfloat16",
                    "ours": "torchrun rlkernel train grpo",
                    "baseline": ("TRL, FSDP2, vLLM" if ranks > 1 else "TRL, vLLM") if with_trl else "",
                    "ours_ms": a,
                    "baseline_ms": b,
                    "ratio": b / a if a and b else None,
                    "updates": steps,
                    "sha256": mine.get("sha256", ""),
                    "changed_elements": mine.get("changed"),
                    "exact_frac": mine.get("exact_frac"),
                    "note": "; ".join(notes),
                }
            )
            print(rows[-1], flush=True)
    return rows


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", choices=("all-reduce", "grpo"), default="all-reduce")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="of all-reduce: those above 1")
    parser.add_argument("--rounds", type=int, default=21, help="of all-reduce")
    parser.add_argument("--row", help="[MODEL:]PROMPTSxGROUPxTOKENS of grpo, default 8x8x1024; models of bench_grpo")
    steps = bench_grpo.WARM_UP + 3
    parser.add_argument("--steps", type=int, default=steps, help="updates of grpo, two of them warm-up")
    parser.add_argument("--trl", action="store_true", help="also TRL on as many GPUs")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of grpo: later runs are killed")
    parser.add_argument("--tiny", action="store_true", help="use CPUs and a tiny model, and write no result")
    return parser


def result_name(args: argparse.Namespace) -> str:
    """`bench_ranks_<part>_<ranks>`, with the model if it is not the default, and "trl" if TRL ran too."""
    model = [(args.row or "").rpartition(":")[0]] if ":" in (args.row or "") else []
    return "_".join(["bench_ranks", args.part, *model, str(max(args.ranks)), *(["trl"] if args.trl else [])])


def main() -> int:
    """Prints the rows and writes the result; returns 1 if bits differ or a run failed."""
    args = options().parse_args()
    exit_on_signals()
    if not args.tiny and torch.cuda.device_count() < max(args.ranks):
        print(f"bench_ranks: torch sees {torch.cuda.device_count()} GPUs of {max(args.ranks)}; nothing is measured")
        return 0
    if args.part == "all-reduce":
        rows = [row for n in args.ranks if n > 1 for row in all_reduce(n, args.tiny, args.rounds)]
        for row in rows:
            print(f"{row['op']}, {row['kib']} KiB, {row['dtype']}: {row['ours_ms'] * 1e3:.1f} us, {row['ratio']:.3f}x")
        failed = any(row["mismatches"] for row in rows)
    else:
        row = args.row or ("8x4x16" if args.tiny else "8x8x1024")
        rows = grpo(row, args.ranks, args.steps, args.tiny, args.trl, args.limit)
        failed = len({row["sha256"] for row in rows}) > 1 or any(
            row["note"] or row["exact_frac"] != 1 or not row["changed_elements"] for row in rows
        )
    if not args.tiny:
        print(f"wrote {write_result(result_name(args), rows)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
