"""The fixed-order all-reduce of tensor parallelism against NCCL's, 64 KiB to 64 MiB, on the GPUs of one host.

A call is one of 20 in a CUDA graph. Ours adds fp32 partial results in the tree over ranks and rounds to bf16; NCCL adds
the same fp32 tensor in an order of its own, and half the bytes in bf16, as stock tensor parallelism does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import torch
import torch.distributed as dist
from results_io import write_result

from rlkernel import ops
from rlkernel.ops.all_reduce import register_group

SIZES = tuple(1 << power for power in range(16, 27))
"""Bytes of a rank's fp32 partial result."""
CALLS, N = 20, 4096


def repeated(call: Callable[[], object], cuda: bool) -> Callable[[], object]:
    """CALLS calls, on a GPU as one graph."""
    call()
    if not cuda:
        return lambda: [call() for _ in range(CALLS)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph.replay


def milliseconds(run: Callable[[], object], cuda: bool) -> float:
    """Time of one call; the ranks begin together."""
    dist.barrier()
    if not cuda:
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e3 / CALLS
    begin_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin_event.record()
    run()
    end_event.record()
    end_event.synchronize()
    return begin_event.elapsed_time(end_event) / CALLS


def measure(rank: int, ranks: int, folder: str, tiny: bool, rounds: int) -> None:
    """One rank; writes its median milliseconds for every size and kind."""
    cuda = not tiny
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    device, medians = torch.device("cuda", rank) if cuda else torch.device("cpu"), dict[int, dict[str, float]]()
    group = register_group(dist.group.WORLD)
    for size in SIZES[:2] if tiny else SIZES:
        partial = torch.randn(size // 4 // N, N, device=device)
        single, half = torch.zeros_like(partial), torch.zeros_like(partial, dtype=torch.bfloat16)
        kinds: dict[str, Callable[[], object]] = {
            "ours": lambda partial=partial: ops.all_reduce(partial, group, dtype=torch.bfloat16),  # type: ignore[misc]
            "NCCL": lambda single=single: dist.all_reduce(single),  # type: ignore[misc]
            "NCCL bf16": lambda half=half: dist.all_reduce(half),  # type: ignore[misc]
        }
        runs = {kind: repeated(call, cuda) for kind, call in kinds.items()}
        times: dict[str, list[float]] = {kind: [] for kind in runs}
        for i in range(rounds + 1):
            for kind in list(runs)[:: 1 if i % 2 else -1]:
                times[kind].append(milliseconds(runs[kind], cuda))
        medians[size] = {kind: statistics.median(found[1:]) for kind, found in times.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(medians))
    dist.barrier()
    dist.destroy_process_group()


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=Path(__file__).name, description=__doc__)
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="a trial over gloo on the CPU; writes no result")
    return parser


def result_name(args: argparse.Namespace) -> str:
    """`bench_all_reduce_<R>-gpus`."""
    return f"bench_all_reduce_{args.ranks}-gpus"


def main() -> int:
    """Prints a line per size, the slowest rank's time, and writes the result."""
    args = options().parse_args()
    if not args.tiny and torch.cuda.device_count() < args.ranks:
        print(
            f"bench_all_reduce: torch sees {torch.cuda.device_count()} CUDA GPUs of {args.ranks}; nothing is measured"
        )
        return 0
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (args.ranks, folder, args.tiny, args.rounds), nprocs=args.ranks)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(args.ranks)]
    rows: list[dict[str, Any]] = []
    for size in found[0]:
        ours, nccl, half = (max(each[size][kind] for each in found) for kind in ("ours", "NCCL", "NCCL bf16"))
        rows.append(
            {
                "op": f"all_reduce, {args.ranks} GPUs", "shape": [int(size) // 4 // N, N], "dtype": "float32",
                "ours": "rlkernel", "baseline": "NCCL", "ours_ms": ours, "baseline_ms": nccl, "ratio": nccl / ours,
                "baseline_bf16_ms": half,
            }
        )  # fmt: skip
        print(
            f"{int(size) >> 10:6} KiB: ours {ours:.4f} ms, NCCL {nccl:.4f} ms ({nccl / ours:.2f}x), bf16 {half:.4f} ms"
        )
    if not args.tiny:
        print(f"wrote {write_result(result_name(args), rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
